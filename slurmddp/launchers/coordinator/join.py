"""Wait on node 0 for the agents of all nodes before any rank starts, and name the missing nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmddp.launchers.coordinator.recorder import Recorder
from slurmddp.launchers.coordinator.restart_policy import Rules, choose_agents
from slurmddp.runs.failures.failure import Failure, lost_node
from slurmddp.short_text import first_items

FIRST_NOTICE_S = 3.0
"""Seconds until the missing nodes are named for the first time."""
NOTICE_S = 10.0
"""Seconds between later notices."""
_SPARES_WAIT_S = 10.0
"""Seconds that the ranks wait for spares after enough agents have joined."""


def names_of(agents: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the names of agents in a message, such as `node 3 (c07), node 4 (c08)`; at most 8 in full."""
    return first_items([f"node {agent} ({hosts[agent]})" for agent in agents], 8)


class JoinWait:
    """Decides on node 0 how long to wait for the agents of all nodes, and reports the missing nodes.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, hosts: Sequence[str], rules: Rules, recorder: Recorder, now: float) -> None:
        self._hosts = hosts
        self._rules = rules
        self._recorder = recorder
        self._awaited = ""
        """The missing nodes, as they were last recorded."""
        self._begun = now
        self.next_notice = now + FIRST_NOTICE_S

    def poll(
        self, now: float, present: set[int], gone: Mapping[int, Failure]
    ) -> tuple[tuple[int, ...], Failure | None] | None:
        """Decide whether the wait for agents is over, and which agents then run ranks.

        Args:
            now: the time.
            present: the agents that have joined, without the agents in `gone`.
            gone: the agents that were lost or can run no ranks, with the reasons; they are not awaited.

        Returns:
            None to continue the wait. Otherwise two values: the agents that run ranks, in the order of the
            ranks (empty if too few have joined), and why a node is missing (None if no node is missing).
        """
        rules = self._rules
        places = range(rules.nodes)
        coming = set(range(rules.all_nodes)) - present - gone.keys()
        waited_s = now - self._begun
        agents = choose_agents(places, present, rules)

        # If enough nodes have joined, the ranks wait only `_SPARES_WAIT_S` for further nodes, such as a
        # spare.
        enough = len(agents) == rules.nodes and waited_s >= _SPARES_WAIT_S
        can_begin = bool(choose_agents(places, present | coming, rules))
        if not coming or enough or not can_begin:
            missed = gone
        elif waited_s >= rules.join_timeout_s:
            reason = f"it did not join within {rules.join_timeout_s:g} s (policy.join_timeout_s)"
            missed = gone or {agent: lost_node(agent, self._hosts, reason) for agent in coming}
        else:
            self._notify(now, sorted(coming), len(present))
            return None

        self._note("")
        absent = sorted(coming | gone.keys())
        if agents and absent:
            self._recorder.log(f"the ranks begin without {names_of(absent, self._hosts)}")
        return agents, missed[min(missed)] if missed else None

    def _notify(self, now: float, coming: Sequence[int], joined: int) -> None:
        """Write the missing nodes to the log and the record, if the next notice is due."""
        if now < self.next_notice:
            return

        self.next_notice = now + NOTICE_S
        awaited = (
            f"{names_of(coming, self._hosts)}; {joined} of "
            f"{self._rules.all_nodes} nodes have joined, and all start their ranks together"
        )
        self._recorder.log(f"waiting for {awaited}")
        self._note(awaited)

    def _note(self, awaited: str) -> None:
        """Record the missing nodes if they have changed."""
        if awaited != self._awaited:
            self._awaited = awaited
            self._recorder.awaits(awaited)
