"""A coordinator of several nodes that don't exist: tests send messages, and read its orders and records."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from slurmddp.launchers.coordinator.coordinator import Coordinator
from slurmddp.launchers.coordinator.messages import (
    AgentUnable,
    Message,
    Report,
    WorkersFailed,
    WorkersKilled,
    decode,
    encode,
)
from slurmddp.launchers.coordinator.restart_policy import Assignment, rules_of
from slurmddp.launchers.watchdog.stragglers import Straggler
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure

RULES = rules_of({}, 3)


class Notes:
    """The records of a coordinator, kept in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: list[tuple[Any, ...]] = []
        self.awaited: list[str] = []
        self.over = False
        self.causes: list[Failure] = []
        """The failures with which `restarted` and `failed` were called."""

    def log(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)

    def awaits(self, nodes: str) -> None:
        self.awaited.append(nodes)

    def restarted(
        self, assignment: Assignment, before: Assignment, cause: Failure, step: int, silent_s: float
    ) -> None:
        self.causes.append(cause)
        self.done.append(("restarted", assignment, step))
        self.silent_s = silent_s

    def continue_without(self, agents: Collection[int]) -> None:
        if agents:
            self.done.append(("without", set(agents)))

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        self.causes.append(cause)
        ended = ("failed", cause.node_rank, cause.rank)
        self.done.append(ended if restart_count is None else ("group_failed", restart_count, cause.rank))

    def stalled(self, report: RankReport, restart_count: int) -> None:
        self.done.append(("stalled", restart_count, report.rank))

    def slow(self, found: Straggler, restart_count: int) -> None:
        self.done.append(("slow", restart_count, found.rank))


class Attempt:
    """A coordinator of three nodes, n0 to n2, for tests that read its orders after each message."""

    def __init__(self, **changes: Any) -> None:
        self.notes = Notes()
        self.unhealthy: tuple[int, ...] = ()
        """Agents whose nodes do not pass the preflight."""
        rules = replace(RULES, **changes)
        hosts = [f"n{agent}" for agent in range(rules.all_nodes)]
        self.coordinator = Coordinator(rules, hosts, self.notes, 0.0, is_over=lambda: self.notes.over)

    def taken_orders(self) -> list[tuple[int, type[Message]]]:
        orders = [(to, type(message)) for to, message in self.coordinator.orders]
        self.coordinator.orders.clear()
        self.coordinator.write_records()
        return orders

    def begin(self) -> Attempt:
        self.coordinator.poll(0.1)
        self.taken_orders()
        return self

    def receive(self, sender: int, kind: type[Message], now: float = 1.0, **facts: Any) -> None:
        """Deliver a message as the link does.

        By default, a report is about step 7 of the first worker group.
        """
        usual = {"restart_count": 0, "step": 7, "silent_s": 0.0} if issubclass(kind, Report) else {}
        message = decode(json.loads(json.dumps(encode(kind(**usual | facts)))))
        assert message is not None
        self.coordinator.receive(sender, message, now)

    def orders(self, *message: Any, **facts: Any) -> list[tuple[int, type[Message]]]:
        """Return the agents and the kinds of the orders that follow a message."""
        self.receive(*message, **facts)
        return self.taken_orders()

    def send(self, *message: Any, **facts: Any) -> list[Message]:
        """Return the orders that follow a message, with their fields."""
        self.receive(*message, **facts)
        return [order for _, order in self.coordinator.orders]

    def fail(self, sender: int, now: float = 1.0, **of: Any) -> list[tuple[int, type[Message]]]:
        return self.orders(sender, WorkersFailed, now, failures=(failed(sender, **of),))

    def unable(self, sender: int, code: int = 1) -> list[tuple[int, type[Message]]]:
        return self.orders(sender, AgentUnable, failure=failed(sender, rank=None, code=code))

    def killed(self, sender: int, *failures: Failure, **facts: Any) -> list[tuple[int, type[Message]]]:
        return self.orders(sender, WorkersKilled, failures=failures, **facts)


def failed(node: int, *, rank: int | None = 0, code: int = -9, lines: tuple[str, ...] = ()) -> Failure:
    return capture.here(code, node_rank=node, rank=rank, lines=lines)


LOST_PEER = ("RuntimeError: [../gloo/pair.cc:598] Connection closed by peer [127.0.0.1]:1",)


def to_all(kind: type[Message], *agents: int) -> list[tuple[int, type[Message]]]:
    return [(agent, kind) for agent in sorted(agents or (0, 1, 2), reverse=True)]
