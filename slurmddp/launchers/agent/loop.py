"""The agent's event loop: handle signals, messages and exits of ranks; carry out the coordinator's orders.

Each turn of the loop waits once: for a signal, a message of another agent, the end of a rank or a deadline.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from slurmddp.batch import outcome
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.time_limits import Limits, leave_at
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED
from slurmddp.launchers.agent.forked_workers import ForkedWorkers
from slurmddp.launchers.agent.node_watch import Watch
from slurmddp.launchers.agent.unlinked import Arrival, end_without_lead
from slurmddp.launchers.coordinator.coordinator import Coordinator
from slurmddp.launchers.coordinator.messages import (
    AgentUnable,
    EndHungRanks,
    Fail,
    HangSuspected,
    HungAtExit,
    KillWorkers,
    Leave,
    Lost,
    Message,
    OthersDone,
    PaceReported,
    Report,
    ReportStacks,
    RequestStop,
    StartWorkers,
    StopRequested,
    WorkersDone,
    WorkersFailed,
    WorkersKilled,
    decode,
    encode,
)
from slurmddp.launchers.coordinator.records import Records
from slurmddp.launchers.coordinator.restart_policy import Assignment, Rules
from slurmddp.launchers.link.events import Line
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure
from slurmddp.runs.failures.model import lost_agent

_KILL_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for the ranks that outlive a failed one: time to end a write, not to save."""
_WRITING_S = 600.0
"""How long an agent whose ranks have ended waits for a checkpoint to be written."""
DEAF_SHARE, WRITING_SHARE = 0.8, 0.6
"""Parts of `RESERVE_S` that are left when agents end deaf ranks, and when they give up a checkpoint.

The batch script needs the rest: on a busy host it takes three seconds to write `ended` and to requeue.
"""
_FOLLOW_S = 0.9
"""Seconds for ranks to follow a rank that has stopped unasked.

Ranks that stop together need less. A rank that is signalled before the training tells no other rank.
"""
_TICK_S = 1.0
_STOPPING_TICK_S = 0.1


