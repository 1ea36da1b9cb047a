"""Merge the logs of a run into one stream of labelled lines, across its attempts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmddp.host.regular_file import open_regular
from slurmddp.runs.failures.capture import as_drawn
from slurmddp.runs.failures.failure import Failure
from slurmddp.runs.failures.read import describe_other_ranks, rank_exits, read_failure, read_restarted
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.late_files import is_there, read_text
from slurmddp.runs.folder.layout import RunFolder

_RANK = re.compile(r"rank-(\d+)\.log")
_NODE = re.compile(r"node-(\d+)\.log")
_TAIL_BLOCK = 1 << 16
_LINE_LIMIT = 1 << 20
"""Bytes to keep of the end of a line: a progress bar may redraw one line for hours."""


@dataclass(frozen=True)
class ChosenLogs:
    """The selection of logs that a command shows: by rank, by node, or all."""

    ranks: frozenset[int] = frozenset({0})
    nodes: frozenset[int] = frozenset()
    """The nodes whose agents' logs are shown."""
    everything: bool = False

    def contains(self, path: Path) -> bool:
        """Return whether a log belongs to the selection."""
        place, number, _ = order(path.name)
        wanted = (self.ranks, self.nodes, frozenset[int]())[place]
        return self.everything or number in wanted


def files(folder: RunFolder, attempt: int) -> list[Path]:
    """Return the paths of the logs of an attempt: first of ranks, then of nodes, then the others by name."""
    paths = [path for path in folder.log_dir(attempt).glob("*.log") if path.is_file()]
    return sorted(paths, key=lambda path: order(path.name))


def order(name: str) -> tuple[int, int, str]:
    """Return the sort key of a log's file name: ranks by number, nodes by number, then others by name."""
    for place, pattern in enumerate((_RANK, _NODE)):
        match = pattern.fullmatch(name)
        if match:
            return place, int(match[1]), name
    return 2, 0, name


def label(path: Path) -> str:
    """Return the label of a log, such as `rank 3`, `node 0` or `batch`."""
    return path.stem.replace("-", " ")


def selected_files(folder: RunFolder, attempt: int, selection: ChosenLogs) -> list[Path]:
    """Return the paths of the selected logs of an attempt.

    If they are all empty, return the logs of nodes and of the batch step that are not empty: if an attempt
    fails before its ranks start, only these logs have the reason.
    """
    paths = files(folder, attempt)
    selected = [path for path in paths if selection.contains(path)]
    if any(path.stat().st_size for path in selected):
        return selected

    others = [path for path in paths if not _RANK.fullmatch(path.name) and path.stat().st_size]
    return others or selected


def of_job_without_attempt(folder: RunFolder) -> tuple[str, list[str]]:
    """Return the id of the newest job and the lines of its log; no lines if the job has begun an attempt."""
    history = read_history(folder)
    job_id = history.job_id or ""
    if any(attempt.job_id == job_id for attempt in history.attempts):
        return job_id, []

    text = read_text(folder.job_log(job_id)) or ""
    return job_id, [as_drawn(line) for line in text.split("\n") if line.strip()]


def tail(path: Path, count: int | None) -> list[str]:
    """Return the last `count` lines of a file, or all lines for None.

    The file is read from its end, and no further than needed.
    """
    reader = LineReader(path)
    return _last([*reader.start(count), *reader.flush()], count)


def _last(lines: list[str], count: int | None) -> list[str]:
    return lines[-count:] if count else lines


def snapshot(folder: RunFolder, attempt: int, selection: ChosenLogs, count: int | None) -> Iterator[str]:
    """Yield the last `count` lines of each selected log of an attempt, then its failures.

    If the newest job began no attempt, the last lines of its log follow. If `count` is None, whole logs are
    shown.
    """
    for path in selected_files(folder, attempt, selection):
        for line in tail(path, count):
            yield f"[{label(path)}] {line}"

    yield from failure_lines(folder, attempt)
    yield from job_lines(folder, count)


def job_lines(folder: RunFolder, count: int | None) -> Iterator[str]:
    """Yield the last `count` lines of the newest job's log if the job ended before it began an attempt."""
    job_id, lines = of_job_without_attempt(folder)
    if lines:
        yield f"-- job {job_id} began no attempt:"
    for line in _last(lines, count):
        yield f"[job {job_id}] {line}"


def failure_lines(folder: RunFolder, attempt: int) -> Iterator[str]:
    """Yield lines about the failures of an attempt, with the last lines of the failed process.

    Nothing is yielded if the attempt has no failure.
    """
    for earlier in read_restarted(folder, attempt):
        yield f"-- attempt {attempt}: {earlier.sentence}; the ranks restarted in place"

    failure = read_failure(folder, attempt)
    if failure is None:
        return
    yield from _last_lines(attempt, failure)
    others = describe_other_ranks(rank_exits(folder, attempt), failure)
    if others:
        yield f"-- {others}"
    if failure.advice:
        yield f"-- {failure.advice}"


def _last_lines(attempt: int, failure: Failure) -> Iterator[str]:
    title = f"; {failure.lines_title}:" if failure.last_lines else ""
    yield f"-- attempt {attempt}: {failure.sentence}{title}"
    for line in failure.last_lines:
        yield f"[rank {failure.rank}] {line}" if failure.rank is not None else line


@dataclass
class LineReader:
    """A reader of a growing file: `read` returns the lines that were added since its last call."""

    path: Path
    offset: int = 0
    rest: bytes = b""
    is_found: bool = False

    def start(self, count: int | None) -> list[str]:
        """Return the last `count` whole lines of the file, or all for None; `read` continues after them."""
        end = self.path.stat().st_size
        position = end
        blocks: list[bytes] = []
        breaks = 0
        unbroken = 0

        with open_regular(self.path) as stream:
            while position > 0 and (count is None or (breaks <= count and unbroken < _LINE_LIMIT)):
                size = min(_TAIL_BLOCK, position)
                position = stream.seek(position - size)
                block = stream.read(size)
                blocks.append(block)
                breaks += block.count(b"\n")
                unbroken = 0 if b"\n" in block else unbroken + size

        *lines, rest = b"".join(reversed(blocks)).split(b"\n")
        self.rest = rest[-_LINE_LIMIT:]
        self.offset = end
        first = 0 if count is None else max(0, len(lines) - count)
        return [as_drawn(line.decode("utf-8", errors="replace")) for line in lines[first:]]

    def read(self) -> list[str]:
        """Return the whole lines that were added since the last call; empty while the file does not exist."""
        size = self._size()
        # The file is shorter than before, so it was written again: read it from the start.
        if size < self.offset:
            self.offset = 0
            self.rest = b""
        if size == self.offset:
            return []

        with open_regular(self.path) as stream:
            stream.seek(self.offset)
            data = stream.read(size - self.offset)
        self.offset += len(data)
        *lines, rest = (self.rest + data).split(b"\n")
        self.rest = rest[-_LINE_LIMIT:]
        return [as_drawn(line.decode("utf-8", errors="replace")) for line in lines]

    def _size(self) -> int:
        """Return the size of the file; 0 while a listing of its folder does not contain it."""
        self.is_found = self.is_found or is_there(self.path)
        if not self.is_found:
            return 0
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def flush(self) -> list[str]:
        """Return the last line of a complete file if it has no line break; else an empty list."""
        rest = self.rest
        self.rest = b""
        if not rest:
            return []
        return [as_drawn(rest.decode("utf-8", errors="replace"))]
