"""An agent's wait for node 0's, which lets all ranks begin: the wait is told of, and has an end."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.launchers import failure
from slurmddp.launchers.failure import Failure
from slurmddp.launchers.generation import Rules
from slurmddp.launchers.lead import FIRST_NOTICE_S, NOTICE_S
from slurmddp.launchers.records import Records
from slurmddp.launchers.words import lost_node, names_of


class Arrival:
    """The wait of one agent that has no line to node 0 yet; times are of one monotonic clock."""

    def __init__(self, hosts: Sequence[str], rules: Rules, records: Records, now: float) -> None:
        self._hosts, self._rules, self._records = hosts, rules, records
        self._begun, self._notice = now, now + FIRST_NOTICE_S

    def look(self, now: float) -> int | None:
        """Return the code with which to leave, if the wait is over in vain."""
        if (left := self._records.code_of_first_node()) is not None:
            self._records.say("the attempt was over before this node had arrived")
            return left
        if now - self._begun > self._rules.join_timeout_s:
            why = f"it was not there within {self._rules.join_timeout_s:g} s (policy.join_timeout_s)"
            return end_without_lead(lost_node(0, self._hosts, why), self._rules, self._records)
        if now >= self._notice:
            self._notice = now + NOTICE_S
            self._records.say(f"waiting for {names_of([0], self._hosts)}, which lets all ranks begin")
        return None


def end_without_lead(cause: Failure, rules: Rules, records: Records) -> int:
    """Record why this agent ends without node 0, and return its exit code."""
    if not rules.outlives_nodes:  # Else node 0, if it lost only this one, goes on without it.
        records.failed(cause)
    return failure.node_code(cause)
