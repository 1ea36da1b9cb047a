"""A lead of several nodes without any: what agents say goes in, orders and notes come out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from slurmddp.launchers.coordinator.coordinator import Lead
from slurmddp.launchers.coordinator.messages import as_facts
from slurmddp.launchers.coordinator.restart_policy import Generation, Rules
from slurmddp.launchers.watchdog.stragglers import Straggler
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure

RULES = Rules(nodes=3)


class Notes:
    """What the lead would have written."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done: list[tuple[Any, ...]] = []
        self.over = False
        self.causes: list[Failure] = []
        """The failures that `fell`, `restarted` and `failed` were given."""
        self.verdicts: dict[int, dict[int, str]] = {}
        """What the preflight of each generation says of which agents' nodes."""

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def fell(self, cause: Failure, generation: int) -> None:
        self.causes.append(cause)
        self.done.append(("fell", generation, cause.rank))

    def restarted(
        self, generation: Generation, before: Generation, cause: Failure, step: int, silent_s: float
    ) -> None:
        self.causes.append(cause)
        self.done.append(("restarted", generation, step))
        self.silent_s = silent_s

    def go_on_without(self, agents: Collection[int]) -> None:
        if agents:
            self.done.append(("without", set(agents)))

    def unfit(self, generation: Generation) -> dict[int, str]:
        return self.verdicts.get(generation.number, {})

    def failed(self, cause: Failure) -> None:
        self.causes.append(cause)
        self.done.append(("failed", cause.node_rank, cause.rank))

    def stalled(self, report: RankReport, generation: int) -> None:
        self.done.append(("stalled", generation, report.rank))

    def slow(self, found: Straggler, generation: int) -> None:
        self.done.append(("slow", generation, found.rank))

    def is_over(self) -> bool:
        return self.over


class Attempt:
    """A lead of three nodes, n0 to n2, with what it has ordered since the last look."""

    def __init__(self, **changes: Any) -> None:
        self.notes = Notes()
        rules = replace(RULES, **changes)
        hosts = [f"n{agent}" for agent in range(rules.all_nodes)]
        self.lead = Lead(rules, hosts, self.notes, 0.0, meet=lambda generation: ("", 0))

    def ordered(self) -> list[tuple[int, str]]:
        orders = [(to, message["kind"]) for to, message in self.lead.orders]
        self.lead.orders.clear()
        return orders

    def begin(self) -> Attempt:
        self.lead.look(0.1)
        self.ordered()
        return self

    def hear(self, sender: int, kind: str, now: float = 1.0, **facts: Any) -> list[tuple[int, str]]:
        generation = facts.pop("generation", 0)
        self.lead.take(sender, {"kind": kind, "generation": generation, "step": 7, **facts}, now)
        return self.ordered()

    def fall(self, sender: int, now: float = 1.0, **of: Any) -> list[tuple[int, str]]:
        return self.hear(sender, "fell", now, failures=[as_facts(fallen(sender, **of))])

    def stopped(self, sender: int, *failures: Failure, **facts: Any) -> list[tuple[int, str]]:
        return self.hear(sender, "stopped", failures=[as_facts(one) for one in failures], **facts)


def fallen(node: int, *, rank: int | None = 0, code: int = -9, lines: tuple[str, ...] = ()) -> Failure:
    return capture.here(code, node_rank=node, rank=rank, lines=lines)


LOST_PEER = ("RuntimeError: [../gloo/pair.cc:598] Connection closed by peer [127.0.0.1]:1",)


def to_all(kind: str, *agents: int) -> list[tuple[int, str]]:
    return [(agent, kind) for agent in sorted(agents or (0, 1, 2), reverse=True)]
