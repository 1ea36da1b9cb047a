"""Capture the failure of a process: its exit, the end of its log, and the record of its first observer.

srun reports the highest exit code of all tasks, which hides the first cause. So the first agent or local
launcher that sees a rank die writes `failure.json` into the logs of the attempt, and others leave this file
alone.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from slurmddp.host.regular_file import open_regular
from slurmddp.runs.failures.failure import Failure, UnexplainedFailure, as_json, from_json
from slurmddp.runs.failures.kinds import PHRASES, Cause, FailureKind
from slurmddp.runs.failures.tracebacks import TRACEBACK
from slurmddp.runs.folder.late_files import read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import without_control

_READ_LINES = 400
"""How many lines are read to find the reason: the last lines of a deep traceback all belong to torch."""
_READ_BYTES = (1 << 16, 1 << 20)
"""How many bytes of a log are read; the second number only if the first may begin within a traceback."""
_LINE_CHARS = 400


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and `signal 40` for a number that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def split_status(returncode: int) -> tuple[int | None, str | None]:
    """Return (exit code, None) or (None, signal name) for a return code as `subprocess` gives it."""
    if returncode >= 0:
        return returncode, None
    return None, signal_name(-returncode)


def here(
    returncode: int,
    *,
    node_rank: int,
    rank: int | None = None,
    local_rank: int | None = None,
    lines: Sequence[str] = (),
    cause: Cause | None = None,
    remedy: str = "",
    restart_count: int = 0,
    oom: str | None = None,
) -> Failure:
    """Return the failure of a process that ended on this host just now.

    The cause is found in all `lines` (see `last_lines`) unless it is given; the last of them are kept.
    `oom` is what `OomWatch.verdict` says.
    """
    failure = unexplained(
        returncode,
        lambda: lines,
        node_rank=node_rank,
        rank=rank,
        local_rank=local_rank,
        restart_count=restart_count,
        oom=oom,
    )
    return replace(failure, remedy=remedy).because(cause)


def unexplained(
    returncode: int,
    lines: Callable[[], Sequence[str]],
    *,
    node_rank: int,
    rank: int | None = None,
    local_rank: int | None = None,
    restart_count: int = 0,
    oom: str | None = None,
) -> UnexplainedFailure:
    """Return the failure of a process that ended on this host just now; its reason is found later.

    `lines` returns the last lines of the process, also after another process has replaced it.
    """
    code, name = split_status(returncode)
    return UnexplainedFailure(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        host=socket.gethostname(),
        exit_code=code,
        signal=name,
        time=round(time.time(), 3),
        restart_count=restart_count,
        lines=lines,
        oom=oom,
    )


def last_lines(
    log: Path, count: int = _READ_LINES, *, since: int = 0, until: int | None = None
) -> tuple[str, ...]:
    """Return the last `count` lines of a log, each cut to a readable length; empty if it can't be read.

    Other processes wrote the bytes before `since` and from `until` on.
    """
    lines: tuple[str, ...] = ()
    with suppress(OSError), open_regular(log) as stream:
        size = stream.seek(0, os.SEEK_END) if until is None else until

        for limit in _READ_BYTES:
            stream.seek(max(since, size - limit))
            text = stream.read(max(0, size - stream.tell())).decode("utf-8", errors="replace")
            lines = tail_of(text, count)

            is_whole = size - since <= limit
            if is_whole or (len(lines) >= count and not _is_indented(lines[0])):
                break
    return lines


def tail_of(text: str, count: int = _READ_LINES) -> tuple[str, ...]:
    """Return the last `count` lines with text, or more if the message of an exception has more.

    A line that a program redraws has its last text. Escape sequences are removed.
    """
    drawn = [as_drawn(line).rstrip() for line in text.split("\n")]
    lines = [without_control(line).rstrip() for line in drawn]
    # Python underlines the error in a traceback, which is useless in cut lines.
    shown = tuple(line[:_LINE_CHARS] for line in lines if line.strip(" ^~"))
    return shown[_begin(shown, len(shown) - count) :]


def _begin(lines: Sequence[str], first: int) -> int:
    """Return the first line to read: `first`, or the beginning of the traceback around it.

    The message of an exception and the frames of a recursion may have thousands of lines. All are indented,
    except for the line with the name of the exception.
    """
    first = max(0, first)
    begin = first
    # The lines around `first` may belong to the message; the frames stand above it.
    for _ in ("the message", "the frames"):
        while begin and _is_indented(lines[begin]):
            begin -= 1
        if lines[begin : begin + 1] and lines[begin].endswith(TRACEBACK):
            return begin
        begin = max(0, begin - 1)
    return first


def _is_indented(line: str) -> bool:
    return line.startswith((" ", "\t"))


def record(folder: RunFolder, attempt: int, failure: Failure, *, restart_count: int | None = None) -> bool:
    """Write `failure.json` and the event of an attempt; return False if another process was first.

    With `restart_count`, the ranks restart in place after the failure, and the attempt continues.
    """
    path = folder.failure_file(attempt)
    if restart_count is not None:
        path = path.with_name(f"failure-g{restart_count}.json")
        failure = replace(failure, restart_count=restart_count)

    # Of all observers, the first one creates the file.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False

    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(as_json(failure))
    except OSError:
        # An incomplete file would block other writers.
        path.unlink(missing_ok=True)
        raise
    _add_event(folder, attempt, failure)
    return True


def _add_event(folder: RunFolder, attempt: int, failure: Failure) -> None:
    """Add the event of a failure, unless a later attempt owns the shared files of the run."""
    if not folder.is_superseded(attempt):
        folder.add_event(
            "rank_failed",
            attempt=attempt,
            rank=failure.rank,
            node_rank=failure.node_rank,
            host=failure.host,
            exit_code=failure.exit_code,
            signal=failure.signal,
            restart_count=failure.restart_count,
            kind=failure.kind,
            reason=failure.reason,
        )


def write_exit(
    folder: RunFolder,
    attempt: int,
    rank: int,
    returncode: int,
    restart_count: int = 0,
    kind: FailureKind = "other",
) -> None:
    """Write `exit-rank-<rank>`: how a rank ended, also without failure; a restarted rank replaces it."""
    code, name = split_status(returncode)
    end = Failure(
        rank=rank,
        host=socket.gethostname(),
        exit_code=code,
        signal=name,
        time=round(time.time(), 3),
        kind=kind,
        reason=PHRASES.get(kind, ""),
        restart_count=restart_count,
    )
    # A full disk must not change what happens next.
    with suppress(OSError):
        (folder.log_dir(attempt) / f"exit-rank-{rank}").write_text(as_json(end), encoding="utf-8")


def read(folder: RunFolder, attempt: int) -> Failure | None:
    """Return the recorded failure of an attempt; None before it is complete, or if it can't be read."""
    text = read_text(folder.failure_file(attempt))
    return None if text is None else from_json(text)


def as_drawn(line: str) -> str:
    """Return the last text of a line that a program redraws, such as a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]
