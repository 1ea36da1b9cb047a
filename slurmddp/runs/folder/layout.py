"""Paths and plain-text records of one run; the only place that knows the layout of a run folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmddp.errors import RunNotFoundError, SlurmddpError
from slurmddp.host.atomic_file import replacing

_warned: set[str] = set()


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old content or the new one, never a part."""
    with replacing(path) as stream:
        stream.write(text.encode())


def is_there(path: Path) -> bool:
    """Return whether `path` exists, and False where that can't be found out.

    A network file system may answer a look-up from memory, for up to a minute. Opening the folder makes it
    ask its server.
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


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line with a single write, so that lines of several writers do not mix.

    Raises OSError when not all of it could be written; the next one then starts a line of its own.
    """
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _lock_a_moment(descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def _lock_a_moment(descriptor: int) -> None:
    """Lock a file against other writers until it is closed; after a second write without the lock.

    Appending is not atomic on NFS. Training goes on without the lock if the lock cannot be taken.
    """
    deadline = time.monotonic() + 1.0
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                return None
        time.sleep(0.01)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON records of `path`; leave out broken lines, and a last line that is still being written.

    A broken line is warned of once. Raises SlurmddpError for a file with broken lines and no record.
    """
    if not path.exists():
        return
    broken: list[tuple[int, str]] = []
    found = False
    with path.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith("\n"):
                break
            try:
                records = _records_in(line.replace("\0", ""))
            except ValueError:
                records = []
                broken.append((number, line.strip()[:80]))
            else:
                if "\0" in line:  # A hole, as a server's crash leaves it; a record may stand behind it.
                    broken.append((number, "zeros"))
            found = found or bool(records)
            yield from records
    if broken and not found:
        raise SlurmddpError(
            f"{path}, line {broken[0][0]} is not JSON: {broken[0][1]!r}.",
            hint="The file was damaged from outside; remove that line to go on.",
        )
    for number, text in broken:
        _warn_once(f"{path}, line {number} is no record and is left out: {text!r}.")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        import logging  # Not needed by the batch step, which has seconds to live.

        logging.getLogger(__name__).warning(text)


def _records_in(line: str) -> list[dict[str, Any]]:
    """Return the record of a line; of one that was torn by a full disk, what the next writer glued to it."""
    if not line.strip():
        return []
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError
        return [record]
    except ValueError:
        if not line.startswith('{"'):
            raise
    glued = line.rfind(line[: line.find('"', 2) + 1])  # records of one file begin with the same key
    try:
        return [json.loads(line[glued:])] if glued > 0 else []
    except ValueError:
        return []


class RunFolder:
    """`runs/<name>-<hash>/`: where everything about one run is found."""

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
        """What the batch step needs to know of the job: numbers and rules, as JSON."""
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
        """Present once a person has cancelled the run: nothing may requeue it."""
        return self.path / "cancelled"

    @property
    def stop_file(self) -> Path:
        """Present once a person has asked the run to save and leave: nothing may requeue it then."""
        return self.path / "stop"

    def log_dir(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt-{attempt}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.log_dir(attempt) / f"rank-{rank}.log"

    def failure_file(self, attempt: int) -> Path:
        """What the first failing rank of an attempt left: rank, host, cause, last lines."""
        return self.log_dir(attempt) / "failure.json"

    def claim_attempt(self) -> int:
        """Create the log folder of the next attempt and return its number, higher than any before.

        Two callers never get the same. Whoever claims an attempt shuts out the earlier ones: see `fence`.
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
        """Return the resolved configuration; raises RunNotFoundError when this is no run folder."""
        if not self.config_file.is_file():
            raise RunNotFoundError(
                f"{self.path} is not a run folder: it has no config.yaml.", hint="See `slurmddp list`."
            )
        import yaml  # The batch step has the standard library alone.

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
