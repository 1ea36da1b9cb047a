"""Find the reason why a process ended in its last lines, and the advice for this reason; pure.

A reason begins with its kind, so that the advice follows from the recorded reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmddp.errors import EXIT_FAILED, HINT
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

OUT_OF_MEMORY = "out of memory"
OUT_OF_GPU_MEMORY = "out of GPU memory"
SHARED_MEMORY = "shared memory (/dev/shm) is full"
DISK_FULL = "no space left"
FILES = "too many open files"
PORT_TAKEN = "a port is taken"
WRONG_PYTHON = "not the right Python on the node"
LOST_PEER = "lost another rank"
KILLED = "by a person, the site or SLURM"
UNHANDLED = "its program does not handle this signal"
CRASHED = "crashed"
CRASHED_AT_EXIT = f"{CRASHED} at its exit"
CRASHED_WORKER = f"{CRASHED} in a data worker"
ENDED_WORKER = "a data worker ended by itself"
LEFT_EARLY = "left while others continued"
STALLED = "stalled"
STALLED_TOGETHER = f"{STALLED}: in a collective that not all have joined"
LOST_NODE = "lost node"
LOST_CONTACT = f"{LOST_NODE} or link"
"""Two nodes lost each other: neither can tell which of them was cut off."""
UNFIT_NODE = f"{LOST_NODE} to the preflight"
UNABLE_NODE = f"{LOST_NODE} to the ranks"

_WHAT_TO_DO = {
    OUT_OF_MEMORY: "Ask for more with mem_gb=, or take a smaller train.batch_size or fewer train.workers.",
    OUT_OF_GPU_MEMORY: "Take a smaller train.batch_size; train.accumulate=N keeps what a step is made of.",
    SHARED_MEMORY: "Data workers pass batches on through it: take fewer train.workers (0 needs none), "
    "or give the container more (--shm-size).",
    DISK_FULL: "Make room there, or ask for a larger quota.",
    PORT_TAKEN: "A script that starts its own ranks needs ranks_per_node=1; others should use MASTER_PORT.",
    WRONG_PYTHON: "Name an interpreter that is there, and that has slurmddp and torch, with `python:` in the "
    "cluster file.",
    FILES: "Raise the limit (`ulimit -n`), or take fewer train.workers.",
    LOST_PEER: "Look for the rank or node that ended first.",
    KILLED: "On a cluster the batch log and `sacct` may say who killed it.",
    UNHANDLED: "`scancel --signal` or a program on the node sent it. Handle it in the program; "
    "`slurmddp stop` lets a run save and stop.",
    CRASHED: "The crash is in compiled code. The output of the rank has the whole stack of a Python program.",
    CRASHED_AT_EXIT: "A thread of compiled code still ran while Python shut down, after the program's last "
    "line; threads of torch's gloo do so now and then, also under torchrun.",
    CRASHED_WORKER: "The crash is in compiled code below Python; with train.workers=0 the log shows where.",
    ENDED_WORKER: "With train.workers=0 the log shows where.",
    LEFT_EARLY: "All ranks have to take the same number of steps.",
    STALLED: "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    LOST_NODE: "Its host or its network went down, or its agent was killed.",
    LOST_CONTACT: "The host or the network of one of them went down; "
    "batch.log and excluded.jsonl may name it.",
    UNFIT_NODE: "rank-0.log says what to check on that node.",
    UNABLE_NODE: "The log of that node says more.",
}
_TERMINATED = "terminate called without an active exception"
"""The last words of a process in which a thread asks for the interpreter while Python shuts down."""
_NOT_FOR_MEMORY = " (the kernel counted no out-of-memory kill)"
_TEXT_CHARS = 200
_REFUSAL = re.compile(r"(\w*Error|SystemExit): .")
"""A line without a traceback: a refusal of slurmddp, or the text with which a program ended."""
_OF_SLURMDDP = re.compile(r"(Config|Mismatch|Checkpoint|Slurmddp)Error: ")
"""Errors of slurmddp, which a rank prints with a remedy in the line after them."""
_USAGE = re.compile(r"\S+: error: .")
_EXIT_USAGE = 2
"""The exit code of argparse for wrong arguments."""
_WORKER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([\w ]+)")
_WORKER_ENDED = re.compile(r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code (\d+)")
_FETCHING = "in rebuild_storage_fd"
"""The frame in which a rank fetches a batch; the rank loses this connection before torch says why."""
_WORKER_GONE = re.compile(r"EOFError|BrokenPipeError|Connection\w+Error")
_WORKER_SAID = re.compile(r"Fatal Python error: (.+)|ERROR: Unexpected (.+) encountered in worker")
_BEFORE_A_CRASH = 3
_CRASH = "Fatal Python error"
_AGENTS = ("/slurmddp/launchers/", "<frozen runpy>")
"""Paths of the frames below the frames of a forked rank."""
_KINDS = (
    (OUT_OF_GPU_MEMORY, r"OutOfMemoryError|CUDA (error: )?out of memory|_STATUS_ALLOC_FAILED"),
    (SHARED_MEMORY, r"shared memory\(shm\).*No space left|</torch_\d+_.*No space left"),
    (OUT_OF_MEMORY, r"MemoryError\b|can't allocate memory|Cannot allocate memory"),
    (DISK_FULL, r"No space left on device|Disk quota exceeded"),
    (f"{DISK_FULL}, most likely", r"inline_container.*unexpected pos"),
    (FILES, r"Too many open files"),
    (PORT_TAKEN, r"EADDRINUSE|Address already in use"),
    (WRONG_PYTHON, r"No module named '(slurmddp|torch)'"),
)  # fmt: skip
_LOST = re.compile(
    r"(gloo/|pair\.cc).*(connection|timed? ?out|closed|broken pipe|(read|write) error)"
    r"|connection closed by peer \[|timeout caused pair closure|gloo (\S+ )?(failed|timed? ?out)"
    r"|(failed to pass|timed out in|reached) monitoredBarrier"
    r"|torch\.distributed\.Dist\w*Error: .*(connection|broken pipe|timed? ?out)"
    r"|(TCPStore|SocketImpl).*(connection|broken pipe)"
    r"|nccl.*(abort|remote|timed? ?out)|collective operation timeout",
    re.IGNORECASE,
)
_NOTHING_OF_IT = re.compile(r"\s|frame #|.*\bNCCL INFO\b")
"""Lines that say nothing about a loss: code, frames, NCCL's log."""
_OTHERS_ERROR = re.compile(r"(?!RuntimeError|torch\.distributed\.|nccl)[A-Za-z_][\w.]*(Error|Exception)\b")
"""Errors of a program that lost its storage or a server: torch uses only its own errors for a lost rank."""
_LOSS_LINES = 5
"""The last lines in which a process without an exception names a loss."""


