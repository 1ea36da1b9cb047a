"""Node 0's wait for the agents of all nodes before any rank starts; it names the missing nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmddp.launchers.coordinator.recorder import Record
from slurmddp.launchers.coordinator.restart_policy import Rules, choose_agents
from slurmddp.runs.failures.failure import Failure, lost_node
from slurmddp.short_text import first_items

FIRST_NOTICE_S = 3.0
"""Seconds until the missing nodes are named for the first time."""
NOTICE_S = 10.0
"""Seconds between later notices."""
_SPARES_WAIT_S = 10.0
"""Seconds that enough agents wait for spares."""


def names_of(agents: Sequence[int], hosts: Sequence[str]) -> str:
    """Return `node 3 (c07), node 4 (c08)`."""
    return first_items([f"node {agent} ({hosts[agent]})" for agent in agents], 8)


class JoinWait:
    """Node 0's wait for all agents; times are of one monotonic clock."""

    def __init__(self, hosts: Sequence[str], rules: Rules, record: Record, now: float) -> None:
        self._hosts, self._rules, self._record = hosts, rules, record
        self._awaited = ""
        self._begun, self.next_notice = now, now + FIRST_NOTICE_S

    def poll(
        self, now: float, present: set[int], gone: Mapping[int, Failure]
    ) -> tuple[tuple[int, ...], Failure | None] | None:
        """Decide whether the wait is over.

        Args:
            now: the time.
            present: the agents that have joined and are not gone.
            gone: the agents that were lost again, with the reasons; the wait ignores them.

        Returns:
            None to wait on. Else the agents that run ranks, in the order of the ranks, and why a node is
            missing; no agents if too few have joined.
        """
        rules, places = self._rules, range(self._rules.nodes)
        coming = set(range(rules.all_nodes)) - present - gone.keys()
        waited, agents = now - self._begun, choose_agents(places, present, rules)
        enough = len(agents) == rules.nodes and waited >= _SPARES_WAIT_S
        if not coming or enough or not choose_agents(places, present | coming, rules):
            missed = gone
        elif waited >= rules.join_timeout_s:
            why = f"it did not join within {rules.join_timeout_s:g} s (policy.join_timeout_s)"
            missed = gone or {agent: lost_node(agent, self._hosts, why) for agent in coming}
        else:
            self._notify(now, sorted(coming), len(present))
            return None

        self._note("")
        if agents and (absent := sorted(coming | gone.keys())):
            self._record.say(f"the ranks begin without {names_of(absent, self._hosts)}")
        return agents, missed[min(missed)] if missed else None

    def _notify(self, now: float, coming: Sequence[int], here: int) -> None:
        if now >= self.next_notice:
            self.next_notice = now + NOTICE_S
            awaited = (
                f"{names_of(coming, self._hosts)}; {here} of "
                f"{self._rules.all_nodes} nodes are here, and all start their ranks together"
            )
            self._record.say(f"waiting for {awaited}")
            self._note(awaited)

    def _note(self, awaited: str) -> None:
        if awaited != self._awaited:
            self._awaited = awaited
            self._record.awaits(awaited)
