"""An agent without a link to node 0: it waits for the link, reports that it can run no ranks, or ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.coordinator.join import FIRST_NOTICE_S, NOTICE_S, names_of
from slurmddp.launchers.coordinator.messages import AgentUnable, encode
from slurmddp.launchers.coordinator.records import Records
from slurmddp.launchers.coordinator.restart_policy import Rules
from slurmddp.launchers.link.events import Events, Happened, Line
from slurmddp.launchers.link.link import Alone
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure
from slurmddp.runs.failures.model import lost_node

_LOOK_S = 1.0


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


def report_unable(line: Line, why: Failure, rules: Rules, records: Records) -> bool:
    """Tell node 0 that this node can run no ranks; return False if that has to end the attempt.

    Where the others may go on without a node, node 0 decides what follows. Node 0 may not listen yet, or may
    have ended: what an attempt has ended with stands. A signal to stop ends the wait for node 0.
    """
    if not rules.tolerates_node_loss or line.node.node_rank == 0:
        return False
    line.link.send(0, encode(AgentUnable(failure=why)))
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
    if node_rank == 0 or (rules is not None and not rules.tolerates_node_loss):
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
    if not rules.tolerates_node_loss:  # Else node 0, if it lost only this one, goes on without it.
        records.failed(cause)
    return capture.node_code(cause)
