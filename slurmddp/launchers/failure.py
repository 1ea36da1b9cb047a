"""What is kept of a rank's death: who, where, how, and its last words.

srun reports the highest exit code of all tasks, which hides the first cause; so the first agent (or local
launcher) that sees a rank die writes `failure.json` into the attempt's logs, and later ones leave it alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_NO_PROGRESS,
    ConfigError,
    NoProgressError,
    RankFailure,
    SlurmddpError,
)
from slurmddp.runs.fence import superseded
from slurmddp.runs.folder import RunFolder
from slurmddp.runs.history import reads_like_a_lost_peer

DELIBERATE_CODES = frozenset({EXIT_CONFIG, EXIT_NO_PROGRESS})
"""Codes with which a rank says why it must not be run again; they are passed on as they are."""
LAST_LINES = 30
_LINE_CHARS = 400


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One process's bad end; `rank` and `local_rank` are None when the agent itself died or refused."""

    rank: int | None
    local_rank: int | None
    node_rank: int
    host: str
    exit_code: int | None
    signal: str | None
    time: float = 0.0
    last_lines: tuple[str, ...] = ()


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, and `signal 40` for a number that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def split_status(returncode: int) -> tuple[int | None, str | None]:
    """Return (exit code, None) or (None, signal name) for a return code as `subprocess` gives it."""
    return (returncode, None) if returncode >= 0 else (None, signal_name(-returncode))


def here(
    returncode: int,
    *,
    node_rank: int,
    rank: int | None = None,
    local_rank: int | None = None,
    lines: Sequence[str] = (),
) -> Failure:
    """Return the failure of a process that ended on this host just now."""
    code, name = split_status(returncode)
    return Failure(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        host=socket.gethostname(),
        exit_code=code,
        signal=name,
        time=round(time.time(), 3),
        last_lines=tuple(lines),
    )


def last_lines(log: Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """Return the last `count` lines of a log, each cut to a readable length; none if it can't be read."""
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 64 * 1024))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tail_of(text, count)


def tail_of(text: str, count: int = LAST_LINES) -> tuple[str, ...]:
    """Return the last `count` non-empty lines; of a line redrawn with carriage returns, what stood last."""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return tuple(line[:_LINE_CHARS] for line in lines if line.strip())[-count:]


def likely_first(failures: Iterable[Failure]) -> Failure:
    """Return which of several failures seen at the same moment is the cause of the others.

    A deliberate refusal comes first, then a signal from outside, then plain exit codes, then an abort, which
    is how a rank ends whose peers went away.
    """

    def order(failure: Failure) -> tuple[int, int]:
        if failure.exit_code in DELIBERATE_CODES:
            weight = 0
        elif failure.signal == "SIGABRT":
            weight = 3
        else:
            weight = 1 if failure.signal else 2
        return weight + 10 * is_consequence(failure), failure.rank or 0

    return min(failures, key=order)


def is_consequence(failure: Failure) -> bool:
    """Return whether the last lines read like those of a rank that lost another one."""
    if failure.exit_code in DELIBERATE_CODES or failure.signal not in (None, "SIGABRT"):
        return False
    return reads_like_a_lost_peer(failure.last_lines)


def record(folder: RunFolder, attempt: int, failure: Failure) -> bool:
    """Write the attempt's `failure.json` and event; False if another process was first.

    The event is left out when a later attempt has begun: what all attempts share is that one's then.
    """
    text = json.dumps(asdict(failure), ensure_ascii=False, indent=1) + "\n"
    try:
        descriptor = os.open(folder.failure_file(attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    if not superseded(folder, attempt):
        folder.add_event(
            "rank_failed",
            attempt=attempt,
            rank=failure.rank,
            host=failure.host,
            exit_code=failure.exit_code,
            signal=failure.signal,
        )
    return True


def read(folder: RunFolder, attempt: int) -> Failure | None:
    """Return the failure that the attempt recorded; None also while it is being written."""
    try:
        found = json.loads(folder.failure_file(attempt).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return replace(Failure(**found), last_lines=tuple(found["last_lines"]))


def node_code(failure: Failure) -> int:
    """Return the code with which every node of a failed attempt ends."""
    return failure.exit_code if failure.exit_code in DELIBERATE_CODES else SlurmddpError.exit_code


def describe(failure: Failure) -> str:
    """Return the sentence that names rank, host and cause."""
    who = f"Rank {failure.rank}" if failure.rank is not None else f"The agent of node {failure.node_rank}"
    if failure.signal == "SIGKILL":
        cause = "was killed by SIGKILL (often the kernel's out-of-memory killer)"
    elif failure.signal:
        cause = f"was killed by {failure.signal}"
    elif failure.exit_code in DELIBERATE_CODES:
        cause = f"refused to go on (exit code {failure.exit_code})"
    else:
        cause = f"ended with exit code {failure.exit_code}"
    return f"{who} on {failure.host} {cause}."


def as_error(failure: Failure, log: Path) -> SlurmddpError:
    """Return the error to show a person: the cause, the last lines, and where the whole log is."""
    lines = "".join(f"\n    {line}" for line in failure.last_lines)
    message = describe(failure) + (f" Its last lines:{lines}\n" if lines else "")
    kinds = {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}
    kind = kinds.get(failure.exit_code or 0, RankFailure)
    return kind(message, hint=f"The whole log is {log}.")
