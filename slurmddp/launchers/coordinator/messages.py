"""Define the messages between the agents of an attempt, one dataclass for each kind; encode and decode them.

Agents send requests and reports to the coordinator, which is part of node 0's agent. The coordinator sends
orders. The link itself adds `Joined` and `Lost`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from slurmddp.launchers.link.connection import MAX_MESSAGE_BYTES
from slurmddp.launchers.watchdog.stragglers import Pace
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures.failure import Failure

_LINES_BYTES = MAX_MESSAGE_BYTES // 4
"""The most bytes for the log lines of one list of failures.

A message holds at most two lists of failures, with other facts about each failure.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Anything that one agent sends to another."""


# From the link.


@dataclass(frozen=True, kw_only=True)
class Joined(Message):
    """The agent has connected to node 0."""

    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Lost(Message):
    """The connection to the agent ended without a farewell."""

    why: str = ""
    together: int = 0
    """How many agents fell silent together; 0 if another agent still sends."""


# From an agent to the coordinator.


@dataclass(frozen=True, kw_only=True)
class StopRequested(Message):
    """The run was asked to stop by a signal to the agent or to one of its ranks."""

    signal: int
    by_slurm: bool = False
    """Whether SLURM itself has sent the signal to the ranks, past the agent."""


@dataclass(frozen=True, kw_only=True)
class AgentUnable(Message):
    """The agent can run no ranks."""

    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Report(Message):
    """A report about the ranks of one node. It is ignored once another worker group has replaced them."""

    restart_count: int = -1
    """The restart count of the worker group that the report is about; -1 before the first worker group."""
    step: int = -1
    """The last step that a rank of the node has completed; -1 before the first step."""
    silent_s: float = math.inf
    """Seconds since the node completed this step."""
    left: tuple[Failure, ...] = ()
    """Ranks that exited with 0. If other ranks still needed them, they exited too early."""


@dataclass(frozen=True, kw_only=True)
class FailureReport(Report):
    """A report about ranks of the node that have failed."""

    failures: tuple[Failure, ...] = ()
    unhealthy: Mapping[int, str] = field(default_factory=dict)
    """The reasons of nodes that did not pass the preflight, by node rank."""


class WorkersFailed(FailureReport):
    """Ranks of the node have failed; other ranks of the node may still run."""


class WorkersKilled(FailureReport):
    """No rank is left on the node, as `KillWorkers` has ordered. The `failures` came before the kill."""


@dataclass(frozen=True, kw_only=True)
class WorkersDone(Report):
    """All ranks of the node have ended with 0 or 75."""

    code: int


@dataclass(frozen=True, kw_only=True)
class HangSuspected(Report):
    """No rank of the node has shown a heartbeat within its limit."""


@dataclass(frozen=True, kw_only=True)
class StacksReported(Report):
    """The answer to `ReportStacks`."""

    reports: tuple[RankReport, ...]


@dataclass(frozen=True, kw_only=True)
class PaceReported(Report):
    """The steps of the node's ranks, and how long they took; sent twice a minute."""

    paces: Mapping[int, Pace]


@dataclass(frozen=True, kw_only=True)
class HungAtExit(Report):
    """All ranks that are left on the node hang at their exit. Empty `reports` withdraw an earlier message."""

    reports: tuple[RankReport, ...] = ()
    codes: tuple[int, ...] = ()
    """Exit codes of the node's other ranks."""


# Orders of the coordinator.


@dataclass(frozen=True, kw_only=True)
class Order(Message):
    """An order of the coordinator to one agent, which may be the coordinator's own."""


@dataclass(frozen=True, kw_only=True)
class StartWorkers(Order):
    """Start the ranks of a worker group. An agent that is not among `agents` waits as a spare."""

    restart_count: int
    agents: tuple[int, ...]
    """Agents that run ranks, in the order of the ranks."""
    master: tuple[str, int] = ("", 0)
    """MASTER_ADDR and MASTER_PORT for ranks that use them."""
    preflight: bool = True
    """Whether the ranks check their nodes first, if the run has a preflight."""
    excluded: tuple[int, ...] = ()
    """Agents that run no more ranks, because their nodes did not pass a preflight."""


