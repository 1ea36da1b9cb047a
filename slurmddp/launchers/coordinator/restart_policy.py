"""Decide which agents run ranks, and whether the ranks restart after a failure; pure functions.

A worker group is the set of ranks that run together. When a rank dies, the agents kill all ranks of its
worker group and start the next group in the same allocation: without a queue and without imports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import EXIT_UNHEALTHY_NODE
from slurmddp.runs.failures.failure import DELIBERATE_CODES
from slurmddp.settings.schema import PolicySettings
from slurmddp.settings.spec import GlobalBatch


@dataclass(frozen=True)
class Assignment:
    """The agents that run the ranks of a worker group, in the order of the ranks."""

    restart_count: int
    """The number of restarts in place before this worker group."""
    agents: tuple[int, ...]

    def node_rank(self, agent: int) -> int | None:
        """Return the node rank of an agent; None if the agent is a spare, which runs no ranks."""
        return self.agents.index(agent) if agent in self.agents else None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a run that decide which nodes run ranks and whether failed ranks restart."""

    nodes: int
    spare_nodes: int
    ranks_per_node: int
    elastic: bool
    max_restarts: int
    join_timeout_s: float
    samples: int | None
    """Samples of one optimizer step over all ranks, if the configuration fixes their number."""
    is_script: bool
    """Whether the ranks run a person's script, which may not read the run's stop file."""
    is_resumable: bool
    """Whether the script resumes by itself, so that a restart needs no completed step on a heartbeat page."""

    @property
    def tolerates_node_loss(self) -> bool:
        """Return whether the ranks of the other nodes continue when a node is lost."""
        return self.elastic or self.spare_nodes > 0

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spare_nodes

    def usable(self, nodes: int) -> int:
        """Return how many of `nodes` agents can run ranks together; 0 if they are too few."""
        if nodes >= self.nodes:
            return self.nodes
        if not self.elastic:
            return 0
        if not self.samples:
            return nodes
        # The samples of an optimizer step must divide evenly by the number of ranks.
        return GlobalBatch(self.samples).most_nodes(nodes, self.ranks_per_node)


def rules_of(config: Mapping[str, Any], nodes_of_job: int) -> Rules:
    """Return the rules of a run from its configuration.

    Args:
        config: the configuration of the run.
        nodes_of_job: the number of nodes if the configuration has no key `nodes`.
    """
    policy, train, program = (config.get(name) or {} for name in ("policy", "train", "program"))
    return Rules(
        nodes=int(config.get("nodes") or nodes_of_job),
        spare_nodes=int(config.get("spare_nodes") or 0),
        ranks_per_node=int(config.get("ranks_per_node") or 1),
        elastic=bool(config.get("elastic")),
        max_restarts=int(policy.get("max_restarts_in_place", PolicySettings.max_restarts_in_place)),
        join_timeout_s=float(policy.get("join_timeout_s", PolicySettings.join_timeout_s)),
        samples=train.get("global_batch"),
        is_script=bool(program.get("script")),
        is_resumable=bool(program.get("script") and program.get("resumable")),
    )


def choose_agents(before: Sequence[int], present: Collection[int], rules: Rules) -> tuple[int, ...]:
    """Return the agents that run ranks next, in the order of the ranks; empty if too few are present.

    An agent that ran ranks keeps its node rank. A spare takes the node rank of an agent that was lost. If no
    spare is left, the later agents get lower node ranks. Without the first agent of `before`, no agent runs
    ranks.

    Args:
        before: the agents that ran ranks before, in order.
        present: all agents that can run ranks now.
        rules: the rules of the run.
    """
    if before[0] not in present:
        return ()

    spares = sorted(set(present) - set(before))
    agents = []
    for agent in before:
        if agent in present:
            agents.append(agent)
        elif spares:
            agents.append(spares.pop(0))

    agents += spares
    return tuple(agents[: rules.usable(len(agents))])


@dataclass(frozen=True)
class Decision:
    """The decision whether the ranks restart in place, and its reason."""

    restart: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The state of a worker group in which a rank has died or a node was lost: the input of `decide`."""

    codes: Iterable[int | None] = ()
    """Exit codes of the ranks that died; None for a signal."""
    stopping: bool = False
    """Whether the run was asked to stop, by a signal or a person."""
    done: bool = False
    """Whether other ranks of the group have ended with 0 or 75."""
    lost: bool = False
    """Whether a node was lost."""
    unhealthy: bool = False
    """Whether a node of the group did not pass the preflight."""
    agents: tuple[int, ...] = (0,)
    """The agents that can run ranks now; empty if they are too few."""
    restarts: int = 0
    """The number of restarts in place in this attempt."""
    step: int = -1
    """The last step that this group has completed; -1 before the first step."""
    furthest: int = -1
    """The last step that any earlier group has completed."""


def decide(facts: Facts, rules: Rules) -> Decision:
    """Decide whether the ranks restart in place.

    The ranks don't restart if a rank ended deliberately, or if the failure would probably recur: the group
    has completed no step beyond the earlier groups. The loss of a node is no fault of the program, so after
    it a restart needs enough other nodes, but no new step.
    """
    refusals = set(DELIBERATE_CODES)
    # After a failed preflight a restart is possible, because another node can replace the unhealthy node.
    if facts.unhealthy:
        refusals.remove(EXIT_UNHEALTHY_NODE)
    if not refusals.isdisjoint(facts.codes):
        return Decision(False, "a rank ended with an exit code that rules out a restart")
    if facts.stopping:
        return Decision(False, "the run was asked to stop")
    if facts.done:
        return Decision(False, "other ranks have ended already, with 0 or 75")
    if not facts.agents:
        return Decision(False, "no other node can take the place of the lost node")
    if facts.restarts >= rules.max_restarts:
        return Decision(False, f"policy.max_restarts_in_place={rules.max_restarts}")
    if facts.lost or facts.unhealthy:
        return Decision(True, "a node is lost")
    if rules.is_resumable:
        return Decision(True, "the program resumes by itself")

    # A group that completed no new step would probably fail at the same step again.
    if facts.step <= facts.furthest:
        beyond = f" beyond step {facts.furthest}, which earlier ranks had completed"
        return Decision(False, "no step was completed" + (beyond if facts.furthest >= 0 else ""))
    return Decision(True, f"the ranks had completed step {facts.step}")