def reads_like_a_lost_peer(lines: Sequence[str]) -> bool:
    """Return whether the last lines of a process say that it only lost another rank."""
    return bool(_line_of_loss(lines))


def telling(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the `count` most useful of a process's last lines.

    These are the last lines without most frames of libraries, or after a crash the innermost frames, which
    faulthandler writes first.
    """
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASH)]
    if not crashes:
        return tuple(without_library_frames(lines))[-count:]
    begun = crashes[-1]
    before = lines[max(0, begun - _BEFORE_A_CRASH) : begun + 1]
    return (*before, *_crashed_thread(lines[begun + 1 :]))[:count]


def _crashed_thread(lines: Sequence[str]) -> list[str]:
    """Return the frames of the crashed thread above the start of the rank, or all lines."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts:
        return list(lines)
    frames = [lines[starts[0]]]
    for line in lines[starts[0] + 1 :]:
        if not FRAME.match(line) or any(part in line for part in _AGENTS):
            break
        frames.append(line)
    return frames


def advice(reason: str) -> str:
    """Return the advice for a reason; empty if there is no advice."""
    kinds = [kind for kind in _WHAT_TO_DO if reason.startswith(kind)]
    return _WHAT_TO_DO[max(kinds, key=len)] if kinds else ""


def remedy(reason: str, lines: Sequence[str]) -> str:
    """Return what a rank has printed after its error about what to do; empty if it has printed nothing.

    Args:
        reason: the reason of the failure, whose text the error begins with.
        lines: the last lines of the rank.
    """
    hints = [line.removeprefix(HINT) for line in lines if line.startswith(HINT)]
    if hints:
        return hints[-1]

    known = reason.removesuffix("...")
    said = [number for number, line in enumerate(lines) if known and line.startswith(known)]
    has_traceback = any(begun < said[-1] for begun in begins(lines)) if said else False
    after = lines[said[-1] + 1 :] if said and _OF_SLURMDDP.match(lines[said[-1]]) else []
    return " ".join(after) if len(after) == 1 and not has_traceback else ""


def reason_of(exit_code: int | None, signal: str | None, lines: Sequence[str], oom: str | None = None) -> str:
    """Return why a process ended, as one phrase; empty if unknown.

    Args:
        exit_code: of the process; None after a signal.
        signal: the name of the signal that killed the process.
        lines: its last lines, usually a few hundred.
        oom: how the kernel killed for memory (`at the limit of 4 GiB`); "" if it did not, None if not
            counted.
    """
    if signal == "SIGKILL":
        return _of_kill("it", oom) if oom else f"{KILLED}{_NOT_FOR_MEMORY}" if oom == "" else ""
    plain = _before_loss(plain_lines(lines))
    return _of_signal(signal, plain) if signal else _of_exit(exit_code, plain, oom)


def _of_signal(signal: str, lines: Sequence[str]) -> str:
    if signal == "SIGUSR1":
        return UNHANDLED
    if signal not in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"):
        return ""
    said = [line.partition("what():")[2].strip() for line in lines if "what():" in line]
    last = [*lines[-4:], *said[-1:]]  # NCCL's watchdog names the loss, and then shows stacks.
    if signal == "SIGABRT" and (lost := _line_of_loss(last)):
        return _lost_peer(lost)
    if signal == "SIGABRT" and (before := _before_abort_at_exit(lines)) is not None:
        return _of_exit(EXIT_FAILED, before, None) or f"{CRASHED_AT_EXIT}: {_TERMINATED}"
    where = crash_place(lines)
    if signal == "SIGBUS":
        return f"{SHARED_MEMORY}, or a file that was mapped is cut off or on a full disk{where}"
    return f"{CRASHED}{where}" + (f": {shorten(said[-1], _TEXT_CHARS)}" if said else "")


def _before_abort_at_exit(lines: Sequence[str]) -> Sequence[str] | None:
    """Return the lines before an abort while Python shut down; None if the process did not end so.

    faulthandler shows no Python frame at that time, or is off already.
    """
    if _TERMINATED not in lines:
        return None
    aborted = len(lines) - 1 - list(reversed(lines)).index(_TERMINATED)
    has_frame = any(FRAME.match(line) for line in lines[aborted + 1 :])
    return None if has_frame else lines[:aborted]


def _of_exit(exit_code: int | None, lines: Sequence[str], oom: str | None) -> str:
    if worker := _of_worker(lines, oom):
        return worker
    refusal = _refusal(exit_code, lines)
    text, place = (refusal, place_in_file(lines, refusal)) if refusal else exception(lines, exit_code)
    for kind, pattern in _KINDS:
        if re.search(pattern, text):
            return f"{kind}: {shorten(text, _TEXT_CHARS)}{place}"
    is_deliberate = refusal and exit_code not in (None, 1)
    if (lost := _line_of_loss(lines)) and not is_deliberate:
        return _lost_peer(lost)
    return f"{shorten(text, _TEXT_CHARS)}{place}"


def _of_worker(lines: Sequence[str], oom: str | None) -> str:
    """Return what killed a data worker, if the rank reports its death."""
    raised = raised_at(lines)
    # The thread that pins memory may report last that the connection of the worker is gone.
    report = lines if raised is None or _WORKER_GONE.match(lines[raised]) else last_chain(lines)
    if codes := [match[1] for line in report if (match := _WORKER_ENDED.search(line))]:
        return f"{ENDED_WORKER}, with exit code {codes[-1]}"
    ends = [match[1].strip().lower() for line in report if (match := _WORKER.search(line))]
    gone = not ends and _lost_while_fetching(lines)
    if gone:
        ends = [(match[1] or match[2]).lower() for line in lines if (match := _WORKER_SAID.match(line))]
    if ends and ends[-1] == "bus error":
        return f"{SHARED_MEMORY}: a data worker ended with a bus error"
    if ends and ends[-1] != "killed":
        return f"{CRASHED_WORKER}: {ends[-1]}{crash_place(lines)}"
    if oom and (ends or gone):
        return _of_kill("a data worker", oom)
    if ends and oom == "":
        return f"a data worker was killed {KILLED}{_NOT_FOR_MEMORY}"
    if ends:
        return f"{OUT_OF_MEMORY}, most likely: a data worker was killed"
    return f"{ENDED_WORKER}, or was killed" if gone else ""


def _lost_while_fetching(lines: Sequence[str]) -> bool:
    raised = raised_at(lines)
    if raised is None or not _WORKER_GONE.match(lines[raised]):
        return False
    return any(_FETCHING in line for line in lines[begins(lines)[-1] : raised])


def _of_kill(who: str, oom: str) -> str:
    return f"{OUT_OF_MEMORY}: the kernel killed {who} {oom}"


def _lost_peer(said: str) -> str:
    return f"{LOST_PEER}: {shorten(said, _TEXT_CHARS)}"


def _refusal(exit_code: int | None, lines: Sequence[str]) -> str:
    """Return the reason that a process printed without a traceback; empty if its exception says more."""
    if exit_code == _EXIT_USAGE and lines and _USAGE.match(lines[-1]):
        return lines[-1]
    raised = raised_at(lines)
    said = [n for n, line in enumerate(lines) if _REFUSAL.match(line) and (raised is None or n > raised)]
    if not said:
        return ""
    kind, _, text = whole(lines, said[-1]).partition(": ")
    if kind != "SystemExit" and went_on(lines, said[-1], EXIT_FAILED):
        return ""
    if exit_code in (None, 1) and raised is not None and kind != "SystemExit":
        return ""  # The exception caused the error of slurmddp.
    return text if kind in ("Error", "SystemExit") else f"{kind}: {text}"


def _line_of_loss(lines: Sequence[str]) -> str:
    """Return the line in which a process says that it lost another rank; empty without such a line.

    Only the message of the last exception counts, or the last lines without an exception.
    """
    return _loss_in(_before_loss(plain_lines(lines)))


def _before_loss(plain: Sequence[str]) -> Sequence[str]:
    """Return the lines up to an own error of the process, if it lost others only while handling this error.

    An example is `finally: barrier()`, which the other ranks never reach.
    """
    earlier = before_last(plain) if _loss_in(plain) else None
    return plain if earlier is None or _loss_in(earlier) else earlier


def _loss_in(plain: Sequence[str]) -> str:
    raised = raised_at(plain)
    said = plain[-_LOSS_LINES:] if raised is None else plain[raised : raised + _LOSS_LINES]
    if raised is not None and (not _may_tell(said[0]) or went_on(plain, raised, EXIT_FAILED)):
        return ""
    return next((line.strip() for line in reversed(said) if _may_tell(line) and _LOST.search(line)), "")


def _may_tell(line: str) -> bool:
    return not _NOTHING_OF_IT.match(line) and not _OTHERS_ERROR.match(line)
