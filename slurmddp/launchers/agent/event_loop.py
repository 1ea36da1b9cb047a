"""Run the agent's event loop: handle signals, messages and exits of ranks; obey the coordinator's orders.

Each iteration of the loop waits once: for a signal, a message of another agent, a request of a rank or a
deadline. SIGCHLD signals the end of a rank. The coordinator is part of node 0's agent. That agent hands its
reports to the coordinator without a message, and obeys the coordinator's orders without a message.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from slurmddp import errors
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.time_limits import TimeLimits
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.agent.grace_periods import KILL_GRACE_S, SAVE_S, TOGETHER_S
from slurmddp.launchers.agent.node_watch import NodeWatch
from slurmddp.launchers.agent.stop_requests import WRITING_SHARE, StopRequests
from slurmddp.launchers.agent.without_link import LinkWait, end_without_coordinator
from slurmddp.launchers.agent.worker_group import ForkedWorkers
from slurmddp.launchers.coordinator import messages as msg
from slurmddp.launchers.coordinator.coordinator import Coordinator
from slurmddp.launchers.coordinator.restart_policy import Assignment, Rules
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder
from slurmddp.launchers.link.link import Link
from slurmddp.runs.failures.failure import Failure, likely_first, lost_agent, node_code

_WRITING_S = 600.0
"""Longest time in seconds that an agent without running ranks waits for a checkpoint to be written."""
_POLL_S = 1.0
_WRITING_POLL_S = 0.1


class AgentLoop:
    """The event loop of one agent: it starts, watches and ends the ranks of one node in one attempt."""

    def __init__(
        self,
        node: RankInfo,
        inbox: SignalInbox,
        link: Link,
        rules: Rules,
        workers: ForkedWorkers,
        checkpoints: CheckpointService,
        watch: NodeWatch,
        recorder: RunFolderRecorder,
        limits: TimeLimits,
        is_over: Callable[[], bool],
    ) -> None:
        self._node = node
        self._inbox = inbox
        self._link = link
        self._rules = rules
        self._workers = workers
        self._checkpoints = checkpoints
        self._watch = watch
        self._recorder = recorder

        begun = time.monotonic()
        self._link_wait = LinkWait(node.hosts, rules, recorder, begun)
        self._coordinator: Coordinator | None = None
        """The coordinator; None on all nodes except node 0."""
        if node.node_rank == 0:
            self._coordinator = Coordinator(
                rules, node.hosts, recorder, begun, workers.meeting_point, is_over
            )
        self._stops = StopRequests(workers, rules, recorder, limits, self._request_stop)

        self._assignment: Assignment | None = None
        """The present worker group; None before the first worker group."""
        self._at_work = False
        """Whether this node runs ranks of the present worker group, and the agent has not ended them."""
        self._killed: msg.WorkersKilled | None = None
        """The report to send to the coordinator once every killed rank has ended."""
        self._others_done = False
        """Whether ranks of other nodes have ended with 0 or 75."""
        self._code: int | None = None
        """This node's exit code, once it is decided."""
        self.lost_coordinator = False
        """Whether node 0's agent, which contains the coordinator, was lost."""

    def run(self) -> int:
        """Handle events until the attempt is over; return this node's exit code."""
        self._turn(time.monotonic())
        while self._code is None:
            self._poll(time.monotonic())
            if self._code is None:
                self._turn(self._next_deadline(time.monotonic()))

        if self._code == EXIT_FINISHED:
            ranks = self._workers.ranks_apart()
            if ranks:
                self._recorder.ranks_apart(ranks, self._node.nodes)

        self._finish_writing()
        return self._code

    def give_up(self, failure: Failure) -> None:
        """End the ranks, and report `failure` to the coordinator or, without a link, in the run folder.

        Return once the checkpoints in memory are written, after `_WRITING_S` at the latest.
        """
        self._at_work = False
        self._workers.stop(0.0)

        if self._coordinator is not None:
            self._coordinator.fail(failure)
            self._send_orders()
            self._recorder.flush_newest(self._checkpoints, parts=False)
        elif self._link.missing():
            end_without_coordinator(failure, self._rules, self._recorder)
        else:
            self._send(msg.AgentUnable(failure=failure))

        self._checkpoints.finish(_WRITING_S)

    def _turn(self, until: float) -> None:
        """Wait until `until` at most for a signal, a message or a request of a rank, and handle it."""
        wait_s = min(until, self._link.next_deadline()) - time.monotonic()
        signals = self._inbox.wait(wait_s, [*self._link.descriptors(), *self._checkpoints.descriptors()])
        # A SIGCHLD that has ended the wait may come from the writer of checkpoints, which this call reaps.
        self._checkpoints.handle()
        messages = self._link.handle()

        for received in signals:
            if received != signal.SIGCHLD:
                self._stops.receive(received)
        self._reap()
        for sender, values in messages:
            message = msg.decode(values)
            if message is not None:
                self._receive(sender, message)

    def _next_deadline(self, now: float) -> float:
        deadlines = [now + _POLL_S]
        if self._at_work:
            deadlines += [self._stops.deadline, self._watch.deadline]
        if self._coordinator is not None:
            deadlines.append(self._coordinator.next_deadline)
        return min(deadlines)

    def _poll(self, now: float) -> None:
        """Act on every deadline that has passed."""
        if self._assignment is None:
            self._poll_before_ranks(now)
        elif self._coordinator is not None and now >= self._coordinator.next_deadline:
            self._coordinator.poll(now)
            self._send_orders()

        if self._at_work and now >= self._watch.deadline:
            some_left = bool(self._workers.good_codes) or self._others_done
            for report in self._watch.poll(now, self._restart_count, some_left=some_left):
                self._send(report)

        if self._at_work and now >= self._stops.deadline:
            self._stops.poll(now)
            if self._stops.kill_is_near():
                self._end_before_kill()

    def _poll_before_ranks(self, now: float) -> None:
        """Act on the deadlines of an agent before the first worker group.

        Node 0's agent hands the coordinator the reports that agents without a link have written into the run
        folder. Another agent decides its exit code if the attempt has failed, or its wait for the link is
        over.
        """
        failure = self._recorder.failure()
        if self._coordinator is not None:
            for agent, reported in self._recorder.unable():
                self._coordinator.receive(agent, msg.AgentUnable(failure=reported), now)
                self._recorder.confirm_unable(agent)
            if failure is not None:
                self._coordinator.fail(failure)
            self._coordinator.poll(now, self._link.missing())
            self._send_orders()
        elif failure is not None:
            self._code = node_code(failure)
        elif self._link.missing():
            self._code = self._link_wait.poll(now)

    @property
    def _restart_count(self) -> int:
        """Return the restart count of the present worker group; -1 before the first worker group."""
        return -1 if self._assignment is None else self._assignment.restart_count

    def _end_before_kill(self) -> None:
        """End the ranks that still run, because SLURM is about to kill the job; they count as stopped."""
        resumes = "" if self._rules.is_script else "; the run resumes from its last checkpoint"
        self._recorder.log(f"SLURM is about to kill the job: the agent ends the ranks of this node{resumes}")
        self._workers.stop(0.0)
        self._at_work = False

        if self._coordinator is not None:
            self._coordinator.leave(EXIT_STOPPED)
            self._send_orders()
        else:
            self._send(msg.WorkersDone(code=EXIT_STOPPED))
            self._code = EXIT_STOPPED

    def _finish_writing(self) -> None:
        """Wait until the checkpoints that ranks have left in memory are written to disk.

        Wait for at most `_WRITING_S`, and end the wait before SLURM kills the job. All agents wait, because
        srun ends the other agents when an agent exits with a code other than 0.
        """
        until = time.monotonic() + _WRITING_S
        if self._code != EXIT_FINISHED:
            # A node's part of a sharded checkpoint is useless without the parts of all other nodes.
            parts = not self.lost_coordinator and (
                self._coordinator is None or self._coordinator.has_all_nodes
            )
            self._recorder.flush_newest(self._checkpoints, states=self._may_save(), parts=parts)

        self._checkpoints.expedite()
        while time.monotonic() < until and not self._stops.kill_is_near(WRITING_SHARE):
            # While the link to node 0 is open, node 0's agent may still write a checkpoint.
            awaits_node_0 = self._coordinator is None and not self._link.missing()
            if not awaits_node_0 and not self._checkpoints.is_writing():
                break
            self._turn(time.monotonic() + _WRITING_POLL_S)

        self._checkpoints.finish(0.0)

    def _may_save(self) -> bool:
        """Return whether this agent may write the newest checkpoint that its memory holds whole.

        Node 0's agent may. If that agent is lost, any agent with ranks may.
        """
        if self._coordinator is not None:
            return True
        if self._assignment is None:
            return False
        return self.lost_coordinator and self._assignment.node_rank(self._node.node_rank) is not None

    # Methods for messages between the agents and the coordinator.

    def _send(self, message: msg.Message) -> None:
        """Send a message to the coordinator: over the link, or directly on node 0."""
        if isinstance(message, msg.Report):
            message = self._completed(message)

        if self._coordinator is None:
            self._link.send(0, msg.encode(message))
        else:
            self._coordinator.receive(self._node.node_rank, message, time.monotonic())
            self._send_orders()

    def _completed(self, report: msg.Report) -> msg.Report:
        """Return a copy of a report with the fields that every report has, such as the last step."""
        step, silent_s = self._workers.progress()
        report = replace(report, restart_count=self._restart_count, step=step, silent_s=silent_s)
        if isinstance(report, msg.HungAtExit):
            report = replace(report, codes=tuple(self._workers.good_codes))
        if isinstance(report, msg.FailureReport):
            report = replace(report, unhealthy=self._checkpoints.take_unhealthy())
        if not isinstance(report, (msg.HangSuspected, msg.PaceReported)):
            report = replace(report, left=tuple(self._workers.left))
        return report

    def _request_stop(self, received: signal.Signals, by_slurm: bool) -> None:
        """Ask the coordinator to stop all ranks.

        An agent that has no link yet, and so no ranks, exits with 75 instead.
        """
        if self._assignment is None and self._coordinator is None and self._link.missing():
            self._recorder.log("the run was stopped before the ranks were started")
            self._code = EXIT_STOPPED
        else:
            self._send(msg.StopRequested(signal=received, by_slurm=by_slurm))

    def _send_orders(self) -> None:
        """Send the coordinator's orders to the other agents, and obey the orders to this agent.

        Do nothing on other nodes than node 0.
        """
        while self._coordinator is not None and self._coordinator.orders:
            to, order = self._coordinator.orders.pop(0)
            if to != self._node.node_rank:
                self._link.send(to, msg.encode(order))
            elif self._code is None:
                self._obey(order)

        if self._coordinator is not None:
            self._coordinator.write_records()

    def _receive(self, sender: int, message: msg.Message) -> None:
        if isinstance(message, msg.Order):
            if sender == 0 and self._code is None:
                self._obey(message)
        elif self._coordinator is not None:
            self._coordinator.receive(sender, message, time.monotonic())
            self._send_orders()
        elif isinstance(message, msg.Lost):
            self._lose_coordinator(message)

    def _obey(self, order: msg.Order) -> None:
        match order:
            case msg.StartWorkers():
                self._start(order)
            case msg.KillWorkers():
                self._kill()
            case msg.RequestStop():
                self._stops.forward(signal.Signals(order.signal), by_slurm=order.by_slurm)
            case msg.ReportStacks():
                self._watch.request_stacks(order.restart_count)
            case msg.OthersDone():
                self._others_done = True
                if order.code == EXIT_STOPPED:
                    self._stops.note_exit(time.monotonic())
            case msg.EndHungRanks():
                self._end_hung(order.code)
            case msg.Leave():
                self._leave(order.code)
            case msg.Fail():
                self._fail(order.code)

    def _lose_coordinator(self, message: msg.Lost) -> None:
        """End this node's ranks and decide the exit code: without the coordinator the attempt has failed."""
        node_rank = self._node.node_rank
        lost = lost_agent(0, self._node.hosts, message.why, message.together, observer=node_rank)
        self._recorder.log(lost.sentence)
        self.lost_coordinator = True

        # The exit code is decided already, and the agent only waits for a checkpoint to be written.
        if self._code is not None:
            return

        # The ranks of this node ended before the loss, so their exit codes count.
        if self._assignment is not None and not self._at_work:
            codes = self._workers.good_codes
            self._code = errors.combine_exit_codes(codes) if codes else EXIT_STOPPED
            return

        cause = likely_first([*self._workers.failed, lost])
        self._workers.stop(KILL_GRACE_S)
        self._code = end_without_coordinator(cause, self._rules, self._recorder)

    # Methods that carry out orders of the coordinator.

    def _start(self, order: msg.StartWorkers) -> None:
        self._assignment = Assignment(order.restart_count, order.agents)
        self._others_done = False
        if self._assignment.node_rank(self._node.node_rank) is None:
            self._recorder.log(_why_no_ranks(self._node.node_rank, order))
        elif self._stops.is_stopping:
            self._send(msg.WorkersDone(code=EXIT_STOPPED))
        else:
            self._at_work = True
            self._workers.start(order)

    def _kill(self) -> None:
        self._at_work = False
        # A rank that ended before this order may have caused the restart, so it is reported.
        self._killed = msg.WorkersKilled(failures=tuple(self._workers.poll()))
        self._workers.kill()
        self._report_killed()

    def _report_killed(self) -> None:
        """Send `WorkersKilled` once every killed rank has ended.

        Raises:
            SlurmddpError: the kernel does not end a killed rank.
        """
        if self._killed is not None and self._workers.is_gone():
            killed = self._killed
            self._killed = None
            self._send(killed)

    def _leave(self, code: int) -> None:
        failure = None
        # If ranks have run, their exit codes decide this agent's code, not the recorded failure.
        if self._assignment is None:
            self._recorder.log("the run was stopped before the ranks were started")
            failure = self._recorder.failure()

        codes = self._workers.good_codes
        if self._at_work:
            self._workers.stop(0.0)
            codes.append(EXIT_STOPPED)

        if failure is not None:
            self._code = node_code(failure)
        elif codes and self._coordinator is None:
            self._code = errors.combine_exit_codes(codes)
        else:
            self._code = code

    def _end_hung(self, code: int) -> None:
        """End the ranks that hang at their exit.

        Args:
            code: the combined exit code of all other ranks, which is reported for the ended ranks.
        """
        if self._at_work:
            self._at_work = False
            self._workers.stop(0.0)
            self._send(msg.WorkersDone(code=errors.combine_exit_codes([*self._workers.good_codes, code])))

    def _fail(self, code: int) -> None:
        if self._at_work and not self._workers.failed:
            self._recorder.log("the attempt has failed, but no rank of this node has")
        self._workers.wait(TOGETHER_S)
        # Give ranks time to save, unless they were asked to stop before and so have had that time.
        may_save = self._workers.save_by_themselves and not self._stops.is_stopping
        self._workers.stop(SAVE_S if may_save else KILL_GRACE_S)
        self._code = code

    # Methods for the ranks of this node.

    def _reap(self) -> None:
        """Report to the coordinator which ranks of this node have ended since the last call."""
        failed = self._workers.poll()
        if not self._at_work:
            self._report_killed()
            return

        if EXIT_STOPPED in self._workers.codes:
            self._stops.note_exit(time.monotonic())
        if failed:
            self._send(msg.WorkersFailed(failures=tuple(failed)))

        # If all failures came after a request to stop, the node is done once its other ranks have saved too.
        if not self._workers and all(failure.asked_to_stop for failure in self._workers.failed):
            self._at_work = False
            self._send(msg.WorkersDone(code=errors.combine_exit_codes(self._workers.good_codes)))


def _why_no_ranks(agent: int, order: msg.StartWorkers) -> str:
    """Return the log line on why an agent runs no ranks of a worker group: excluded, or a spare."""
    if agent in order.excluded:
        return "this node did not pass the preflight: it runs no more ranks in this attempt"
    return "this node waits as a spare, to replace a lost node"
