"""Decide which agents run ranks, and whether the ranks restart after a failure; pure functions.

A worker group is the set of ranks that run together. When a rank dies, the agents kill all ranks of its
worker group and start the next group in the same allocation: without a queue and without imports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import EXIT_UNHEALTHY_NODE
from slurmddp.runs.failures.capture import DELIBERATE_CODES
from slurmddp.spec import GlobalBatch


@dataclass(frozen=True)
class Assignment:
    """Which agents run the ranks of a worker group, in the order of the ranks."""

    restart_count: int
    """Number of restarts in place before this worker group."""
    agents: tuple[int, ...]

    def node_rank(self, agent: int) -> int | None:
        """Return the node rank of an agent; None if it runs no ranks and waits as a spare."""
        return self.agents.index(agent) if agent in self.agents else None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the run's configuration says about the nodes of a job and about ranks that die."""

    nodes: int = 1
    spare_nodes: int = 0
    ranks_per_node: int = 1
    elastic: bool = False
    max_restarts: int = 10
    join_timeout_s: float = 300.0
    samples: int | None = None
    """The samples of one optimizer step over all ranks, where the configuration fixes them."""
    is_script: bool = False
    """Whether the ranks run a person's script, which may know nothing of the run's stop file."""

    @property
    def tolerates_node_loss(self) -> bool:
        return self.elastic or self.spare_nodes > 0

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spare_nodes

    def usable(self, nodes: int) -> int:
        """Return how many of `nodes` agents can run ranks together; 0: none, without those that are gone."""
        if nodes >= self.nodes:
            return self.nodes
        if not self.elastic:
            return 0
        return GlobalBatch(self.samples).most_nodes(nodes, self.ranks_per_node) if self.samples else nodes


def rules_of(config: Mapping[str, Any], nodes_here: int) -> Rules:
    """Return the rules of a run's configuration; one without sizes takes the step as it is."""
    policy, train = config.get("policy") or {}, config.get("train") or {}
    return Rules(
        nodes=int(config.get("nodes") or nodes_here),
        spare_nodes=int(config.get("spare_nodes") or 0),
        ranks_per_node=int(config.get("ranks_per_node") or 1),
        elastic=bool(config.get("elastic")),
        max_restarts=int(policy.get("max_restarts_in_place", Rules.max_restarts)),
        join_timeout_s=float(policy.get("join_timeout_s", Rules.join_timeout_s)),
        samples=train.get("global_batch"),
        is_script=bool((config.get("program") or {}).get("script")),
    )


def choose_agents(before: Sequence[int], present: Collection[int], rules: Rules) -> tuple[int, ...]:
    """Return who runs ranks next, in order; empty when those that are present can't.

    Who ran ranks `before` keeps its place, a spare takes that of an agent that is gone, and without spares
    the others move up. The first agent is the one that decides: without it there is nobody.
    """
    if before[0] not in present:
        return ()
    spares = sorted(set(present) - set(before))
    places = [agent if agent in present else spares.pop(0) if spares else None for agent in before]
    agents = [agent for agent in places if agent is not None] + spares
    return tuple(agents[: rules.usable(len(agents))])


@dataclass
class Reached:
    """How far the ranks of one generation have come, as their agents tell."""

    step: int = -1
    """The last step that one of them has completed; -1 for none."""
    at: float = 0.0
    """When one of them last completed a step, by the clock of whoever is told."""

    def take(self, step: int, at: float) -> None:
        self.step, self.at = max(self.step, step), max(self.at, at)


@dataclass(frozen=True)
class Decision:
    """What follows when a rank has died, and why."""

    restart: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known when a rank of a generation has died, or a node is lost."""

    codes: Iterable[int | None] = ()
    """The exit codes of those that died; None for a signal."""
    stopping: bool = False
    """Whether the run was asked to stop, by a signal or a person."""
    done: bool = False
    """Whether other ranks of the generation have ended as they should."""
    lost: bool = False
    """Whether a node was lost."""
    unfit: bool = False
    """Whether the preflight has found a node unfit, and it is known which."""
    agents: tuple[int, ...] = (0,)
    """Who can run ranks now; empty: too few."""
    restarts: int = 0
    """How often ranks have begun again in this attempt."""
    step: int = -1
    """The last step that this generation has completed; -1 for none."""
    furthest: int = -1
    """The last step that an earlier one has completed."""


def decide(facts: Facts, rules: Rules) -> Decision:
    """Return whether the ranks begin again in place; what is no accident, or would only come again, ends it.

    A lost or unfit node says nothing about the program, so it needs no step in between, only somebody to go
    on.
    """
    accepted = {None, EXIT_UNHEALTHY_NODE} if facts.unfit else {None}
    if DELIBERATE_CODES.intersection(code for code in facts.codes if code not in accepted):
        return Decision(False, "a rank refused to go on")
    if facts.stopping:
        return Decision(False, "the run was asked to stop")
    if facts.done:
        return Decision(False, "other ranks have come to their end")
    if not facts.agents:
        return Decision(False, "no other node can take the place of the one that is lost")
    if facts.restarts >= rules.max_restarts:
        return Decision(False, f"policy.max_restarts_in_place={rules.max_restarts}")
    if facts.lost or facts.unfit:
        return Decision(True, "a node is lost")
    if facts.step <= facts.furthest:
        return Decision(False, "no step was completed" + _beyond(facts.furthest))
    return Decision(True, f"the ranks had come to step {facts.step}")


def _beyond(step: int) -> str:
    return f" beyond step {step}, to which the ranks before had come" if step >= 0 else ""
