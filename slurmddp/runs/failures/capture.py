"""The failure of a process of a run: which rank, where, how, its last lines, and the sentences that say so.

srun reports the highest exit code of all tasks, which hides the first cause. So the first agent or local
launcher that sees a rank die writes `failure.json` into the logs of the attempt, and others leave this file
alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FINISHED,
    EXIT_NO_PROGRESS,
    EXIT_UNHEALTHY_NODE,
    ConfigError,
    NoProgressError,
    RankFailure,
    SlurmddpError,
)
from slurmddp.runs.failures import causes
from slurmddp.runs.failures.causes import reads_like_a_lost_peer, reason_of, telling
from slurmddp.runs.failures.tracebacks import TRACEBACK
from slurmddp.runs.folder.layout import RunFolder

DELIBERATE_CODES = frozenset({EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE})
"""Exit codes with which a rank refuses another attempt, or its node; the agents pass them on."""
ENDED_BY_AGENT = "ended by its agent"
"""The reason of a rank that its agent has ended: another failure is the cause."""
LAST_LINES = 30
"""How many lines of a log are kept with a failure."""
_READ_LINES = 400
"""How many lines are read to find the reason: the last lines of a deep traceback all belong to torch."""
_READ_BYTES = (1 << 16, 1 << 20)
"""How many bytes of a log are read; the second number only if the first may begin within a traceback."""
_LINE_CHARS = 400
_OBEYED = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""Escape sequences and control characters, from colours or binary output."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one process; `rank` and `local_rank` are None if an agent failed."""

    rank: int | None
    local_rank: int | None = None
    node_rank: int | None = None
    host: str
    exit_code: int | None
    signal: str | None
    time: float = 0.0
    last_lines: tuple[str, ...] = ()
    reason: str = ""
    """Why, as one phrase (see `causes`); empty if unknown."""
    generation: int = 0
    """The number of restarts in place before the failure."""

    @property
    def explained(self) -> Failure:
        """The failure with its reason."""
        return self

    @property
    def sentence(self) -> str:
        """Process, host, end and reason, without a final full stop."""
        for kind in (causes.LOST_CONTACT, causes.LOST_NODE, causes.STALLED):
            if self.reason.startswith(kind):
                return f"{self.short}{self.reason.removeprefix(kind)}"
        known = self.exit_code is not None or self.signal is not None
        return f"{self.short}: {self.reason}" if self.reason and known else self.short

    @property
    def short(self) -> str:
        """Process, host and end, without the reason."""
        host = self.host or "an unknown host"
        if self.reason.startswith(causes.LOST_CONTACT):
            return f"nodes {host.replace(', ', ' and ')} lost each other"
        if self.reason.startswith(causes.LOST_NODE):
            return f"node {self.node_rank} ({host}) was lost"
        who = f"rank {self.rank} on {host}"
        if self.rank is None:
            # Before the ranks exist, only their agent can fail.
            who = f"the agent {'' if self.node_rank is None else f'of node {self.node_rank} '}on {host}"
        if self.reason.startswith(causes.STALLED):
            return f"{who} {causes.STALLED}"
        if self.signal is None and self.exit_code is None:
            return f"{who} {self.reason or 'left no word: it was killed, or its host is gone'}"
        return f"{who} {self._how}"

    @property
    def _how(self) -> str:
        if self.signal == "SIGKILL" and not self.reason:
            return "was killed by SIGKILL (often the kernel's out-of-memory killer)"
        if self.signal:
            return f"was killed by {self.signal}"
        if self.exit_code in DELIBERATE_CODES:
            return f"refused to go on (exit code {self.exit_code})"
        return f"ended with exit code {self.exit_code}"

    @property
    def advice(self) -> str:
        """The remedy; empty if there is no advice."""
        return causes.advice(self.reason)

    @property
    def lines_title(self) -> str:
        """The title of `last_lines`."""
        return "its stack" if self.reason.startswith(causes.STALLED) else "its last lines"

    def telling_lines(self, count: int) -> tuple[str, ...]:
        """Return the most useful of `last_lines`; a stack begins with its innermost frame."""
        if self.reason.startswith(causes.STALLED):
            return self.last_lines[:count]
        return telling(self.last_lines, count)


@dataclass(frozen=True, kw_only=True)
class UnexplainedFailure(Failure):
    """A failure of this host whose log is read for the reason only when `explained` is first used.

    A restart decides by exit codes, so the search for the reason need not hold it up.
    """

    lines: Callable[[], Sequence[str]]
    """Returns the last lines of the process (see `last_lines`)."""
    oom: str | None = None
    """How the kernel killed for memory, as `OomWatch.verdict` says."""

    @cached_property
    def explained(self) -> Failure:
        """The failure with its reason."""
        return self.because()

    def because(self, reason: str = "") -> Failure:
        """Return the failure with its last lines and `reason`; if empty, find the reason in all lines."""
        lines = self.lines()
        reason = reason or reason_of(self.exit_code, self.signal, lines, self.oom)
        known = {one.name: getattr(self, one.name) for one in fields(Failure)}
        known["last_lines"] = telling(lines, LAST_LINES)
        known["reason"] = reason if reason.endswith("...") else reason.removesuffix(".")
        return Failure(**known)


