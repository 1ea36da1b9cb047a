"""Follow the logs of a run as they are written, across its attempts, until the run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.runs.folder.history import RecordedAttempt, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.merged_logs import (
    ChosenLogs,
    LineReader,
    failure_lines,
    job_lines,
    label,
    order,
    selected_files,
)


@dataclass
class _Follower:
    folder: RunFolder
    selection: ChosenLogs
    attempt: int
    readers: dict[Path, LineReader] = field(default_factory=dict)

    def start(self, count: int | None) -> Iterator[str]:
        """Yield the last `count` lines of each selected log, or all for None; `more` continues after them."""
        for path in selected_files(self.folder, self.attempt, self.selection):
            yield from self._labelled(path, self._reader(path).start(count))

    def more(self) -> Iterator[str]:
        """Yield the lines that were written since the last call."""
        paths = {*selected_files(self.folder, self.attempt, self.selection), *self.readers}
        for path in sorted(paths, key=lambda path: order(path.name)):
            yield from self._labelled(path, self._reader(path).read())

    def close(self) -> Iterator[str]:
        """Yield the remaining lines of an attempt that has ended, its failures, and how it ended."""
        yield from self.more()
        for path, reader in self.readers.items():
            yield from self._labelled(path, reader.flush())

        yield from failure_lines(self.folder, self.attempt)
        for attempt in read_history(self.folder).attempts:
            if attempt.number == self.attempt:
                yield f"-- attempt {self.attempt}: {_end_of(attempt)}"

    def _reader(self, path: Path) -> LineReader:
        return self.readers.setdefault(path, LineReader(path))

    def _labelled(self, path: Path, lines: list[str]) -> Iterator[str]:
        return (f"[{label(path)}] {line}" for line in lines)


def _end_of(attempt: RecordedAttempt) -> str:
    if attempt.ended is None:
        return "recorded no end"
    outcome = attempt.outcome or "ended"
    return outcome if attempt.exit_code is None else f"{outcome}, exit code {attempt.exit_code}"


def follow(
    folder: RunFolder,
    selection: ChosenLogs,
    *,
    count: int | None = 20,
    has_ended: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
    poll_s: float = 0.5,
) -> Iterator[str]:
    """Yield the lines of the selected logs as they are written, until `has_ended` returns True.

    The newest attempt comes first, then each later attempt.

    Args:
        folder: the run folder.
        selection: the logs to show.
        count: the number of earlier lines of each log to begin with; None for all.
        has_ended: returns whether the run has ended.
        sleep: waits for a number of seconds.
        poll_s: seconds between two reads.
    """
    follower: _Follower | None = None
    attempts = folder.attempts()
    if attempts:
        follower = _Follower(folder, selection, attempts[-1])
        yield from follower.start(count)
    else:
        yield "-- no attempt has started yet; waiting (Ctrl-C ends this command, not the run)"

    while True:
        # `has_ended` is called before reading: all lines before the end are then in the files.
        ended = has_ended()
        if follower is not None:
            yield from follower.more()

        for attempt in folder.attempts():
            if follower is None or attempt > follower.attempt:
                if follower is not None:
                    yield from follower.close()
                yield f"-- attempt {attempt} starts"
                follower = _Follower(folder, selection, attempt)
                yield from follower.more()

        if ended:
            if follower is not None:
                yield from follower.close()
            yield from job_lines(folder, count)
            return
        sleep(poll_s)