@dataclass(frozen=True, kw_only=True)
class KillWorkers(Order):
    """Kill the ranks and answer with `WorkersKilled`: another worker group follows."""


@dataclass(frozen=True, kw_only=True)
class RequestStop(Order):
    """Send the ranks the signal by which the run was asked to stop on another node."""

    signal: int
    by_slurm: bool = False
    """Whether SLURM itself has sent the signal to the ranks of that node, past the agent."""


@dataclass(frozen=True, kw_only=True)
class ReportStacks(Order):
    """Answer with `StacksReported`, because a node suspects a hang."""

    restart_count: int


@dataclass(frozen=True, kw_only=True)
class _OrderWithCode(Order):
    code: int
    """An exit code."""


class OthersDone(_OrderWithCode):
    """The ranks of another node have ended with `code`, 0 or 75, and the ranks of this node should follow."""


class EndHungRanks(_OrderWithCode):
    """End the ranks that hang at their exit, because all other ranks have ended well, with `code`."""


class Leave(_OrderWithCode):
    """Leave, because all ranks have ended. An agent that ran no ranks exits with `code`."""


class Fail(_OrderWithCode):
    """End the ranks and leave with `code`, because the attempt has failed."""


_KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Joined, Lost, StopRequested, AgentUnable),
        *(WorkersFailed, WorkersKilled, WorkersDone),
        *(HangSuspected, StacksReported, PaceReported, HungAtExit),
        *(StartWorkers, KillWorkers, RequestStop, ReportStacks),
        *(OthersDone, EndHungRanks, Leave, Fail),
    )
}


def encode(message: Message) -> dict[str, Any]:
    """Return the JSON object for a message; its failures have their reasons, and as many lines as fit."""
    short = {
        field.name: _shortened(getattr(message, field.name))
        for field in fields(message)
        if field.name in ("failures", "left")
    }
    # `explained` reads the log of a dead rank, before its agent sends the failure.
    return {"kind": type(message).__name__, **asdict(replace(message, **short))}


def decode(values: Mapping[str, Any]) -> Message | None:
    """Return the message of a JSON object; None if its kind is unknown.

    Raises TypeError if a field without a default is missing.
    """
    kind = _KINDS.get(values["kind"])
    if kind is None:
        return None

    names = {field.name for field in fields(kind)} & values.keys()
    return kind(**{name: _DECODERS.get(name, _unchanged)(values[name]) for name in names})


def _unchanged(value: Any) -> Any:
    return value


def _failure(facts: Mapping[str, Any]) -> Failure:
    return Failure(**{**facts, "last_lines": tuple(facts["last_lines"])})


def _failures(values: Sequence[Mapping[str, Any]]) -> tuple[Failure, ...]:
    return tuple(map(_failure, values))


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "failure": _failure,
    "failures": _failures,
    "left": _failures,
    "reports": lambda values: tuple(map(RankReport.from_json, values)),
    # The keys of a JSON object are texts.
    "paces": lambda values: {int(rank): Pace(**pace) for rank, pace in values.items()},
    "agents": tuple,
    "codes": tuple,
    "master": tuple,
    "excluded": tuple,
    "unhealthy": lambda values: {int(node_rank): reason for node_rank, reason in values.items()},
}
"""How to decode the fields that JSON holds in another type; all fields of one name have the same type."""


def _shortened(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures, each with as many of its last lines as fit."""
    return tuple(_within(failure.explained, _LINES_BYTES // len(failures)) for failure in failures)


def _within(failure: Failure, size: int) -> Failure:
    """Return a failure with half of its last lines, as often as they are longer than `size` bytes."""
    count = len(failure.last_lines)
    while count and len(json.dumps(failure.last_lines)) > size:
        count //= 2
        failure = replace(failure, last_lines=failure.telling_lines(count))
    return failure
