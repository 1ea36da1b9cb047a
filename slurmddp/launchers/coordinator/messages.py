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
"""The largest size in bytes of all log lines in one list of failures.

A message holds at most two lists of failures, and each failure has other fields, too.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message between two agents, or from the link to an agent."""


# Messages that the link itself adds.


@dataclass(frozen=True, kw_only=True)
class Joined(Message):
    """The agent of another node has connected to node 0's agent."""

    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Lost(Message):
    """The connection to an agent ended, or the agent fell silent, without a farewell."""

    why: str = ""
    together: int = 0
    """How many agents fell silent together; 0 if another agent still sends."""


# Requests and reports of an agent to the coordinator.


@dataclass(frozen=True, kw_only=True)
class StopRequested(Message):
    """The run was asked to stop by a signal to the agent or to one of its ranks."""

    signal: int
    by_slurm: bool = False
    """Whether SLURM itself has sent the signal to the ranks, without the agent."""


@dataclass(frozen=True, kw_only=True)
class AgentUnable(Message):
    """The agent can run no ranks, for the reason `failure`."""

    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Report(Message):
    """A report about the ranks of one node, ignored once another worker group has replaced these ranks."""

    restart_count: int = -1
    """The restart count of the worker group that the report is about; -1 before the first worker group."""
    step: int = -1
    """The last step that a rank of the node has completed; -1 before the first step."""
    silent_s: float = math.inf
    """Seconds since the node completed this step."""
    left: tuple[Failure, ...] = ()
    """Ranks that exited with 0, as failures: they exited too early if other ranks still needed them."""


@dataclass(frozen=True, kw_only=True)
class FailureReport(Report):
    """A report about ranks of the node that have failed."""

    failures: tuple[Failure, ...] = ()
    unhealthy: Mapping[int, str] = field(default_factory=dict)
    """Why nodes did not pass the preflight, by node rank."""


class WorkersFailed(FailureReport):
    """Ranks of the node have failed; other ranks of the node may still run."""


class WorkersKilled(FailureReport):
    """No rank runs on the node any more, as `KillWorkers` has ordered.

    `failures` are the failures of ranks that ended by themselves before the kill.
    """


@dataclass(frozen=True, kw_only=True)
class WorkersDone(Report):
    """All ranks of the node have ended with 0 or 75."""

    code: int


@dataclass(frozen=True, kw_only=True)
class HangSuspected(Report):
    """No rank of the node has shown a new heartbeat within the limit of its phase (see `Watchdog`)."""


@dataclass(frozen=True, kw_only=True)
class StacksReported(Report):
    """The states and stacks of the node's ranks: the answer to `ReportStacks`."""

    reports: tuple[RankReport, ...]


@dataclass(frozen=True, kw_only=True)
class PaceReported(Report):
    """The number of steps of the node's ranks, and how long they took; sent twice a minute."""

    paces: Mapping[int, Pace]
    """Each rank's number of steps since its start, and the seconds that they took, by global rank."""


@dataclass(frozen=True, kw_only=True)
class HungAtExit(Report):
    """All ranks that still run on the node hang at their exit.

    A message without `reports` withdraws the node's earlier message.
    """

    reports: tuple[RankReport, ...] = ()
    codes: tuple[int, ...] = ()
    """Exit codes of the node's ranks that have ended with 0 or 75."""


# Orders of the coordinator.


@dataclass(frozen=True, kw_only=True)
class Order(Message):
    """An order of the coordinator to one agent, which may be node 0's own agent."""


@dataclass(frozen=True, kw_only=True)
class StartWorkers(Order):
    """The order to start the ranks of a worker group. An agent that is not in `agents` waits as a spare."""

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
    """The order to kill the ranks and answer with `WorkersKilled`: another worker group follows."""


@dataclass(frozen=True, kw_only=True)
class RequestStop(Order):
    """The order to send the ranks the signal with which another node was asked to stop the run."""

    signal: int
    by_slurm: bool = False
    """Whether SLURM itself has sent the signal to the ranks of that node, without the agent."""


@dataclass(frozen=True, kw_only=True)
class ReportStacks(Order):
    """The order to collect the ranks' stacks and answer with `StacksReported`: a node suspects a hang."""

    restart_count: int


@dataclass(frozen=True, kw_only=True)
class _OrderWithCode(Order):
    code: int
    """The exit code that this order gives to the agent."""


class OthersDone(_OrderWithCode):
    """The news that the ranks of another node have ended with `code`, 0 or 75.

    The agent stops its ranks if they do not stop by themselves (75), and watches for a hang at their exit.
    """


class EndHungRanks(_OrderWithCode):
    """The order to end the ranks that hang at their exit; all other ranks have ended, with `code`."""


class Leave(_OrderWithCode):
    """The order to exit, because all ranks have ended or shall stop.

    An agent that ran no ranks exits with `code`.
    """


class Fail(_OrderWithCode):
    """The order to end the ranks and exit with `code`, because the attempt has failed."""


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
    """Return the JSON object for a message.

    Its failures are explained from the ranks' logs, and hold as many of the last log lines as fit.
    """
    short = {
        field.name: _shortened(getattr(message, field.name))
        for field in fields(message)
        if field.name in ("failures", "left")
    }
    return {"kind": type(message).__name__, **asdict(replace(message, **short))}


def decode(values: Mapping[str, Any]) -> Message | None:
    """Return the message of a JSON object; None if no message class has the name in `kind`.

    Raises:
        TypeError: a field without a default is missing.
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
    # JSON turns the keys, which are ranks, into strings.
    "paces": lambda values: {int(rank): Pace(**pace) for rank, pace in values.items()},
    "agents": tuple,
    "codes": tuple,
    "master": tuple,
    "excluded": tuple,
    "unhealthy": lambda values: {int(node_rank): reason for node_rank, reason in values.items()},
}
"""By the name of a field that JSON holds in another type, the function that decodes such fields."""


def _shortened(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures, explained from the ranks' logs, each with as many of its last lines as fit."""
    return tuple(_within(failure.explained, _LINES_BYTES // len(failures)) for failure in failures)


def _within(failure: Failure, size: int) -> Failure:
    """Return a failure whose last lines were halved until their JSON has at most `size` bytes."""
    count = len(failure.last_lines)
    while count and len(json.dumps(failure.last_lines)) > size:
        count //= 2
        failure = replace(failure, last_lines=failure.telling_lines(count))
    return failure
