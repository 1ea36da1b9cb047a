"""Find out why a process ended, by messages of libraries and tools in its last lines; pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurmddp.errors import EXIT_FAILED
from slurmddp.runs.failures import torchrun_report
from slurmddp.runs.failures.kinds import PHRASES, UNKNOWN, Cause, FailureKind
from slurmddp.runs.failures.tracebacks import (
    FRAME,
    before_last,
    begins,
    crash_place,
    exception,
    last_chain,
    place_in_file,
    plain_lines,
    raised_at,
    went_on,
    whole,
    without_library_frames,
)
from slurmddp.short_text import shorten

ADVICE: Mapping[FailureKind, str] = {
    "out_of_memory": "Ask for more with mem_gb=, or use a smaller train.batch_size or fewer train.workers.",
    "out_of_gpu_memory": "Use a smaller train.batch_size. train.accumulate=N then keeps the number of "
    "samples per step.",
    "shared_memory_full": "Data workers pass batches to the rank through shared memory. Use fewer "
    "train.workers (0 needs no shared memory), or give the container more (--shm-size).",
    "disk_full": "Free space on that disk, or ask for a larger quota.",
    "too_many_files": "Raise the limit (`ulimit -n`), or use fewer train.workers.",
    "port_taken": "A script that starts its own ranks needs ranks_per_node=1. Any other script should use "
    "the port in MASTER_PORT.",
    "wrong_python": "With `python:` in the cluster file, name an interpreter that exists on the nodes and "
    "has slurmddp and torch.",
    "lost_peer": "Look for the rank or node that ended first.",
    "killed": "On a cluster the batch log and `sacct` may say who killed it.",
    "unhandled_signal": "`scancel --signal` or a program on the node sent the signal. Handle it in the "
    "program, or use `slurmddp stop`, which lets a run save and stop.",
    "crashed": "The crash is in compiled code. If the program runs in Python, the log of the rank has its "
    "whole stack.",
    "crashed_at_exit": "A thread of compiled code still ran while Python shut down, after the program's last "
    "line; threads of torch's gloo do so now and then, also under torchrun.",
    "crashed_worker": "The crash is in compiled code that Python called. With train.workers=0 the log "
    "shows where.",
    "ended_worker": "With train.workers=0 the log shows where.",
    "left_early": "All ranks have to take the same number of steps.",
    "stalled": "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    "stalled_together": "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    "lost_node": "Its host or its network went down, or its agent was killed.",
    "lost_contact": "The host or the network of one of these nodes went down; batch.log and excluded.jsonl "
    "may name the node.",
    "unfit_node": "rank-0.log says what to check on that node.",
    "unable_node": "The log of that node (node-N.log) shows the error.",
}
"""The advice to a person about a failure, by kind."""

_TERMINATED = "terminate called without an active exception"
"""The last line of a process that aborts because a thread needs Python's lock while Python shuts down."""
_NOT_FOR_MEMORY = " (the kernel counted no out-of-memory kill)"
_TEXT_CHARS = 200
_REFUSAL = re.compile(r"\w*Error: .")
"""Matches an error line without a traceback, such as the text that `sys.exit` prints."""
_USAGE = re.compile(r"\S+: error: .")
_EXIT_USAGE = 2
"""The exit code of argparse for wrong arguments."""
_WORKER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([\w ]+)")
_WORKER_ENDED = re.compile(r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code (\d+)")
_FETCHING = "in rebuild_storage_fd"
"""The frame in which a rank reads a batch from a data worker.

If the worker has ended, the read fails before torch reports the worker's end.
"""
_WORKER_GONE = re.compile(r"EOFError|BrokenPipeError|Connection\w+Error")
_WORKER_REPORT = re.compile(r"Fatal Python error: (.+)|ERROR: Unexpected (.+) encountered in worker")
_BEFORE_A_CRASH = 3
_CRASH = "Fatal Python error"
_AGENTS = ("/slurmddp/launchers/", "<frozen runpy>")
"""Paths in the frames of an agent, which a forked rank has below its own frames."""
_TORCH_DISK_FULL = r"inline_container.*unexpected pos"
"""Matches the error of torch.save after a write that a full disk cut short."""
_KINDS: tuple[tuple[FailureKind, str], ...] = (
    ("out_of_gpu_memory", r"OutOfMemoryError|CUDA (error: )?out of memory|_STATUS_ALLOC_FAILED"),
    ("shared_memory_full", r"shared memory\(shm\).*No space left|</torch_\d+_.*No space left"),
    ("out_of_memory", r"MemoryError\b|can't allocate memory|Cannot allocate memory"),
    ("disk_full", r"No space left on device|Disk quota exceeded"),
    ("disk_full", _TORCH_DISK_FULL),
    ("too_many_files", r"Too many open files"),
    ("port_taken", r"EADDRINUSE|Address already in use"),
    ("wrong_python", r"No module named '(slurmddp|torch)'"),
)  # fmt: skip
_LOST = re.compile(
    r"(gloo/|pair\.cc).*(connection|timed? ?out|closed|broken pipe|(read|write) error)"
    r"|connection closed by peer \[|timeout caused pair closure|gloo (\S+ )?(failed|timed? ?out)"
    r"|(failed to pass|timed out in|reached) monitoredBarrier"
    r"|torch\.distributed\.Dist\w*Error: .*(connection|broken pipe|timed? ?out)"
    r"|(TCPStore|SocketImpl|RendezvousConnectionError).*(connection|broken pipe)"
    r"|nccl.*(abort|remote|timed? ?out)|collective operation timeout",
    re.IGNORECASE,
)
_NOTHING_OF_IT = re.compile(r"\s|frame #|.*\bNCCL INFO\b")
"""Matches lines that never report a lost rank: code, frames, NCCL's log."""
_OTHERS_ERROR = re.compile(r"(?!RuntimeError|torch\.distributed\.|nccl)[A-Za-z_][\w.]*(Error|Exception)\b")
"""Matches errors that torch does not raise for a lost rank, such as for lost storage or a lost server."""
_LOSS_LINES = 5
"""The number of last lines that are searched for a lost rank if there is no exception."""


def reads_like_a_lost_peer(lines: Sequence[str]) -> bool:
    """Return whether the last lines of a process show that it failed because it lost another rank."""
    return bool(_line_of_loss(lines))


def telling(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the `count` most useful of the last lines of a process.

    Usually these are its very last lines, with neighbouring frames of libraries reduced to one line. After a
    crash they are the innermost frames, which faulthandler writes first. A torchrun's own lines are left out.
    """
    if report := torchrun_report.read(lines):
        lines = report.before
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASH)]
    if not crashes:
        return tuple(without_library_frames(lines))[-count:]

    crash = crashes[-1]
    before = lines[max(0, crash - _BEFORE_A_CRASH) : crash + 1]
    return (*before, *_crashed_thread(lines[crash + 1 :]))[:count]


def _crashed_thread(lines: Sequence[str]) -> list[str]:
    """Return the frames of the crashed thread, without the frames of slurmddp that started the rank.

    All lines are returned if faulthandler has written no frames.
    """
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts:
        return list(lines)

    frames = [lines[starts[0]]]
    for line in lines[starts[0] + 1 :]:
        if not FRAME.match(line) or any(part in line for part in _AGENTS):
            break
        frames.append(line)
    return frames


def find_cause(
    exit_code: int | None, signal: str | None, lines: Sequence[str], oom: str | None = None
) -> Cause:
    """Find out why a process ended; return UNKNOWN if nothing shows the reason.

    Args:
        exit_code: the exit code of the process; None after a signal.
        signal: the name of the signal that killed the process.
        lines: the last lines of the process, usually a few hundred.
        oom: a phrase about an out-of-memory kill (`at the limit of 4 GiB`); "" if there was no such kill,
            None if the kernel does not count them.
    """
    report = torchrun_report.read(lines)
    if report is None or report.rank is None:
        return _find_cause(exit_code, signal, lines, oom)

    cause = _find_cause(exit_code, signal, report.before, oom)
    if cause.kind == "lost_peer":
        return cause
    where = f"in rank {report.rank} of its torchrun"
    return Cause(cause.kind, ", ".join(filter(None, [cause.reason, where])))


def _find_cause(exit_code: int | None, signal: str | None, lines: Sequence[str], oom: str | None) -> Cause:
    if signal == "SIGKILL":
        return _of_sigkill(oom)

    plain = _before_loss(plain_lines(lines))
    if signal:
        return _of_signal(signal, plain)
    return _of_exit(exit_code, plain, oom)


def of_text(text: str, place: str = "") -> Cause:
    """Return the cause that the text of an error names, by known messages of libraries and the system.

    Args:
        text: the text. Only its first line counts, and the second line if the first ends with a colon.
        place: where the error was raised, such as ` (train.py:12 in step)`.
    """
    first = whole(text.splitlines(), 0) if text else ""
    reason = f"{shorten(first, _TEXT_CHARS)}{place}"

    for kind, pattern in _KINDS:
        if re.search(pattern, first):
            doubt = ", most likely" if pattern == _TORCH_DISK_FULL else ""
            return Cause(kind, f"{PHRASES[kind]}{doubt}: {reason}")
    return Cause("other", reason)


def lost_peer(line: str) -> Cause:
    """Return the cause `lost_peer`, with the line in which a process reports that it lost another rank."""
    return Cause.of("lost_peer", shorten(line, _TEXT_CHARS))


def _of_sigkill(oom: str | None) -> Cause:
    if oom is None:
        return UNKNOWN
    if oom:
        return _of_kill("it", oom)
    return Cause("killed", f"{PHRASES['killed']}{_NOT_FOR_MEMORY}")


def _of_signal(signal: str, lines: Sequence[str]) -> Cause:
    if signal == "SIGUSR1":
        return Cause.of("unhandled_signal")
    if signal not in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"):
        return UNKNOWN

    messages = [line.partition("what():")[2].strip() for line in lines if "what():" in line]
    if signal == "SIGABRT":
        cause = _of_abort(lines, messages)
        if cause is not None:
            return cause

    where = crash_place(lines)
    if signal == "SIGBUS":
        or_file = f"or a memory-mapped file was truncated or is on a full disk{where}"
        return Cause("shared_memory_full", f"{PHRASES['shared_memory_full']}, {or_file}")
    message = f": {shorten(messages[-1], _TEXT_CHARS)}" if messages else ""
    return Cause("crashed", f"{PHRASES['crashed']}{where}{message}")


def _of_abort(lines: Sequence[str], messages: Sequence[str]) -> Cause | None:
    """Return the cause of a SIGABRT after the loss of another rank or while Python shut down; else None."""
    # NCCL's watchdog names the lost rank in the C++ message, and its stacks follow, so the message is
    # searched beside the last lines.
    line_of_loss = _line_of_loss([*lines[-4:], *messages[-1:]])
    if line_of_loss:
        return lost_peer(line_of_loss)

    before = _before_abort_at_exit(lines)
    if before is None:
        return None
    cause = _of_exit(EXIT_FAILED, before, None)
    return cause if cause.reason else Cause.of("crashed_at_exit", _TERMINATED)


def _before_abort_at_exit(lines: Sequence[str]) -> Sequence[str] | None:
    """Return the lines before the message of an abort while Python shut down; None without such an abort.

    Such an abort is recognised by the lack of Python frames after the message: at that time faulthandler
    shows none, or is already disabled.
    """
    if _TERMINATED not in lines:
        return None
    aborted = len(lines) - 1 - list(reversed(lines)).index(_TERMINATED)
    if any(FRAME.match(line) for line in lines[aborted + 1 :]):
        return None
    return lines[:aborted]


def _of_exit(exit_code: int | None, lines: Sequence[str], oom: str | None) -> Cause:
    worker = _of_worker(lines, oom)
    if worker is not None:
        return worker

    refusal = _refusal(exit_code, lines)
    if refusal:
        cause = of_text(refusal, place_in_file(lines, refusal))
    else:
        cause = of_text(*exception(lines, exit_code))

    is_deliberate = refusal and exit_code not in (None, 1)
    if cause.kind != "other" or is_deliberate:
        return cause
    line_of_loss = _line_of_loss(lines)
    return lost_peer(line_of_loss) if line_of_loss else cause


def _of_worker(lines: Sequence[str], oom: str | None) -> Cause | None:
    """Return the cause of a rank's failure if it is the end of a DataLoader worker process; else None."""
    raised = raised_at(lines)
    # All lines are searched if the last exception is a broken connection: the thread that pins memory may
    # have raised it after the rank reported the end of the worker.
    report = lines
    if raised is not None and not _WORKER_GONE.match(lines[raised]):
        report = last_chain(lines)
    codes = [match[1] for match in map(_WORKER_ENDED.search, report) if match]
    if codes:
        return Cause("ended_worker", f"{PHRASES['ended_worker']}, with exit code {codes[-1]}")

    ends = [match[1].strip().lower() for match in map(_WORKER.search, report) if match]
    gone = not ends and _lost_while_fetching(lines)
    if gone:
        ends = [(match[1] or match[2]).lower() for match in map(_WORKER_REPORT.match, lines) if match]

    if ends and ends[-1] == "bus error":
        return Cause.of("shared_memory_full", "a data worker ended with a bus error")
    if ends and ends[-1] != "killed":
        return Cause.of("crashed_worker", f"{ends[-1]}{crash_place(lines)}")
    if oom and (ends or gone):
        return _of_kill("a data worker", oom)

    if ends and oom == "":
        return Cause("killed", f"a data worker was killed {PHRASES['killed']}{_NOT_FOR_MEMORY}")
    if ends:
        phrase = PHRASES["out_of_memory"]
        return Cause("out_of_memory", f"{phrase}, most likely: a data worker was killed")
    if gone:
        return Cause("ended_worker", f"{PHRASES['ended_worker']}, or was killed")
    return None


def _lost_while_fetching(lines: Sequence[str]) -> bool:
    """Return whether the last exception is a broken connection to a data worker while a batch was fetched."""
    raised = raised_at(lines)
    if raised is None or not _WORKER_GONE.match(lines[raised]):
        return False
    return any(_FETCHING in line for line in lines[begins(lines)[-1] : raised])


def _of_kill(who: str, oom: str) -> Cause:
    return Cause.of("out_of_memory", f"the kernel killed {who} {oom}")


def _refusal(exit_code: int | None, lines: Sequence[str]) -> str:
    """Return the error line that a process printed without a traceback, such as a usage error.

    The result is empty if there is no such line, if the process continued after it, or if an exception ended
    the process.
    """
    if exit_code == _EXIT_USAGE and lines and _USAGE.match(lines[-1]):
        return lines[-1]

    raised = raised_at(lines)
    after = 0 if raised is None else raised + 1
    refusals = [number for number in range(after, len(lines)) if _REFUSAL.match(lines[number])]
    if not refusals or went_on(lines, refusals[-1], EXIT_FAILED):
        return ""

    # The exit code of an uncaught exception is 1, so the exception, not this line, is the reason.
    if exit_code in (None, 1) and raised is not None:
        return ""
    return whole(lines, refusals[-1]).removeprefix("Error: ")


def _line_of_loss(lines: Sequence[str]) -> str:
    """Return the line in which a process reports that it lost another rank; empty without such a line.

    The message of the last exception is searched, or the last lines if there is no exception.
    """
    return _loss_in(_before_loss(plain_lines(lines)))


def _before_loss(plain: Sequence[str]) -> Sequence[str]:
    """Return the lines up to the process's own error, if it lost other ranks only while handling that error.

    An example is `finally: barrier()`, which the other ranks never reach. In other cases all lines are
    returned.
    """
    if not _loss_in(plain):
        return plain
    earlier = before_last(plain)
    if earlier is None or _loss_in(earlier):
        return plain
    return earlier


def _loss_in(plain: Sequence[str]) -> str:
    """Return the last line that reports the loss of another rank; empty without such a line.

    The message of the last exception is searched, or the last `_LOSS_LINES` if there is no exception.
    """
    raised = raised_at(plain)
    if raised is None:
        lines = plain[-_LOSS_LINES:]
    else:
        lines = plain[raised : raised + _LOSS_LINES]
        if not _may_name_loss(lines[0]) or went_on(plain, raised, EXIT_FAILED):
            return ""

    losses = [line.strip() for line in lines if _may_name_loss(line) and _LOST.search(line)]
    return losses[-1] if losses else ""


def _may_name_loss(line: str) -> bool:
    return not _NOTHING_OF_IT.match(line) and not _OTHERS_ERROR.match(line)
