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
from slurmddp.host.heartbeat_page import ReportedError
from slurmddp.runs.failures import causes
from slurmddp.runs.failures.causes import reads_like_a_lost_peer, telling
from slurmddp.runs.failures.kinds import ADVICE, LOST_NODES, PHRASES, STALLS, Cause, FailureKind

DELIBERATE_CODES = frozenset({EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE})
"""Exit codes with which a rank refuses another attempt, or its node; the agents pass them on."""
LAST_LINES = 30
"""How many lines of a log are kept with a failure."""
_NO_EXIT_CODE = "left no exit code: it was killed, or its host is gone"
_EARLIER_OPENINGS: Mapping[str, FailureKind] = {
    "lost node or link": "lost_contact",
    "lost node to the preflight": "unfit_node",
    "lost node to the ranks": "unable_node",
    "lost node": "lost_node",
}
"""The first words of the reasons of lost nodes in records without a kind; the longer ones come first."""


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
    kind: FailureKind = "other"
    """Why, by a plain name; other: an error of the program, or unknown."""
    reason: str = ""
    """Why, as one phrase; empty if unknown."""
    remedy: str = ""
    """The advice that the process itself printed; empty if it printed none."""
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
        if not self._has_end:
            return f"{self._who} {self.reason or _NO_EXIT_CODE}"
        return f"{self.short}: {self.reason}" if self.reason else self.short

    @property
    def short(self) -> str:
        """Process, host and end, without the reason."""
        if self.kind in STALLS:
            return f"{self._who} {PHRASES['stalled']}"
        if self.kind == "lost_contact":
            return f"{self._who} {PHRASES['lost_contact']}"
        if self.kind in LOST_NODES:
            return f"{self._who} {PHRASES['lost_node']}"
        return f"{self._who} {self._how}" if self._has_end else self.sentence

    @property
    def _has_end(self) -> bool:
        """Whether the exit code or the signal of the process is known."""
        return self.exit_code is not None or self.signal is not None

    @property
    def _who(self) -> str:
        host = self.host or "an unknown host"
        if self.kind == "lost_contact":
            return f"nodes {host.replace(', ', ' and ')}"
        if self.kind in LOST_NODES:
            return f"node {self.node_rank} ({host})"
        if self.rank is not None:
            return f"rank {self.rank} on {host}"
        # Before the ranks exist, only their agent can fail.
        return f"the agent {'' if self.node_rank is None else f'of node {self.node_rank} '}on {host}"

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
        return ADVICE.get(self.kind) or self.remedy

    @property
    def lines_title(self) -> str:
        """The title of `last_lines`."""
        return "its stack" if self.kind in STALLS else "its last lines"

    def telling_lines(self, count: int) -> tuple[str, ...]:
        """Return the most useful of `last_lines`; a stack begins with its innermost frame."""
        if self.kind in STALLS:
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
    reported: ReportedError | None = None
    """The error by which the process said that it ends; None if it said nothing."""

    @cached_property
    def explained(self) -> Failure:
        """The failure with its reason."""
        return self.because()

    def because(self, cause: Cause | None = None) -> Failure:
        """Return the failure with its last lines and `cause`; None: the cause that report and lines name."""
        lines = self.lines()
        cause = cause or self._cause(lines)
        reason = cause.reason
        if not reason.endswith("..."):
            reason = reason.removesuffix(".")

        known = {one.name: getattr(self, one.name) for one in fields(Failure)}
        known |= {"kind": cause.kind, "reason": reason, "last_lines": telling(lines, LAST_LINES)}
        return Failure(**known)

    def _cause(self, lines: Sequence[str]) -> Cause:
        """Return the cause that the process has reported, or the cause that its last lines name."""
        reported = self.reported
        # An abort after a report comes from threads that still ran while the process ended.
        if reported is None or not reported.text or self.signal not in (None, "SIGABRT"):
            return causes.find_cause(self.exit_code, self.signal, lines, self.oom)
        return causes.lost_peer(reported.text) if reported.is_lost_rank else causes.of_text(reported.text)


def lost_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that is gone, as another node sees it."""
    return Failure(
        rank=None,
        node_rank=agent,
        host=hosts[agent],
        exit_code=None,
        signal=None,
        time=round(time.time(), 3),
        kind="lost_node",
        reason=f"{PHRASES['lost_node']}: {why}",
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
        lost = _with_cause(lost_node(agent, hosts, ""), Cause.of("lost_contact", why))
        return replace(lost, node_rank=None, host=pair)
    return lost_node(agent, hosts, why)


def unhealthy_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that failed the preflight, if the other nodes continue without it."""
    return _with_cause(lost_node(agent, hosts, ""), Cause.of("unfit_node", why.removesuffix(".")))


def unable_node(agent: int, hosts: Sequence[str], found: Failure) -> Failure:
    """Return the failure of a node whose agent ends because of `found`, if the other nodes may continue."""
    why = (found.reason or found.sentence).removesuffix(".")
    return _with_cause(lost_node(agent, hosts, ""), Cause.of("unable_node", why))


def _with_cause(failure: Failure, cause: Cause) -> Failure:
    return replace(failure, kind=cause.kind, reason=cause.reason)


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
    failure = Failure(**known)
    return failure if "kind" in found else _with_earlier_kind(failure)


def _with_earlier_kind(failure: Failure) -> Failure:
    """Return a failure from a record without a kind, which its reason began with at that time."""
    has_end = failure.exit_code is not None or failure.signal is not None
    for opening, kind in _EARLIER_OPENINGS.items():
        if failure.reason.startswith(opening) and not has_end:
            reason = f"{PHRASES[kind]}{failure.reason.removeprefix(opening)}"
            return replace(failure, kind=kind, reason=reason)

    kinds = [kind for kind, phrase in PHRASES.items() if failure.reason.startswith(phrase)]
    kind = max(kinds, key=lambda kind: len(PHRASES[kind]), default="other")
    is_possible = not has_end or kind not in STALLS
    return replace(failure, kind=kind) if is_possible else failure


def is_consequence(failure: Failure) -> bool:
    """Return whether another failure may be the cause: a lost peer, or an end before the others."""
    if failure.exit_code == EXIT_FINISHED or failure.kind == "stalled_together":
        return True
    if failure.exit_code is None and failure.signal != "SIGABRT":
        return False  # Killed, lost or hung: its last lines do not matter.
    if failure.exit_code in DELIBERATE_CODES:
        return False
    if failure.reason:
        return failure.kind == "lost_peer"
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
    end = "" if sentence.endswith("...") else "."  # A long reason was cut off.
    return f"{sentence[0].upper()}{sentence[1:]}{end}" + (f" {failure.advice}" if failure.advice else "")


def as_error(failure: Failure, log: Path, *, with_lines: bool = True) -> SlurmddpError:
    """Return the error to show a person: the cause, the last lines, and where the whole log is."""
    lines = "".join(f"\n    {line}" for line in failure.last_lines) if with_lines else ""
    title = failure.lines_title.capitalize()
    message = describe(failure) + (f" {title}:{lines}\n" if lines else "")
    kinds = {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}
    kind = kinds.get(failure.exit_code or 0, RankFailure)
    return kind(message, hint=f"The whole log is {log}.")
