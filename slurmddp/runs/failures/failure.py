"""The failure of a process of a run: rank, host, end, last lines, and the sentences that describe it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from slurmddp.runs.failures.causes import ADVICE, reads_like_a_lost_peer, telling
from slurmddp.runs.failures.kinds import LOST_NODES, PHRASES, STALLS, Cause, FailureKind
from slurmddp.runs.folder.history import restart_count

if TYPE_CHECKING:
    from slurmddp.host.heartbeat_page import ReportedError

DELIBERATE_CODES = frozenset({EXIT_CONFIG, EXIT_NO_PROGRESS, EXIT_UNHEALTHY_NODE})
"""Exit codes by which a rank demands that the run ends or leaves the node; agents exit with the same code."""
LAST_LINES = 30
"""How many lines of a log are kept with a failure."""
_NO_EXIT_CODE = "recorded no exit code: it was killed, or its host failed"
_EARLIER_OPENINGS: Mapping[str, FailureKind] = {
    "lost node or link": "lost_contact",
    "lost node to the preflight": "unfit_node",
    "lost node to the ranks": "unable_node",
    "lost node": "lost_node",
    "stalled: in a collective that not all have joined": "stalled_together",
}
"""The first words of reasons in records without a kind, now worded differently; longer ones come first."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one process that failed, and the reason.

    `rank` and `local_rank` are None if an agent or its node failed.
    """

    rank: int | None
    local_rank: int | None = None
    node_rank: int | None = None
    host: str
    exit_code: int | None
    signal: str | None
    time: float = 0.0
    last_lines: tuple[str, ...] = ()
    kind: FailureKind = "other"
    """The kind of the cause; other: an error of the program, or an unknown cause."""
    reason: str = ""
    """The cause as one phrase; empty if unknown."""
    remedy: str = ""
    """The advice that the process itself printed; empty if it printed none."""
    restart_count: int = 0
    """The number of restarts in place before the failure."""
    asked_to_stop: bool = False
    """Whether a script had been asked to stop before it failed."""

    @property
    def explained(self) -> Failure:
        """The failure with its reason, which an `UnexplainedFailure` has to read from the log first."""
        return self

    @property
    def sentence(self) -> str:
        """A sentence without its full stop: which process failed, on which host, how it ended, and why."""
        if not self._has_end:
            return f"{self._who} {self.reason or _NO_EXIT_CODE}"
        if not self.reason:
            return self.short
        return f"{self.short}: {self.reason}"

    @property
    def short(self) -> str:
        """The sentence without the reason, for example "rank 3 on c07 ended with exit code 1"."""
        if self.kind in STALLS:
            return f"{self._who} {PHRASES['stalled']}"
        if self.kind == "lost_contact":
            return f"{self._who} {PHRASES['lost_contact']}"
        if self.kind in LOST_NODES:
            return f"{self._who} {PHRASES['lost_node']}"
        if not self._has_end:
            return self.sentence
        return f"{self._who} {self._how}"

    @property
    def _has_end(self) -> bool:
        """Return whether the exit code or the signal of the process is known."""
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

        # Without a rank, the failed process is the agent.
        if self.node_rank is None:
            return f"the agent on {host}"
        return f"the agent of node {self.node_rank} on {host}"

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
        """The advice about the failure: for its kind, or else `remedy`; empty if there is none."""
        return ADVICE.get(self.kind) or self.remedy

    @property
    def lines_title(self) -> str:
        """The words that introduce `last_lines` in a message."""
        return "its stack" if self.kind in STALLS else "its last lines"

    def telling_lines(self, count: int) -> tuple[str, ...]:
        """Return the `count` most useful of `last_lines`; of a stack these are the first, innermost ones."""
        if self.kind in STALLS:
            return self.last_lines[:count]
        return telling(self.last_lines, count)


@dataclass(frozen=True, kw_only=True)
class UnexplainedFailure(Failure):
    """A failure on this host whose reason is unknown until `explained` reads the log.

    The decision about a restart needs only exit codes, so it does not wait for the log.
    """

    lines: Callable[[], Sequence[str]]
    """Returns the last lines of the process (see `last_lines`)."""
    oom: str | None = None
    """The result of `OomWatch.verdict`: whether the kernel killed a process because memory ran out."""
    reported: ReportedError | None = None
    """The error that the process reported to its agent before it ended; None if it reported none."""

    @cached_property
    def explained(self) -> Failure:
        """The failure with the reason that the log names; the log is read at the first use."""
        return self.because()

    def because(self, cause: Cause | None = None) -> Failure:
        """Return the failure with its last lines and `cause`, by default the cause that these lines name."""
        lines = self.lines()
        if cause is None:
            cause = self._cause(lines)
        reason = cause.reason
        # Three points mark a reason that was cut off.
        if not reason.endswith("..."):
            reason = reason.removesuffix(".")

        known = {field.name: getattr(self, field.name) for field in fields(Failure)}
        known |= {"kind": cause.kind, "reason": reason, "last_lines": telling(lines, LAST_LINES)}
        return Failure(**known)

    def _cause(self, lines: Sequence[str]) -> Cause:
        """Return the cause that the process has reported, or else the cause that its last lines name."""
        reported = self.reported
        # A report counts even after SIGABRT: such an abort comes from threads that still ran while the
        # process ended.
        if reported is None or not reported.text or self.signal not in (None, "SIGABRT"):
            return causes.find_cause(self.exit_code, self.signal, lines, self.oom)
        if reported.is_lost_rank:
            return causes.lost_peer(reported.text)
        return causes.of_text(reported.text)


def lost_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node whose agent no longer answers.

    Args:
        agent: the number of the node.
        hosts: the hosts of all nodes.
        why: what another node has noticed, such as `connection closed`.
    """
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


