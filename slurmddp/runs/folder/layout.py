"""The files of a run; no other module knows where they are in the run folder."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import Any

from slurmddp.errors import RunNotFoundError, SlurmddpError, unreadable
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder.jsonl import append_line, read_lines
from slurmddp.runs.folder.late_files import is_there, names_in, read_text

REPORT_FILE = "report.html"
"""Name of the report in a run folder."""
LATE = frozenset(
    {"cancelled_file", "stop_file", "excluded_file", "metrics_file", "result_file", "plain_result_file"}
    | {"checkpoints_dir", "code_dir", "sample_file"}
    | {"log_dir", "rank_log", "job_log", "node_log", "batch_log", "failure_file", "exit_file", "unable_file"}
    | {"begun_file"}
)
"""Files that a host writes while another host may already ask for them; `late_files` alone reads them."""


def state_dir() -> Path:
    """Return the folder of the files that all runs of this account share.

    The folder is `$XDG_STATE_HOME/slurmddp`, by default `~/.local/state/slurmddp`.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "slurmddp"


class _Entry:
    """A Python descriptor for the path of an entry of a run folder.

    Read on an object, the attribute is the whole path; read on the class `RunFolder`, it is the path relative
    to the run folder.
    """

    # The path is joined only when it is read: a sweep makes thousands of RunFolder objects.
    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, folder: RunFolder | None, _: object = None) -> Path:
        if folder is None:
            return Path(*self._names)
        return folder.path.joinpath(*self._names)


