"""Capture the failure of a process: its exit, the end of its log, and the record of its first observer.

srun reports the highest exit code of all tasks, which hides the first cause. So the first agent or local
launcher that sees a rank die writes `failure.json` into the logs of the attempt; later observers don't change
this file.
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
from slurmddp.runs.folder.late_files import create_new, read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import without_control

_READ_LINES = 400
"""How many last lines of a log are searched for the reason; those of a deep traceback may all be torch's."""
_READ_BYTES = (1 << 16, 1 << 20)
"""Bytes to read from the end of a log: the first number, or the second if the first cuts a traceback."""
_LINE_CHARS = 400


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9, and `signal 40` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def split_status(returncode: int) -> tuple[int | None, str | None]:
    """Return (exit code, None), or (None, signal name) for a negative return code of `subprocess`."""
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
    """Return the failure of a process that has just ended on this host, with its cause.

    Args:
        returncode: the return code as `subprocess` gives it.
        node_rank: the number of this node.
        rank: the rank of the process; None for an agent.
        local_rank: the local rank of the process; None for an agent.
        lines: the last lines of the process (see `last_lines`); the failure keeps the most useful of them.
        cause: the cause; None to find it in `lines`.
        remedy: the advice that the process itself printed.
        restart_count: the number of restarts in place before the failure.
        oom: the result of `OomWatch.verdict`.
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
    """Return the failure of a process that has just ended on this host; its cause is found later.

    Args:
        returncode: the return code as `subprocess` gives it.
        lines: returns the last lines of this process, even if its successor has written to the same log.
        node_rank: the number of this node.
        rank: the rank of the process; None for an agent.
        local_rank: the local rank of the process; None for an agent.
        restart_count: the number of restarts in place before the failure.
        oom: the result of `OomWatch.verdict`.
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
    """Return the last `count` lines that a process wrote to a log; empty if the log can't be read.

    Args:
        log: the path of the log.
        count: the number of lines to return, or more to hold a whole traceback (see `tail_of`).
        since: the offset at which the lines of the process begin, after those of an earlier process.
        until: the offset at which the lines of the process end; None for the end of the file.
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
    """Return the last `count` lines of a text that are not empty, each cut to `_LINE_CHARS` characters.

    If they begin inside a traceback, the whole traceback is returned. Of a line that a program redraws, only
    the last text is kept. Escape sequences are removed.
    """
    drawn = [as_drawn(line).rstrip() for line in text.split("\n")]
    lines = [without_control(line).rstrip() for line in drawn]
    # Lines of `^` and `~`, with which Python underlines code in a traceback, are left out: a cut line may
    # lack this code.
    shown = tuple(line[:_LINE_CHARS] for line in lines if line.strip(" ^~"))
    return shown[_begin(shown, len(shown) - count) :]


def _begin(lines: Sequence[str], first: int) -> int:
    """Return the index of the first line to keep: `first`, or the beginning of the traceback that it is in.

    The message of an exception and the frames of a recursion may have thousands of lines. All are indented,
    except for the line with the name of the exception.
    """
    first = max(0, first)
    begin = first
    # `first` may be in the message of an exception, above which are the frames, or in the frames themselves.
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
    """Write a failure of an attempt to a file and to the events, unless another process has done so.

    Args:
        folder: the run folder.
        attempt: the number of the attempt.
        failure: the failure.
        restart_count: the number of restarts so far, if the ranks restart in place after this failure, which
            is then written to `failure-gN.json`. None if the attempt ends: the failure is written to
            `failure.json`.

    Returns:
        False if another process has already created the file.
    """
    path = folder.failure_file(attempt)
    if restart_count is not None:
        path = path.with_name(f"failure-g{restart_count}.json")
        failure = replace(failure, restart_count=restart_count)

    # Several processes may record the failure: only the first one creates the file.
    try:
        descriptor = create_new(path, 0o644)
    except FileExistsError:
        return False

    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(as_json(failure))
    except OSError:
        # The incomplete file is removed: with it, no other process could record the failure.
        path.unlink(missing_ok=True)
        raise
    _add_event(folder, attempt, failure)
    return True


def _add_event(folder: RunFolder, attempt: int, failure: Failure) -> None:
    """Add a `rank_failed` event to the run, unless a later attempt has started."""
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
    """Write to `exit-rank-RANK` how a rank ended, also after success; a restart overwrites the file."""
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
    # An error such as a full disk is ignored: the file is only information.
    with suppress(OSError):
        (folder.log_dir(attempt) / f"exit-rank-{rank}").write_text(as_json(end), encoding="utf-8")


def read(folder: RunFolder, attempt: int) -> Failure | None:
    """Return the failure in `failure.json` of an attempt; None if it is missing, incomplete or unreadable."""
    text = read_text(folder.failure_file(attempt))
    return None if text is None else from_json(text)


def as_drawn(line: str) -> str:
    """Return the part of a line that a terminal shows: the text after the last carriage return."""
    return line.rstrip("\r").rpartition("\r")[2]