class AgentLoop:
    """One agent's part of an attempt, from the moment at which it could start ranks to its exit code."""

    def __init__(
        self,
        line: Line,
        rules: Rules,
        workers: ForkedWorkers,
        checkpoints: CheckpointService,
        watch: Watch,
        records: Records,
        limits: Limits,
    ) -> None:
        self._node, self._link, self._events = line.node, line.link, line.events
        self._rules, self._workers, self._checkpoints, self._watch = rules, workers, checkpoints, watch
        self._records, self._limits = records, limits
        self._begun = time.monotonic()
        self._arrival = Arrival(line.node.hosts, rules, records, self._begun)
        self._coordinator: Coordinator | None = None
        if line.node.node_rank == 0:
            self._coordinator = Coordinator(
                rules, line.node.hosts, records, self._begun, workers.meeting_point
            )
        self._assignment: Assignment | None = None
        """The present worker group; None before the first one."""
        self._at_work = False
        """Whether ranks of the present worker group run here."""
        self._fallen: list[Failure] = []
        self._answer: WorkersKilled | None = None
        """The report to send once no killed rank is left."""
        self._codes: list[int] = []
        """Exit codes of the ranks here that ended well."""
        self._others_done = False
        """Whether ranks of other nodes have ended well."""
        self._code: int | None = None
        self.lost_coordinator = False
        """Whether this agent had to end because node 0's agent is gone."""
        self._stopping = False
        self._terminated: float | None = None
        self._left_at: float | None = None
        """When a rank stopped without a request to this agent."""
        self._sent: set[int] = set()
        """Signals that the present ranks have got."""

    def run(self) -> int:
        """Do what happens asks for, until the attempt is over; return this node's exit code."""
        self._turn(self._begun)
        while self._code is None:
            self._look(time.monotonic())
            if self._code is None:
                self._turn(self._next_look())
        self._finish_writing()
        return self._code

    def _finish_writing(self) -> None:
        """Stay until what ranks have left in memory is on the disk, as long as SLURM lets us.

        All agents stay: srun ends those that are left when one leaves with another code than 0.
        """
        until = time.monotonic() + _WRITING_S
        if self._code != EXIT_FINISHED and self._may_save():
            self._records.flush_newest(self._checkpoints)
        self._checkpoints.expedite()
        while (
            (self._checkpoints.is_writing() or (self._coordinator is None and not self._link.missing()))
            and time.monotonic() < until
            and not self._out_of_time(WRITING_SHARE)
        ):
            self._turn(time.monotonic() + _STOPPING_TICK_S)
        self._checkpoints.finish(0.0)

    def _may_save(self) -> bool:
        """Whether this agent may save what memory holds: node 0's does, without node 0 any that trains."""
        if self._assignment is None or self._coordinator is not None:
            return self._coordinator is not None
        return self.lost_coordinator and self._assignment.node_rank(self._node.node_rank) is not None

    def give_up(self, why: Failure) -> None:
        """Tell the others that this agent can't go on; without them, the run folder."""
        self._workers.stop(0.0)
        if self._coordinator is not None:
            self._coordinator.fail(why)
            self._send_orders(obey=False)
        elif self._link.missing():
            end_without_lead(why, self._rules, self._records)
        else:
            self._report(AgentUnable(failure=why))
        if self._coordinator is not None:
            self._records.flush_newest(self._checkpoints)
        self._checkpoints.finish(_WRITING_S)

    def _turn(self, until: float) -> None:
        happened = self._events.wait(until)
        self._take_signals(happened.signals)
        self._reap()
        for sender, values in happened.messages:
            message = decode(values)
            if message is not None:
                self._receive(sender, message)

    def _next_look(self) -> float:
        soon = self._stopping or self._left_at is not None
        due = time.monotonic() + (_STOPPING_TICK_S if soon else _TICK_S)
        due = min(due, self._watch.next_look()) if self._at_work else due
        deadline = self._coordinator.next_deadline if self._coordinator is not None else None
        return due if deadline is None else min(due, deadline)

    def _look(self, now: float) -> None:
        """Check signals, files and deadlines once."""
        if self._assignment is None:
            self._receive_unable()
            self._look_before_ranks(now)
        if self._coordinator is not None and self._code is None:
            self._coordinator.poll(now, self._link.missing())
            self._send_orders()
        self._obey_stop_file()
        self._follow_stop(now)
        for message in self._watch.look(now, left_in=self._left_in()) if self._at_work else []:
            self._report(message)
        if self._at_work and self._out_of_time():
            self._records.say(
                "SLURM is about to kill: ranks end here, the run resumes from its last checkpoint"
            )
            self._workers.stop(0.0)
            self._at_work = False
            if self._coordinator is not None:
                self._coordinator.leave(EXIT_STOPPED)
                self._send_orders()
            else:
                self._report(WorkersDone(code=EXIT_STOPPED))
                self._code = EXIT_STOPPED

    def _left_in(self) -> int | None:
        """Return the restart count of the worker group, once some of its ranks have ended well."""
        ended = self._codes or self._others_done
        return self._assignment.restart_count if self._assignment and ended else None

    def _look_before_ranks(self, now: float) -> None:
        found = self._records.failure()  # It may be that of an agent whose line did not stand yet.
        if found is not None and self._coordinator is not None:
            self._coordinator.fail(found)
        elif found is not None:
            self._code = capture.node_code(found)
        elif self._coordinator is None and self._link.missing():
            self._code = self._arrival.look(now)

    def _receive_unable(self) -> None:
        """Pass the reports of agents that are unable and have no link to the coordinator."""
        for agent, why in self._records.unable() if self._coordinator is not None else []:
            self._receive(agent, AgentUnable(failure=why))
            self._records.hear_unable(agent)

    # Messages.

    def _report(self, message: Message) -> None:
        """Send a message to the coordinator, which may be part of this agent."""
        if isinstance(message, Report):
            message = self._completed(message)
        if self._coordinator is None:
            self._link.send(0, encode(message))
        else:
            self._coordinator.receive(0, message, time.monotonic())
            self._send_orders()

    def _completed(self, report: Report) -> Report:
        """Return a report with the facts that every report has."""
        step, silent_s = self._workers.progress()
        report = replace(report, restart_count=self._restart_count, step=step, silent_s=silent_s)
        if isinstance(report, HungAtExit):
            report = replace(report, codes=tuple(self._codes))
        if isinstance(report, (WorkersFailed, WorkersKilled)):
            report = replace(report, unhealthy=self._checkpoints.take_unhealthy())
        if not isinstance(report, (HangSuspected, PaceReported)):
            report = replace(report, left=tuple(self._workers.left))
        return report

    @property
    def _restart_count(self) -> int:
        return -1 if self._assignment is None else self._assignment.restart_count

    def _receive(self, sender: int, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinator.receive(sender, message, time.monotonic())
            self._send_orders()
        elif isinstance(message, Lost):
            self._lose_coordinator(message)
        else:
            self._obey(message)

    def _send_orders(self, *, obey: bool = True) -> None:
        """Send the coordinator's orders; its own agent, which may wait for ranks to end, comes last."""
        while self._coordinator is not None and self._coordinator.orders:
            to, message = self._coordinator.orders.pop(0)
            if to != 0:
                self._link.send(to, encode(message))
            elif obey:
                self._obey(message)

    def _obey(self, order: Message) -> None:
        if self._code is not None:
            return
        match order:
            case StartWorkers():
                self._start(order)
            case KillWorkers():
                self._kill()
            case RequestStop():
                self._records.say("the run was asked to stop on another node: passed on to the ranks")
                self._signal_ranks(order.signal)
                self._stopping = True
            case ReportStacks():
                self._watch.ask(order.restart_count)
            case OthersDone():
                self._others_done = True
                self._note_stopped([order.code])
            case EndHungRanks():
                self._end_hung(order.code)
            case Leave():
                self._leave(order.code)
            case Fail():
                self._fail(order.code)

    def _lose_coordinator(self, message: Lost) -> None:
        """End as after a failure on node 0: without it nobody decides, and no rank can train."""
        here = self._node.node_rank
        lost = lost_agent(0, self._node.hosts, message.why, message.together, here=here)
        self._records.say(lost.sentence)
        self.lost_coordinator = True
        if self._code is not None:
            return  # It only stays until a checkpoint is written.
        if self._assignment is not None and not self._at_work:
            self._code = outcome.combine(self._codes) if self._codes else EXIT_STOPPED
            return
        cause = capture.likely_first([*self._fallen, lost])
        self._workers.stop(_KILL_GRACE_S)
        self._code = end_without_lead(cause, self._rules, self._records)

    # Orders.

    def _start(self, order: StartWorkers) -> None:
        self._assignment = Assignment(order.restart_count, order.agents)
        self._fallen, self._codes, self._sent = [], [], set()
        self._left_at, self._others_done = None, False
        if self._assignment.node_rank(self._node.node_rank) is None:
            self._records.say(_why_no_ranks(self._node.node_rank, order))
        elif self._stopping:
            self._codes = [EXIT_STOPPED]
            self._report(WorkersDone(code=EXIT_STOPPED))
        else:
            self._at_work = True
            self._workers.start(order)

    def _kill(self) -> None:
        self._at_work = False
        # These ranks ended before the order, so one of them may be the cause.
        failed = self._workers.failures(self._workers.poll())
        self._answer = WorkersKilled(failures=tuple(failed))
        self._watch.forget()
        self._workers.kill()
        self._answer_kill()

    def _answer_kill(self) -> None:
        """Report once no killed rank is left; raises SlurmddpError when one can't be ended."""
        if self._answer is not None and self._workers.is_gone():
            answer, self._answer = self._answer, None
            self._report(answer)

    def _leave(self, code: int) -> None:
        found = None  # Once ranks have run, their result stands.
        if self._assignment is None:
            self._records.say("stopped before the ranks were started")
            found = self._records.failure()
        if self._at_work:
            self._workers.stop(0.0)
            self._codes.append(EXIT_STOPPED)
        own = outcome.combine(self._codes) if self._codes and self._coordinator is None else code
        self._code = capture.node_code(found) if found is not None else own

    def _end_hung(self, code: int) -> None:
        """End the ranks that hang at their exit; the code of the others stands for them."""
        if self._at_work:
            self._at_work = False
            self._workers.stop(0.0)
            self._report(WorkersDone(code=outcome.combine([*self._codes, code])))

    def _fail(self, code: int) -> None:
        if self._at_work and not self._fallen:
            self._records.say("the attempt has failed elsewhere")
        self._workers.stop(_KILL_GRACE_S)
        self._code = code

    # Ranks of this node.

    def _reap(self) -> None:
        ended = self._workers.poll()
        if not self._at_work:
            self._answer_kill()
            return
        self._codes += [one.returncode for one in ended if one.good]
        self._note_stopped(self._codes)
        bad = self._workers.failures(ended)
        self._fallen += bad
        if bad:
            self._report(WorkersFailed(failures=tuple(bad)))
        elif ended and not self._workers and not self._fallen:
            self._at_work = False
            self._report(WorkersDone(code=outcome.combine(self._codes)))

    def _note_stopped(self, codes: Sequence[int]) -> None:
        if EXIT_STOPPED in codes and self._left_at is None:
            self._left_at = time.monotonic()

    def _follow_stop(self, now: float) -> None:
        """Stop the ranks that outlive a rank which stopped unasked, here or on another node."""
        if self._stopping or self._left_at is None or not self._workers:
            return
        if now - self._left_at > _FOLLOW_S:
            self._request_stop(signal.SIGUSR2, "a rank has stopped alone")

    def _obey_stop_file(self) -> None:
        """Send the ranks of a script the signal of a stop that a person has asked for by the stop file."""
        if self._at_work and self._rules.is_script and not self._stopping and self._records.is_stopped():
            self._request_stop(signal.SIGUSR2, "the stop file is there")

    def _take_signals(self, received: Sequence[signal.Signals]) -> None:
        for sent in received:
            if sent == signal.SIGCHLD:
                continue
            if sent == signal.SIGTERM:
                self._terminated = self._terminated or time.time()
            self._request_stop(signal.SIGTERM if sent == signal.SIGINT else sent, f"received {sent.name}")

    def _signal_ranks(self, sent: int) -> None:
        """Send a signal to the ranks here, once."""
        if self._at_work and not self._fallen and sent not in self._sent:
            self._sent.add(sent)
            self._workers.signal(signal.Signals(sent))

    def _request_stop(self, sent: signal.Signals, why: str) -> None:
        """Ask the ranks here to stop, and through the coordinator all others."""
        self._signal_ranks(sent)
        if self._stopping:
            return
        self._stopping = True
        if self._assignment is not None:
            self._records.say(f"{why}: passed on to the ranks, for a save and an end")
        if self._assignment is None and self._coordinator is None and self._link.missing():
            self._records.say("stopped before the ranks were started")
            self._code = EXIT_STOPPED  # Nobody to agree with, and nothing to lose.
        else:
            self._report(StopRequested(signal=sent))

    def _out_of_time(self, share: float = DEAF_SHARE) -> bool:
        """Whether even the ranks' own guards, which come first, have not made all of them leave in time."""
        at = leave_at(self._limits, self._terminated, share)
        return at is not None and time.time() >= at


def _why_no_ranks(agent: int, order: StartWorkers) -> str:
    """Say why an agent runs no ranks of a worker group."""
    if agent in order.excluded:
        return "this node was found unfit: it runs no more ranks in this attempt"
    return "this node waits, to take the place of one that is lost"
