"""The files of one run: the only module that knows where they lie."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from slurmddp.errors import RunNotFoundError, SlurmddpError
from slurmddp.runs.folder.jsonl import append_line, read_lines


def is_there(path: Path) -> bool:
    """Return whether `path` exists; False if this can't be found out.

    A network file system may answer from its cache for up to a minute. Opening the folder makes it ask its
    server.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        os.stat(path.name, dir_fd=folder)
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


class RunFolder:
    """The folder of one run, `runs/<name>-<hash>/`: its files and events."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def overrides_file(self) -> Path:
        return self.path / "overrides.txt"

    @property
    def script_file(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def job_file(self) -> Path:
        """The settings of the job for the batch step: numbers and rules, as JSON."""
        return self.path / "job.json"

    @property
    def batch_file(self) -> Path:
        """The program of the batch step, frozen at submission."""
        return self.path / "job.pyz"

    @property
    def code_dir(self) -> Path:
        return self.path / "code"

    @property
    def attempts_file(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def figure_file(self) -> Path:
        return self.path / "report.png"

    @property
    def sample_file(self) -> Path:
        """Text that a language model wrote at the end of its training."""
        return self.path / "sample.txt"

    @property
    def excluded_file(self) -> Path:
        """The nodes that failed under the run, each with the time until which it is avoided."""
        return self.path / "excluded.jsonl"

    @property
    def cancelled_file(self) -> Path:
        """Exists after a person has cancelled the run: nothing may requeue it."""
        return self.path / "cancelled"

    @property
    def stop_file(self) -> Path:
        """Exists after a person has asked the run to save and leave: nothing may requeue it."""
        return self.path / "stop"

    def log_dir(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.log_dir(attempt) / f"rank-{rank}.log"

    def failure_file(self, attempt: int) -> Path:
        """The first failure of an attempt: rank, host, cause, last lines."""
        return self.log_dir(attempt) / "failure.json"

    def exit_file(self, attempt: int, node: int) -> Path:
        """The exit code of a node's agent: the agent writes it last, so a killed agent leaves none."""
        return self.log_dir(attempt) / f"exit-node-{node}"

    def exit_code_of(self, attempt: int, node: int) -> int | None:
        """Return the exit code that a node's agent left; None without one."""
        try:
            text = self.exit_file(attempt, node).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return int(text) if text.isdecimal() else None

    def claim_attempt(self) -> int:
        """Create the log folder of the next attempt and return its number, higher than all before.

        Two callers never get the same number. A claim fences off the earlier attempts: see `fence`.
        """
        logs = self.path / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        attempt = max(self.attempts(), default=-1) + 1
        while True:
            try:
                self.log_dir(attempt).mkdir()
                return attempt
            except FileExistsError:
                attempt += 1

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts so far, in order."""
        names = (folder.name.partition("-")[2] for folder in (self.path / "logs").glob("attempt-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration; raises RunNotFoundError if this is no run folder."""
        if not self.config_file.is_file():
            raise RunNotFoundError(
                f"{self.path} is not a run folder: it has no config.yaml.", hint="See `slurmddp list`."
            )
        import yaml  # The batch step has only the standard library.

        try:
            loaded = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError):
            loaded = None
        if not isinstance(loaded, dict):
            raise SlurmddpError(
                f"{self.config_file} holds no mapping.", hint="The file was damaged from outside."
            )
        return loaded

    def add_event(self, event: str, **facts: Any) -> None:
        """Append one event of an attempt: submitted, started, first_step, saved, signalled, ended, ..."""
        append_line(self.attempts_file, {"event": event, "time": round(time.time(), 3), **facts})

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.attempts_file))