class RunFolder:
    """The folder of a run, `runs/<name>-<hash>/`: its files and events."""

    config_file = _Entry("config.yaml")
    overrides_file = _Entry("overrides.txt")
    script_file = _Entry("job.sbatch")
    job_file = _Entry("job.json")
    """The settings of the job for the batch step: numbers and rules, as JSON."""
    batch_file = _Entry("job.pyz")
    """The program of the batch step, frozen at submission."""
    code_dir = _Entry("code")
    code_note_file = _Entry("code.txt")
    """A sentence that describes the snapshot in `code/`, or gives the reason why there is no snapshot."""
    code_digests_file = _Entry("code.json")
    """The digests of the files of the project's code at the submission."""
    logs_dir = _Entry("logs")
    attempts_file = _Entry("attempts.jsonl")
    metrics_file = _Entry("metrics.jsonl")
    loggers_dir = _Entry("loggers")
    """The folder for files that loggers write, such as the events of TensorBoard."""
    tensorboard_dir = _Entry("loggers", "tensorboard")
    checkpoints_dir = _Entry("checkpoints")
    report_file = _Entry(REPORT_FILE)
    figure_file = _Entry("report.png")
    sample_file = _Entry("sample.txt")
    """Text that a language model generated at the end of its training."""
    plain_result_file = _Entry("result.json")
    """The value that a function returned on rank 0, if JSON can hold it."""
    result_file = _Entry("result.pkl")
    """The value that a function returned on rank 0, as a pickle if JSON can't hold it."""
    excluded_file = _Entry("excluded.jsonl")
    """The nodes that failed during the run, each with the time until which it is avoided."""
    cancelled_file = _Entry("cancelled")
    """Exists after a person has cancelled the run: nothing may requeue it."""
    stop_file = _Entry("stop")
    """Exists after a person has asked the run to save and exit: nothing may requeue it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.name = self.path.name

    @property
    def is_untouched(self) -> bool:
        """Whether no command and no job has left a record in the folder since it was created."""
        marks = (self.attempts_file, self.cancelled_file, self.stop_file)
        return not any(map(os.path.lexists, marks))

    @property
    def is_cancelled(self) -> bool:
        """Whether a person has cancelled the run, and not resumed it since."""
        return is_there(self.cancelled_file)

    @property
    def is_stopped(self) -> bool:
        """Whether a person has asked the run to save and exit, and not resumed it since."""
        return is_there(self.stop_file)

    def log_dir(self, attempt: int) -> Path:
        return self.logs_dir / f"attempt-{attempt}"

    def job_log(self, job_id: str) -> Path:
        """The path of a job's output: messages of SLURM itself, and what a job without an attempt prints."""
        return self.logs_dir / f"slurm-{job_id}.out"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.log_dir(attempt) / f"rank-{rank}.log"

    def node_log(self, attempt: int, node: int) -> Path:
        """The path of the log of a node's agent; SLURM creates the file when it starts the agent."""
        return self.log_dir(attempt) / f"node-{node}.log"

    def batch_log(self, attempt: int) -> Path:
        """The path of the output of the batch script and of srun."""
        return self.log_dir(attempt) / "batch.log"

    def event_log(self, attempt: int) -> Path:
        """The path of the output of the command in the setting `policy.on_event`."""
        return self.log_dir(attempt) / "on-event.log"

    def begun_file(self, attempt: int, node: int) -> Path:
        """The path of an empty file that a node's agent creates first; missing if the agent can't start."""
        return self.log_dir(attempt) / f"begun-node-{node}"

    def unable_file(self, attempt: int, node: int) -> Path:
        """The path of the failure of an agent whose node can run no ranks and which has no link to node 0."""
        return self.log_dir(attempt) / f"unable-node-{node}.json"

    def failure_file(self, attempt: int) -> Path:
        """The path of the record of an attempt's first failure: rank, host, cause, last lines."""
        return self.log_dir(attempt) / "failure.json"

    def exit_file(self, attempt: int, node: int) -> Path:
        """The path of the exit code of a node's agent, written at its end; a killed agent writes none."""
        return self.log_dir(attempt) / f"exit-node-{node}"

    def exit_code_of(self, attempt: int, node: int) -> int | None:
        """Return the exit code that a node's agent recorded; None if it recorded none."""
        text = (read_text(self.exit_file(attempt, node)) or "").strip()
        return int(text) if text.isdecimal() else None

    def silent_nodes(self, attempt: int, nodes: int) -> list[int]:
        """Return the numbers of the nodes, below `nodes`, whose agents recorded no exit code."""
        names = names_in(self.log_dir(attempt))
        return [node for node in range(nodes) if self.exit_file(attempt, node).name not in names]

    def claim_attempt(self) -> int:
        """Create the log folder of the next attempt and return its number, higher than all before.

        Two callers never get the same number. Earlier attempts must not write any more: see `is_superseded`.
        """
        # With this mode no other account can write into the logs, whatever the umask is.
        self.logs_dir.mkdir(0o755, parents=True, exist_ok=True)
        attempt = max(self.attempts(), default=-1) + 1

        # mkdir is atomic, also on NFS: of two callers with the same number, one gets FileExistsError.
        while True:
            try:
                self.log_dir(attempt).mkdir(0o755)
                return attempt
            except FileExistsError:
                attempt += 1

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts so far, in order."""
        parts = [name.partition("-") for name in names_in(self.logs_dir)]
        return sorted(int(number) for kind, _, number in parts if kind == "attempt" and number.isdecimal())

    def is_superseded(self, attempt: int) -> bool:
        """Return whether a later attempt of the run has started; False if the folder can't be read.

        Only the newest attempt may write to the run folder: the number of an attempt is its fencing token.
        """
        # Two attempts may run at once: SLURM requeues a job that has lost a node, and if only the network
        # failed, processes of the earlier attempt still run on that node.
        return any(number > attempt for number in self.attempts())

    def is_over(self, attempt: int) -> bool:
        """Return whether a person has ended the run, or a later attempt has started."""
        return self.is_stopped or self.is_cancelled or self.is_superseded(attempt)

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration of the run.

        Raises:
            RunNotFoundError: the folder has no config.yaml.
            SlurmddpError: config.yaml can't be read, or is not a YAML mapping.
        """
        # Imported here, because the batch step imports this module without PyYAML.
        import yaml

        try:
            content = read_regular(self.config_file)
        except (FileNotFoundError, NotADirectoryError):
            raise RunNotFoundError(
                f"{self.path} is not a run folder: it has no config.yaml.", hint="See `slurmddp list`."
            ) from None
        except OSError as error:
            raise unreadable(self.config_file, error) from error

        try:
            # libyaml is ten times faster, where PyYAML has it.
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            loaded = yaml.load(content.decode(), loader)
        except (yaml.YAMLError, ValueError):
            loaded = None
        if not isinstance(loaded, dict):
            raise SlurmddpError(
                f"{self.config_file} is not a YAML mapping.",
                hint="Another program has changed the file: restore it from a copy.",
            )

        # Configurations of earlier versions have the key `torchrun`, which has no meaning now.
        program = loaded.get("program")
        if isinstance(program, dict):
            program.pop("torchrun", None)
        return loaded

    def add_event(self, event: str, **facts: Any) -> None:
        """Append a record with the time and `facts` to attempts.jsonl.

        Args:
            event: the name of the event, such as submitted, started, first_step, saved, signalled or ended.
            facts: further fields of the record.
        """
        append_line(self.attempts_file, {"event": event, "time": round(time.time(), 3), **facts})

    def typed(self) -> list[str]:
        """Return the overrides of the run as they were typed on the command line.

        Raises:
            OSError: the file can't be read.
            ValueError: its text is damaged.
        """
        return shlex.split(read_regular(self.overrides_file).decode())

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all attempts, in the order in which they were recorded."""
        # A client of a network file system may have cached an old size of the file; a listing refreshes it.
        names_in(self.path)
        return list(read_lines(self.attempts_file))

    def readable_events(self) -> list[dict[str, Any]]:
        """Return the events of all attempts; none if attempts.jsonl can't be read or is damaged."""
        try:
            return self.events()
        except (SlurmddpError, OSError):
            # A job must be able to end, and decide about a restart, without its events.
            return []