def lost_agent(agent: int, hosts: Sequence[str], why: str, together: int, *, observer: int) -> Failure:
    """Return the failure of the node at fault after the link between two agents has ended.

    An agent can't find out which end of a silent connection has failed. If all its links fell silent at the
    same time, its own network is the likely cause, and the failure names its own node.

    Args:
        agent: the number of the agent at the other end of the link.
        hosts: the hosts of all agents.
        why: how the link ended.
        together: the number of the observer's links, if all of them fell silent at the same time; else 0.
        observer: the number of the agent that reports this.
    """
    if together > 1:
        reason = f"it lost all {together} other nodes at once, so its own network is the likely cause ({why})"
        return lost_node(observer, hosts, reason)
    if together == 1:
        pair = ", ".join(hosts[node] for node in sorted((agent, observer)))
        failure = _with_cause(lost_node(agent, hosts, ""), Cause.of("lost_contact", why))
        return replace(failure, node_rank=None, host=pair)
    return lost_node(agent, hosts, why)


def unhealthy_node(agent: int, hosts: Sequence[str], why: str) -> Failure:
    """Return the failure of a node that failed the preflight; the other nodes continue without it."""
    return _with_cause(lost_node(agent, hosts, ""), Cause.of("unfit_node", why.removesuffix(".")))


def unable_node(agent: int, hosts: Sequence[str], failure: Failure) -> Failure:
    """Return the failure of a node that can run no ranks after `failure`; the other nodes may continue."""
    why = (failure.reason or failure.sentence).removesuffix(".")
    return _with_cause(lost_node(agent, hosts, ""), Cause.of("unable_node", why))


def _with_cause(failure: Failure, cause: Cause) -> Failure:
    return replace(failure, kind=cause.kind, reason=cause.reason)


def from_json(text: str) -> Failure | None:
    """Return the failure in a text that `as_json` returned; None if the text is incomplete."""
    try:
        facts = json.loads(text)
    except ValueError:
        return None
    return from_facts(facts) if isinstance(facts, dict) else None


def from_facts(facts: Mapping[str, Any]) -> Failure:
    """Return the failure with the fields of an event or a record; missing fields get a default or None."""
    known: dict[str, Any] = {"rank": None, "host": "", "exit_code": None, "signal": None}
    known |= {field.name: facts[field.name] for field in fields(Failure) if field.name in facts}

    known["restart_count"] = restart_count(facts) or 0

    # Wrong types are converted, because another program may have written null or a number.
    known["host"] = str(known["host"] or "")
    known["reason"] = str(known.get("reason") or "")
    known["last_lines"] = tuple(str(line) for line in known.get("last_lines") or ())

    failure = Failure(**known)
    if "kind" not in facts:
        failure = _with_earlier_kind(failure)
    return failure


