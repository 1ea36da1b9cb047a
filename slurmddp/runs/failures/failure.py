"""The failure of a process of a run: rank, host, end, last lines, and the sentences that say so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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

DELIBERATE_CODES = frozenset({EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE})
"""Exit codes with which a rank refuses another attempt, or its node; the agents pass them on."""
ENDED_BY_AGENT = "ended by its agent"
"""The reason of a rank that its agent has ended: another failure is the cause."""
LAST_LINES = 30
"""How many lines of a log are kept with a failure."""


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
    asked_to_stop: bool = False
    """Whether a script had been asked to stop before it failed."""

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
            return f"{who} {self.reason or 'left no exit code: it was killed, or its host is gone'}"
        return f"{who} {self._how}"

    @property
    def _how(self) -> str:
        if self.signal == "SIGKILL" and not self.reason:
            return "was killed by SIGKILL (often the kernel's out-of-memory killer)"
        if self.signal:
            return f"was killed by {self.signal}"
        if self.exit_code in DELIBERATE_CODES:
            return f"refused to continue (exit code {self.exit_code})"
        return f"ended with exit code {self.exit_code}"

    @property
    def advice(self) -> str:
        """The remedy; empty if there is no advice."""
        return causes.advice(self.reason) or causes.remedy(self.reason, self.last_lines)

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


def as_json(failure: Failure) -> str:
    """Return a failure as a file's text; `from_json` reads it."""
    known = {name: value for name, value in asdict(failure).items() if value not in ("", ())}
    return json.dumps(known, ensure_ascii=False, indent=1) + "\n"


def node_code(failure: Failure) -> int:
    """Return the code with which every node of a failed attempt ends."""
    return failure.exit_code if failure.exit_code in DELIBERATE_CODES else SlurmddpError.exit_code


def describe(failure: Failure) -> str:
    """Return the sentence that names rank, host and cause, and the advice."""
    sentence = failure.sentence
    return f"{sentence[0].upper()}{sentence[1:]}." + (f" {failure.advice}" if failure.advice else "")


def as_error(failure: Failure, log: Path, *, with_lines: bool = True) -> SlurmddpError:
    """Return the error to show a person: the cause, the last lines, and where the whole log is."""
    lines = "".join(f"\n    {line}" for line in failure.last_lines) if with_lines else ""
    title = failure.lines_title.capitalize()
    message = describe(failure) + (f" {title}:{lines}\n" if lines else "")
    kinds = {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}
    kind = kinds.get(failure.exit_code or 0, RankFailure)
    return kind(message, hint=f"The whole log is {log}.")
