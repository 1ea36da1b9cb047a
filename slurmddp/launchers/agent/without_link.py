"""Let an agent without a link to node 0 wait for the link, report that it can run no ranks, or end."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.coordinator.join import FIRST_NOTICE_S, NOTICE_S, names_of
from slurmddp.launchers.coordinator.messages import AgentUnable, encode
from slurmddp.launchers.coordinator.restart_policy import Rules
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder
from slurmddp.launchers.link.link import Link
from slurmddp.runs.failures.failure import Failure, lost_node, node_code
from slurmddp.settings.schema import PolicySettings

_POLL_S = 1.0


class LinkWait:
    """Decides how long an agent waits for its link to node 0, and logs the wait.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, hosts: Sequence[str], rules: Rules, recorder: RunFolderRecorder, now: float) -> None:
        self._hosts = hosts
        self._rules = rules
        self._recorder = recorder
        self._begun = now
        self._next_notice = now + FIRST_NOTICE_S

    def poll(self, now: float) -> int | None:
        """Return the agent's exit code if the attempt or the wait is over; None to continue the wait."""
        code = self._recorder.code_of_first_node()
        if code is not None:
            self._recorder.log("the attempt ended before this node had joined")
            return code

        if now - self._begun > self._rules.join_timeout_s:
            reason = (
                f"it could not be reached within {self._rules.join_timeout_s:g} s (policy.join_timeout_s)"
            )
            return end_without_coordinator(lost_node(0, self._hosts, reason), self._rules, self._recorder)

        if now >= self._next_notice:
            self._next_notice = now + NOTICE_S
            self._recorder.log(f"waiting for {names_of([0], self._hosts)}, which starts all ranks")
        return None


def report_unable(
    link: Link | None,
    node_rank: int,
    failure: Failure,
    rules: Rules | None,
    recorder: RunFolderRecorder,
    inbox: SignalInbox,
) -> bool:
    """Report to node 0 that this node can run no ranks, and wait until node 0 has received the report.

    The wait also ends when the attempt ends, at a signal to stop, and after `join_timeout_s`.

    Args:
        link: the link to node 0. Before there is a link, the report goes through the run folder.
        node_rank: this node's rank.
        failure: why this node can run no ranks.
        rules: the run's rules; None if the agent could not read them.
        recorder: the recorder of the attempt.
        inbox: the signals to this agent.

    Returns:
        True if the report was made. False if the report could not be written, or if the failure ends the
        attempt anyway: this is node 0, or the job does not tolerate the loss of a node.
    """
    if node_rank == 0 or (rules is not None and not rules.tolerates_node_loss):
        return False

    if link is not None:
        link.send(0, encode(AgentUnable(failure=failure)))
    elif not recorder.leave_unable(node_rank, failure):
        return False

    # An agent that knows the rules but has no link only leaves its report in the run folder, without a wait.
    timeout_s = PolicySettings.join_timeout_s
    if rules is not None:
        timeout_s = rules.join_timeout_s if link else 0.0

    until = time.monotonic() + timeout_s
    while not recorder.has_ended() and time.monotonic() < until:
        if not link.missing() if link else recorder.is_confirmed(node_rank):
            break

        wait_s = min(_POLL_S, link.next_deadline() - time.monotonic()) if link else _POLL_S
        signals = inbox.wait(wait_s, link.descriptors() if link else ())
        if any(number != signal.SIGCHLD for number in signals):
            break
        if link:
            link.handle()
    return True


def end_without_coordinator(cause: Failure, rules: Rules, recorder: RunFolderRecorder) -> int:
    """Record why this agent ends without the coordinator, and return its exit code.

    If the job tolerates the loss of a node, nothing is recorded: node 0 may have lost only this node.
    """
    if not rules.tolerates_node_loss:
        recorder.failed(cause)
    return node_code(cause)