def lost_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that is gone, as another node sees it."""
    return Failure(
        rank=None,
        node_rank=agent,
        host=hosts[agent],
        exit_code=None,
        signal=None,
        time=round(time.time(), 3),
        reason=f"{causes.LOST_NODE}: {why}",
    )


def lost_agent(agent: int, hosts: Sequence[str], why: str, together: int, *, here: int) -> Failure:
    """Return the failure of an agent whose link to the agent `here` has ended.

    One end of a silent connection can't tell which end was cut off. If all others fell silent together, the
    network of this end is the likely cause.

    Args:
        agent: the agent that was lost.
        hosts: the hosts of all agents.
        why: how the link ended.
        together: how many agents fell silent together; 0 if this end still hears others.
        here: the agent that has lost it.
    """
    if together > 1:
        lost_all = (
            f"it lost all {together} other nodes at once, so its own network is the likely cause ({why})"
        )
        return lost_node(here, hosts, lost_all)
    if together == 1:
        pair = ", ".join(hosts[one] for one in sorted((agent, here)))
        lost = lost_node(agent, hosts, "")
        return replace(lost, node_rank=None, host=pair, reason=f"{causes.LOST_CONTACT}: {why}")
    return lost_node(agent, hosts, why)


def unhealthy_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that failed the preflight, if the other nodes continue without it."""
    return replace(lost_node(agent, hosts, ""), reason=f"{causes.UNFIT_NODE}: {why.removesuffix('.')}")


def unable_node(agent: int, hosts: Sequence[str], found: Failure) -> Failure:
    """Return the failure of a node whose agent ends because of `found`, if the other nodes may continue."""
    why = (found.reason or found.sentence).removesuffix(".")
    return replace(lost_node(agent, hosts, ""), reason=f"{causes.UNABLE_NODE}: {why}")


