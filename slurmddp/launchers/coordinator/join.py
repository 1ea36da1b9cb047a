"""The agents' wait for each other before any rank begins: it is told of, and has an end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence

from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.coordinator.messages import all_as_facts, lost_node, names_of
from slurmddp.launchers.coordinator.records import Records
from slurmddp.launchers.coordinator.restart_policy import Rules, choose_agents
from slurmddp.launchers.link.events import Events, Happened, Line
from slurmddp.launchers.link.link import Alone
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure

_FIRST_NOTICE_S = 3.0
"""After this many seconds those that have not arrived are named, and then again and again."""
_NOTICE_S = 10.0
_LOOK_S = 1.0
_SPARES_WAIT_S = 10.0
"""How long those that are enough to begin wait for the spares."""


class Gathering:
    """Node 0's wait for all agents; times are of one monotonic clock."""

    def __init__(self, hosts: Sequence[str], rules: Rules, say: Callable[[str], None], now: float) -> None:
        self._hosts, self._rules, self._say = hosts, rules, say
        self._begun, self.next_notice = now, now + _FIRST_NOTICE_S

    def look(
        self, now: float, present: set[int], gone: Mapping[int, Failure]
    ) -> tuple[tuple[int, ...], Failure | None] | None:
        """Return which agents run ranks, in order, and what another is missed for; None while some may come.

        `gone` are those that were lost again, and why: they are not waited for. Without them, or without some
        that do not come in time, there may be nobody to run ranks.
        """
        rules, places = self._rules, range(self._rules.nodes)
        coming = set(range(rules.all_nodes)) - present - gone.keys()
        waited, agents = now - self._begun, choose_agents(places, present, rules)
        enough = len(agents) == rules.nodes and waited >= _SPARES_WAIT_S
        if not coming or enough or not choose_agents(places, present | coming, rules):
            missed = gone
        elif waited >= rules.join_timeout_s:
            why = f"it did not arrive within {rules.join_timeout_s:g} s (policy.join_timeout_s)"
            missed = gone or {agent: lost_node(agent, self._hosts, why) for agent in coming}
        else:
            self._tell(now, sorted(coming), len(present))
            return None
        if agents and (absent := sorted(coming | gone.keys())):
            self._say(f"the ranks begin without {names_of(absent, self._hosts)}")
        return agents, missed[min(missed)] if missed else None

    def _tell(self, now: float, coming: Sequence[int], here: int) -> None:
        if now >= self.next_notice:
            self.next_notice = now + _NOTICE_S
            self._say(
                f"waiting for {names_of(coming, self._hosts)}; {here} of "
                f"{self._rules.all_nodes} nodes are here, and all start their ranks together"
            )


class Arrival:
    """The wait of one agent that has no line to node 0 yet; times are of one monotonic clock."""

    def __init__(self, hosts: Sequence[str], rules: Rules, records: Records, now: float) -> None:
        self._hosts, self._rules, self._records = hosts, rules, records
        self._begun, self._notice = now, now + _FIRST_NOTICE_S

    def look(self, now: float) -> int | None:
        """Return the code with which to leave, if the wait is over in vain."""
        if (left := self._records.code_of_first_node()) is not None:
            self._records.say("the attempt was over before this node had arrived")
            return left
        if now - self._begun > self._rules.join_timeout_s:
            why = f"it was not there within {self._rules.join_timeout_s:g} s (policy.join_timeout_s)"
            return end_without_lead(lost_node(0, self._hosts, why), self._rules, self._records)
        if now >= self._notice:
            self._notice = now + _NOTICE_S
            self._records.say(f"waiting for {names_of([0], self._hosts)}, which lets all ranks begin")
        return None


def report_unable(line: Line, why: Failure, rules: Rules, records: Records) -> bool:
    """Tell node 0 that this node can run no ranks; return False if that has to end the attempt.

    Where the others may go on without a node, node 0 decides what follows. Node 0 may not listen yet, or may
    have ended: what an attempt has ended with stands. A signal to stop ends the wait for node 0.
    """
    if not rules.outlives_nodes or line.node.node_rank == 0:
        return False
    line.link.send(0, {"kind": "fell", "generation": -1, "failures": all_as_facts([why])})
    until = time.monotonic() + rules.join_timeout_s
    while line.link.missing() and not records.has_ended() and time.monotonic() < until:
        if _is_stop(line.events.wait(time.monotonic() + _LOOK_S)):
            break
    return True


def report_unable_early(
    node_rank: int, why: Failure, rules: Rules | None, records: Records, inbox: SignalInbox
) -> bool:
    """Do the same through the run folder, before there is a link; `rules` are None where they are unknown.

    An agent without the rules waits until node 0, which has them, has read the file.
    """
    if node_rank == 0 or (rules is not None and not rules.outlives_nodes):
        return False
    if not records.leave_unable(node_rank, why):
        return False
    until = time.monotonic() + (Rules.join_timeout_s if rules is None else 0.0)
    events = Events(inbox, Alone(_LOOK_S))
    while not records.was_heard(node_rank) and not records.has_ended() and time.monotonic() < until:
        if _is_stop(events.wait(time.monotonic() + _LOOK_S)):
            break
    return True


def _is_stop(happened: Happened) -> bool:
    return any(sent != signal.SIGCHLD for sent in happened.signals)


def end_without_lead(cause: Failure, rules: Rules, records: Records) -> int:
    """Record why this agent ends without node 0, and return its exit code."""
    if not rules.outlives_nodes:  # Else node 0, if it lost only this one, goes on without it.
        records.failed(cause)
    return capture.node_code(cause)
