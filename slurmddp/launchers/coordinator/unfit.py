"""The nodes that the preflight has found unfit, as node 0's agent counts them: they run no more ranks.

Their agents stay until the attempt is over: what SLURM makes of a node that leaves its step early is its
affair, and the node is paid for in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.errors import EXIT_UNFIT_NODE
from slurmddp.launchers.coordinator.messages import names_of, unfit_node
from slurmddp.launchers.coordinator.records import Record
from slurmddp.launchers.coordinator.restart_policy import Generation, Rules
from slurmddp.runs.failures.capture import Failure

VERDICT_WAIT_S = 3.0
"""How long rank 0 may take to write down which node is unfit, after others have left for it."""


class Unfit:
    """The unfit nodes of one attempt, by their agents; none where a job can't do without one of its nodes."""

    def __init__(self, hosts: Sequence[str], rules: Rules, record: Record) -> None:
        self._hosts, self._rules, self._record = hosts, rules, record
        self._why: dict[int, str] = {}

    @property
    def agents(self) -> set[int]:
        return set(self._why)

    def heed(self, generation: Generation) -> None:
        """Take in what the ranks of a generation, which have just ended, have found."""
        found = self._record.unfit(generation) if self._rules.outlives_nodes else {}
        for agent in sorted(found.keys() - self._why.keys()):
            self._why[agent] = found[agent]
            self._record.say(f"{names_of([agent], self._hosts)} is not fit: {found[agent]}")

    def among(self, generation: Generation) -> bool:
        """Whether agents of a generation run no more ranks after it."""
        return not self.agents.isdisjoint(generation.agents)

    def cause(self, generation: Generation) -> Failure | None:
        """Return what to tell of a generation without whose unfit nodes the others go on."""
        unfit = [agent for agent in generation.agents if agent in self._why]
        return unfit_node(unfit[0], self._hosts, self._why[unfit[0]]) if unfit else None

    def wait(self, cause: Failure, fallen: Sequence[Failure]) -> float:
        """Return how long to wait where ranks have left for a node that rank 0 may not have named yet."""
        refused = self._rules.outlives_nodes and cause.exit_code == EXIT_UNFIT_NODE
        return VERDICT_WAIT_S if refused and all(one.rank != 0 for one in fallen) else 0.0