def _with_earlier_kind(failure: Failure) -> Failure:
    """Return a failure with its kind, found by its reason: records of earlier versions hold no kind."""
    has_end = failure.exit_code is not None or failure.signal is not None

    for opening, kind in _EARLIER_OPENINGS.items():
        if failure.reason.startswith(opening) and not has_end:
            reason = f"{PHRASES[kind]}{failure.reason.removeprefix(opening)}"
            return replace(failure, kind=kind, reason=reason)

    kinds = [kind for kind, phrase in PHRASES.items() if failure.reason.startswith(phrase)]
    kind = max(kinds, key=lambda kind: len(PHRASES[kind]), default="other")
    # A stalled rank has no exit code, so a process with an exit code has another cause, worded alike.
    if has_end and kind in STALLS:
        return failure
    return replace(failure, kind=kind)


def is_consequence(failure: Failure) -> bool:
    """Return whether a failure may be only the consequence of another failure.

    A rank that lost another rank, that ended before the other ranks, or that stalled in a collective may have
    failed because of another rank.
    """
    if failure.exit_code == EXIT_FINISHED or failure.kind == "stalled_together":
        return True
    # A process that was killed, lost or hung did not fail because of another rank, even if its last lines
    # name one. SIGABRT is the exception: a communication library may abort a process whose peer is gone.
    if failure.exit_code is None and failure.signal != "SIGABRT":
        return False
    if failure.exit_code in DELIBERATE_CODES:
        return False
    if failure.reason:
        return failure.kind == "lost_peer"
    return reads_like_a_lost_peer(failure.last_lines)


def likely_first(failures: Iterable[Failure]) -> Failure:
    """Return which of several simultaneous failures most likely caused the other failures, with its reason.

    Failures that may be consequences (see `is_consequence`) come last. Among equals, a deliberate refusal
    comes before a signal from outside, then an exit code, then an abort, with which a rank ends after it lost
    other ranks. Equal kinds are sorted by time. A rank that ended with 0 is the cause if all other ranks only
    lost a rank.
    """

    def order(failure: Failure) -> tuple[int, float, int]:
        if failure.exit_code in DELIBERATE_CODES or failure.exit_code == EXIT_FINISHED:
            weight = 0
        elif failure.signal == "SIGABRT":
            weight = 3
        elif failure.signal or failure.rank is None:
            weight = 1
        else:
            weight = 2
        return weight + 10 * is_consequence(failure), failure.time, failure.rank or 0

    return min((failure.explained for failure in failures), key=order)


def as_json(failure: Failure) -> str:
    """Return a failure as JSON text, which `from_json` reads."""
    known = {name: value for name, value in asdict(failure).items() if value not in ("", ())}
    return json.dumps(known, ensure_ascii=False, indent=1) + "\n"


def node_code(failure: Failure) -> int:
    """Return the exit code of the agents of an attempt that ended with this failure."""
    if failure.exit_code in DELIBERATE_CODES:
        return failure.exit_code
    return SlurmddpError.exit_code


def describe(failure: Failure) -> str:
    """Return a sentence with rank, host and cause of a failure, followed by the advice if there is any."""
    sentence = failure.sentence
    # Three points mark a reason that was cut off.
    if not sentence.endswith("..."):
        sentence += "."
    sentence = f"{sentence[0].upper()}{sentence[1:]}"
    return f"{sentence} {failure.advice}" if failure.advice else sentence


def as_error(failure: Failure, log: Path, *, with_lines: bool = True) -> SlurmddpError:
    """Return an error for a person with the cause, the last lines and the path of the log.

    The class of the error depends on the exit code: ConfigError, NoProgressError or RankFailure.

    Args:
        failure: the failure.
        log: the path of the log.
        with_lines: whether the message contains the last lines.
    """
    message = describe(failure)
    if with_lines and failure.last_lines:
        lines = "".join(f"\n    {line}" for line in failure.last_lines)
        message += f" {failure.lines_title.capitalize()}:{lines}\n"

    kinds = {EXIT_CONFIG: ConfigError, EXIT_NO_PROGRESS: NoProgressError}
    kind = kinds.get(failure.exit_code or 0, RankFailure)
    return kind(message, hint=f"The whole log is {log}.")