def from_json(text: str) -> Failure | None:
    """Return the failure in the text of a file; None if the text is incomplete."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return from_facts(found) if isinstance(found, dict) else None


def from_facts(found: Mapping[str, Any]) -> Failure:
    """Return the failure in an event or a record; missing facts are not known."""
    known: dict[str, Any] = {"rank": None, "host": "", "exit_code": None, "signal": None}
    known |= {field.name: found[field.name] for field in fields(Failure) if field.name in found}
    known["host"], known["reason"] = str(known["host"] or ""), str(known.get("reason") or "")
    known["last_lines"] = tuple(str(line) for line in known.get("last_lines") or ())
    return Failure(**known)


def is_consequence(failure: Failure) -> bool:
    """Return whether another failure may be the cause: a lost peer, or an end before the others."""
    if failure.exit_code == EXIT_FINISHED or failure.reason.startswith(causes.STALLED_TOGETHER):
        return True
    if failure.exit_code is None and failure.signal != "SIGABRT":
        return False  # Killed, lost or hung: its last lines do not matter.
    if failure.exit_code in DELIBERATE_CODES:
        return False
    if failure.reason:
        return failure.reason.startswith(causes.LOST_PEER)
    return reads_like_a_lost_peer(failure.last_lines)


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
    reason: str = "",
    generation: int = 0,
    oom: str | None = None,
) -> Failure:
    """Return the failure of a process that ended on this host just now.

    The reason is found in all `lines` (see `last_lines`) unless it is given; the last of them are kept.
    `oom` is what `OomWatch.verdict` says.
    """
    found = unexplained(
        returncode,
        lambda: lines,
        node_rank=node_rank,
        rank=rank,
        local_rank=local_rank,
        generation=generation,
        oom=oom,
    )
    return found.because(reason)


def unexplained(
    returncode: int,
    lines: Callable[[], Sequence[str]],
    *,
    node_rank: int,
    rank: int | None = None,
    local_rank: int | None = None,
    generation: int = 0,
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
        generation=generation,
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
    with suppress(OSError), log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END) if until is None else until
        for most in _READ_BYTES:
            stream.seek(max(since, size - most))
            text = stream.read(max(0, size - stream.tell())).decode("utf-8", errors="replace")
            lines = tail_of(text, count)
            all_read = size - since <= most
            if all_read or (len(lines) >= count and not _is_indented(lines[0])):
                break
    return lines


def tail_of(text: str, count: int = _READ_LINES) -> tuple[str, ...]:
    """Return the last `count` lines with text, or more if the message of an exception has more.

    A line that a program redraws has its last text. Escape sequences are removed.
    """
    drawn = [as_drawn(line).rstrip() for line in text.split("\n")]
    lines = [line if line.isprintable() else _OBEYED.sub("", line).rstrip() for line in drawn]
    # Python underlines the error in a traceback, which is useless in cut lines.
    shown = tuple(line[:_LINE_CHARS] for line in lines if line.strip(" ^~"))
    return shown[_begin(shown, len(shown) - count) :]


def _begin(lines: Sequence[str], first: int) -> int:
    """Return the first line to read: `first`, or the beginning of the traceback around it.

    The message of an exception and the frames of a recursion may have thousands of lines. All are indented,
    except for the line with the name of the exception.
    """
    begin = first = max(0, first)
    for _ in ("the message", "the frames"):
        while begin and _is_indented(lines[begin]):
            begin -= 1
        if lines[begin : begin + 1] and lines[begin].endswith(TRACEBACK):
            return begin
        begin = max(0, begin - 1)
    return first


def _is_indented(line: str) -> bool:
    return line.startswith((" ", "\t"))


def likely_first(failures: Iterable[Failure]) -> Failure:
    """Return which of several simultaneous failures is the cause of the others.

    A deliberate refusal comes first, then a signal from outside, then an exit code, then an abort, with which
    a rank ends after it lost its peers. A rank that left with 0 is the cause if all others only lost a peer.
    The result and all failures that are compared get their reasons here.
    """

    def order(failure: Failure) -> tuple[int, float, int]:
        if failure.exit_code in DELIBERATE_CODES or failure.exit_code == EXIT_FINISHED:
            weight = 0
        elif failure.signal == "SIGABRT":
            weight = 3
        else:
            weight = 1 if failure.signal or failure.rank is None else 2
        return weight + 10 * is_consequence(failure), failure.time, failure.rank or 0

    return min((failure.explained for failure in failures), key=order)


def record(folder: RunFolder, attempt: int, failure: Failure, *, generation: int | None = None) -> bool:
    """Write `failure.json` and the event of an attempt; return False if another process was first.

    With `generation`, the ranks restart in place after the failure, and the attempt continues.
    """
    path = folder.failure_file(attempt)
    if generation is not None:
        path = path.with_name(f"failure-g{generation}.json")
        failure = replace(failure, generation=generation)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(as_json(failure))
    except OSError:
        path.unlink(missing_ok=True)  # An incomplete file would block other writers.
        raise
    _add_event(folder, attempt, failure)
    return True


def as_json(failure: Failure) -> str:
    """Return a failure as a file's text; `from_json` reads it."""
    known = {name: value for name, value in asdict(failure).items() if value not in ("", ())}
    return json.dumps(known, ensure_ascii=False, indent=1) + "\n"


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
            generation=failure.generation,
            reason=failure.reason,
        )


def write_exit(
    folder: RunFolder, attempt: int, rank: int, returncode: int, generation: int = 0, reason: str = ""
) -> None:
    """Write `exit-rank-<rank>`: how a rank ended, also without failure; a restarted rank replaces it."""
    code, name = split_status(returncode)
    end = Failure(
        rank=rank,
        host=socket.gethostname(),
        exit_code=code,
        signal=name,
        time=round(time.time(), 3),
        reason=reason,
        generation=generation,
    )
    with suppress(OSError):  # A full disk must not change what happens next.
        (folder.log_dir(attempt) / f"exit-rank-{rank}").write_text(as_json(end), encoding="utf-8")


def read(folder: RunFolder, attempt: int) -> Failure | None:
    """Return the recorded failure of an attempt; None before it is complete."""
    try:
        return from_json(folder.failure_file(attempt).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def node_code(failure: Failure) -> int:
    """Return the code with which every node of a failed attempt ends."""
    return failure.exit_code if failure.exit_code in DELIBERATE_CODES else SlurmddpError.exit_code


def describe(failure: Failure) -> str:
    """Return the sentence that names rank, host and cause, and the advice."""
    sentence = failure.sentence
    return f"{sentence[0].upper()}{sentence[1:]}." + (f" {failure.advice}" if failure.advice else "")


def as_error(failure: Failure, log: Path) -> SlurmddpError:
    """Return the error to show a person: the cause, the last lines, and where the whole log is."""
    lines = "".join(f"\n    {line}" for line in failure.last_lines)
    title = failure.lines_title.capitalize()
    message = describe(failure) + (f" {title}:{lines}\n" if lines else "")
    kinds = {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}
    kind = kinds.get(failure.exit_code or 0, RankFailure)
    return kind(message, hint=f"The whole log is {log}.")


def as_drawn(line: str) -> str:
    """Return the last text of a line that a program redraws, such as a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]
