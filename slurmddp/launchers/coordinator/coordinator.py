"""Start, restart and end the ranks of all nodes together: the coordinator, a part of node 0's agent.

The coordinator performs no I/O except through its `Recorder`. The agent passes messages and the time to it,
and sends its orders (`messages.py` describes both).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from slurmddp import errors
from slurmddp.errors import EXIT_CONFIG, EXIT_STOPPED
from slurmddp.launchers.coordinator import messages as msg
from slurmddp.launchers.coordinator.join import JoinWait, names_of
from slurmddp.launchers.coordinator.recorder import Recorder
from slurmddp.launchers.coordinator.restart_policy import (
    Assignment,
    Decision,
    Facts,
    Rules,
    choose_agents,
    decide,
)
from slurmddp.launchers.watchdog import stuck_rank
from slurmddp.launchers.watchdog.diagnosis import PaceComparison, StallDiagnosis, Verdict
from slurmddp.runs.failures.failure import (
    Failure,
    describe,
    is_consequence,
    likely_first,
    lost_agent,
    node_code,
    unable_node,
    unhealthy_node,
)

CAUSE_WAIT_S = 0.3
"""Seconds to wait for the report of the rank that failed first, after reports of ranks that lost a peer."""
STOP_WAIT_S = 30.0
"""Seconds for the other ranks of a script to save after a rank has failed at a stop, as under torchrun."""

MeetingPoint = Callable[[Assignment], tuple[str, int]]
"""Returns the MASTER_ADDR and MASTER_PORT of a worker group."""


class State(StrEnum):
    """The state of an attempt.

    - JOINING: the coordinator waits for agents. It becomes RUNNING when enough agents have joined, and ENDING
      when too few join, an agent that is needed fails, or the run is asked to stop.
    - RUNNING: ranks run. It becomes RESTARTING when ranks or nodes fail and the restart policy allows another
      worker group, AWAITING_CAUSE or ENDING when it does not, and ENDING when all ranks are done.
    - AWAITING_CAUSE: ranks have failed, apparently because of a failure that is not reported yet. It becomes
      RESTARTING or ENDING when that failure is reported, and ENDING after CAUSE_WAIT_S without a report.
    - AWAITING_SAVES: a script's rank has failed after the run was asked to stop, while other ranks may still
      save. It becomes ENDING when the other ranks have ended, and after STOP_WAIT_S.
    - RESTARTING: the agents kill their ranks. It becomes RUNNING when no rank runs, or ENDING if a report
      that came in the meantime rules out the restart.
    - ENDING: all agents were ordered to exit. This state is final.
    """

    JOINING = "joining"
    RUNNING = "running"
    AWAITING_CAUSE = "awaiting cause"
    AWAITING_SAVES = "awaiting saves"
    RESTARTING = "restarting"
    ENDING = "ending"


@dataclass
class Group:
    """One worker group, and the agents' reports about it."""

    assignment: Assignment
    diagnosis: StallDiagnosis | None = None
    """The diagnosis of a hang, while it waits for reports."""
    paces: PaceComparison | None = None
    """The comparison of the ranks' paces, once an agent has reported some."""
    step: int = -1
    """The last step that any rank has completed; -1 before the first step."""
    stepped_at: float = 0.0
    """When a rank last completed a step, on the coordinator's clock."""
    failures: list[Failure] = field(default_factory=list)
    left: dict[int, Failure] = field(default_factory=dict)
    """Ranks that exited with 0, by their numbers."""
    lost: set[int] = field(default_factory=set)
    """Agents that were lost together with their ranks."""
    done: dict[int, int] = field(default_factory=dict)
    """Exit codes by agent, for the agents whose ranks have all ended with 0 or 75."""
    hung: dict[int, msg.HungAtExit] = field(default_factory=dict)
    """The newest report of each agent whose last ranks hang at their exit."""
    killing: set[int] = field(default_factory=set)
    """Agents that have not answered `KillWorkers` yet."""

    @property
    def agents(self) -> set[int]:
        """Return the agents that run the ranks of this worker group."""
        return set(self.assignment.agents)

    @property
    def cause(self) -> Failure:
        """Return the failure that most likely came first and caused the other failures."""
        return likely_first([*self.failures, *self.left.values()])

    def reach(self, step: int, at: float) -> None:
        """Note that a rank's last completed step is `step`, which it completed at the time `at`."""
        self.step = max(self.step, step)
        self.stepped_at = max(self.stepped_at, at)

    def hung_at_exit(self) -> dict[int, msg.HungAtExit]:
        """Return the reports of ranks that hang at their exit, by agent, if all other ranks have ended well.

        The result is empty while another rank runs, and if no rank hangs.
        """
        hung = {
            agent: report for agent, report in self.hung.items() if agent not in self.done and report.reports
        }
        has_ended_well = bool(self.done) or any(report.codes for report in hung.values())
        if has_ended_well and self.agents <= self.done.keys() | hung.keys():
            return hung
        return {}


class Coordinator:
    """Decides when the ranks of all nodes start, restart and end, in one attempt.

    Its decisions are the `orders` to the agents. Times are seconds of one monotonic clock.
    """

    def __init__(
        self,
        rules: Rules,
        hosts: Sequence[str],
        recorder: Recorder,
        now: float,
        meet: MeetingPoint = lambda assignment: ("", 0),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to wait for the agents.

        Args:
            rules: the rules of the run.
            hosts: the host name of each agent, by the node rank of the agent.
            recorder: writes the records of the attempt.
            now: the time.
            meet: returns MASTER_ADDR and MASTER_PORT for a worker group.
            is_over: returns whether a person has ended the run, or a later attempt has begun.
        """
        self.orders: list[tuple[int, msg.Order]] = []
        """The orders to send next, each with its agent; orders to the coordinator's agent come last."""
        self.state = State.JOINING
        self._rules = rules
        self._hosts = hosts
        self._recorder = recorder
        self._meet = meet
        self._is_over = is_over
        self._later: list[Callable[[], object]] = []
        """Records to write once the orders are sent."""

        # The state of the nodes and their agents.
        self._joining = JoinWait(hosts, rules, recorder, now)
        self._present = {0}
        """Agents that have joined and are not gone."""
        self._gone: dict[int, Failure] = {}
        """Agents that are lost or unable, with the reasons."""
        self._unhealthy: dict[int, str] = {}
        """Agents whose nodes did not pass the preflight, with the reasons, if the job tolerates their loss.

        These agents run no more ranks but don't exit: SLURM may end the job when a task of its step exits
        early.
        """
        self._shrunk: Failure | None = None
        """Why a node is missing, if the other nodes continue without a replacement."""

        # The state of the worker groups.
        self._group = Group(Assignment(-1, tuple(range(rules.nodes))))
        self._furthest = -1
        """The last step that any earlier worker group has completed."""
        self._stopping = False
        """Whether the run was asked to stop."""
        self._end_by = math.inf
        """When the state AWAITING_CAUSE or AWAITING_SAVES ends, on the coordinator's clock."""

    @property
    def has_all_nodes(self) -> bool:
        """Return whether no node of the present worker group has been lost."""
        return not self._group.lost

    @property
    def next_deadline(self) -> float:
        """Return the time at which to call `poll` at the latest; `math.inf` if no deadline is set."""
        if self.state == State.JOINING:
            return self._joining.next_notice

        deadlines = [math.inf]
        if self._is_awaiting:
            deadlines.append(self._end_by)
        if self._group.diagnosis is not None:
            deadlines.append(self._group.diagnosis.deadline)
        return min(deadlines)

    @property
    def _is_awaiting(self) -> bool:
        return self.state in (State.AWAITING_CAUSE, State.AWAITING_SAVES)

    # Methods that the agent calls with messages and at deadlines.

    def receive(self, sender: int, message: msg.Message, now: float) -> None:
        """Handle a message from the agent `sender`, or from the link about this agent."""
        group = self._group
        if isinstance(message, msg.Report):
            # Ignore a report about ranks that have been replaced by a later worker group.
            if message.restart_count != group.assignment.restart_count:
                return
            group.left |= {failure.rank: failure for failure in message.left if failure.rank is not None}

        match message:
            case msg.Joined():
                self._present.add(sender)
            case msg.StopRequested():
                self._forward_stop(sender, message)
            case msg.Lost():
                self._lost(sender, message, now)
            case msg.AgentUnable():
                self._unable(sender, message.failure, now)
            case msg.WorkersFailed():
                self._note(message, now)
                self._react(now)
            case msg.WorkersKilled():
                self._note(message, now)
                self._group.killing.discard(sender)
                self._go_on_if_killed(now)
            case msg.WorkersDone():
                self._done(sender, message, now)
            case msg.HungAtExit():
                group.hung[sender] = message
                self._end_hung_at_exit(now)
            case msg.HangSuspected():
                if self.state == State.RUNNING and group.diagnosis is None:
                    group.diagnosis = StallDiagnosis(group.assignment.agents, now)
                    order = msg.ReportStacks(restart_count=group.assignment.restart_count)
                    self._order(group.assignment.agents, order)
            case msg.StacksReported():
                if group.diagnosis is not None:
                    group.diagnosis.take(sender, message.reports)
                    self._end_hang(now)
            case msg.PaceReported():
                self._compare(message, now)

    def poll(self, now: float, missing: Sequence[int] = ()) -> None:
        """Act on the deadlines that have passed.

        Args:
            now: the time.
            missing: the agents that have not joined yet; used before the ranks start.
        """
        if self.state == State.JOINING:
            self._present = set(range(self._rules.all_nodes)) - set(missing) - self._gone.keys()
            self._join(now)
        elif self._is_awaiting and now >= self._end_by:
            self.fail(self._group.cause)
        self._end_hang(now)

    def leave(self, code: int) -> None:
        """Order all agents to exit; agents without ranks exit with `code`.

        If a script's rank has failed after the run was asked to stop, the attempt ends as failed instead.
        """
        if self.state == State.AWAITING_SAVES:
            self.fail(self._group.cause)
            return

        self.state = State.ENDING
        self._order(self._present, msg.Leave(code=code))

    def fail(self, cause: Failure) -> None:
        """End the attempt as failed: record the cause and order all agents to end their ranks and exit."""
        # Write the record of an earlier restart before the record of this failure.
        self.write_records()
        if self.state == State.ENDING:
            return

        if cause.exit_code == EXIT_CONFIG and self._shrunk is not None and self._group.step < 0:
            self._recorder.log("the configuration does not allow the ranks to continue on fewer nodes")
            # Recorded as a wrong configuration, this failure would end the run. Recorded as the loss of a
            # node, it leads to a next attempt, which gets all nodes again.
            cause = self._shrunk

        decision = self._decide()
        has_begun = self._group.assignment.restart_count >= 0
        reason = f": {decision.reason}" if has_begun and not decision.restart else ""
        self._recorder.log(f"{describe(cause)} The attempt ends{reason}.")
        self._recorder.failed(cause)

        self.state = State.ENDING
        self._order(self._present, msg.Fail(code=node_code(cause)))

    # Methods for nodes that have joined, are lost or are unhealthy.

    def _join(self, now: float) -> None:
        self._stopping = self._stopping or self._is_over()
        if self._stopping:
            self.leave(EXIT_STOPPED)
            return

        outcome = self._joining.poll(now, self._present, self._gone)
        if outcome is None:
            return

        agents, missed = outcome
        if agents:
            self._shrunk = missed if len(agents) < self._rules.nodes else None
            self._start(agents)
        elif missed is not None:
            self.fail(missed)

    def _lost(self, sender: int, message: msg.Lost, now: float) -> None:
        if self.state == State.ENDING:
            return

        lost = lost_agent(sender, self._hosts, message.why, message.together, observer=0)
        self._recorder.log(lost.sentence)
        if self._remove(sender, lost):
            self._group.failures.append(lost)
            self._react(now)

    def _unable(self, sender: int, failure: Failure, now: float) -> None:
        gone = unable_node(sender, self._hosts, failure)
        is_missed = self._remove(sender, gone)
        if not is_missed and (self.state != State.JOINING or self._rules.tolerates_node_loss):
            self._recorder.warn(describe(failure))
            return

        # Another node may be able to run the ranks. So the failure counts as the loss of this node if the job
        # tolerates a loss.
        self._group.failures.append(gone if self._rules.tolerates_node_loss else failure)
        self._react(now)

    def _remove(self, agent: int, failure: Failure) -> bool:
        """Remove an agent for good.

        Args:
            agent: the agent.
            failure: why it is removed.

        Returns:
            Whether the agent had ranks of the present worker group that had not all ended well.
        """
        group = self._group
        self._gone[agent] = failure
        self._present.discard(agent)
        # An agent that is gone does not answer `KillWorkers`, so the restart must not wait for it.
        group.killing.discard(agent)
        if self.state == State.JOINING or agent in group.done:
            return False

        # A spare ran no ranks, so no restart follows, which would record its loss. Record it now.
        if agent not in group.assignment.agents:
            self._recorder.continue_without([agent])
            return False

        group.lost.add(agent)
        return True

    def _exclude(self, unhealthy: Mapping[int, str]) -> None:
        """Mark nodes that did not pass the preflight: they run no more ranks in this attempt.

        Do nothing if the job does not tolerate the loss of nodes.

        Args:
            unhealthy: the findings of the preflight, by node rank in the present worker group.
        """
        if not self._rules.tolerates_node_loss:
            return

        # Ranks report nodes by node ranks, which each worker group numbers anew. Agents keep their numbers.
        agents = self._group.assignment.agents
        reasons = {agents[node_rank]: reason for node_rank, reason in unhealthy.items()}
        for agent in sorted(reasons.keys() - self._unhealthy.keys()):
            self._unhealthy[agent] = reasons[agent]
            self._recorder.log(
                f"{names_of([agent], self._hosts)} did not pass the preflight: {reasons[agent]}"
            )

    # Methods for ranks that stop, finish or hang.

    def _forward_stop(self, sender: int, request: msg.StopRequested) -> None:
        """Order all agents but `sender` to stop their ranks; only the first request has this effect."""
        is_first = not self._stopping
        self._stopping = True
        # Each agent may report a request, because SLURM signals all agents. One order is enough.
        if is_first and self.state == State.RUNNING:
            others = self._group.agents - self._group.done.keys() - {sender}
            self._order(others, msg.RequestStop(signal=request.signal, by_slurm=request.by_slurm))

    def _note(self, message: msg.Report, now: float) -> None:
        """Add a report's failures, unhealthy nodes and last completed step to the state of the group."""
        if isinstance(message, msg.FailureReport):
            self._group.failures += message.failures
            self._exclude(message.unhealthy)
        self._group.reach(message.step, now - message.silent_s)

    def _done(self, sender: int, message: msg.WorkersDone, now: float) -> None:
        group = self._group
        is_first_stop = message.code == EXIT_STOPPED and EXIT_STOPPED not in group.done.values()
        is_news = not group.done or is_first_stop
        group.done[sender] = message.code
        self._note(message, now)

        if self.state == State.AWAITING_SAVES and group.agents <= group.done.keys():
            self.fail(group.cause)
        if self.state != State.RUNNING:
            return

        if group.agents <= group.done.keys():
            self.leave(errors.combine_exit_codes(group.done.values()))
            return

        # Ranks of the other nodes should stop or finish soon, too. Their agents check that they do.
        if is_news:
            self._order(group.agents - group.done.keys(), msg.OthersDone(code=message.code))
        self._end_hung_at_exit(now)

    def _end_hung_at_exit(self, now: float) -> None:
        """Once all other ranks have ended well, order the end of the ranks that hang at their exit.

        The combined exit code of the other ranks then counts for the hanging ranks. If a hanging rank is not
        at its exit, it counts as failed.
        """
        hung = self._group.hung_at_exit()
        if self.state != State.RUNNING or not hung:
            return

        rank_reports = [rank_report for report in hung.values() for rank_report in report.reports]
        # A hanging rank that is not at its exit may wait for ranks that have ended too early.
        stuck = [report for report in rank_reports if not stuck_rank.at_exit(report)]
        if stuck:
            self._fail_stuck(Verdict(stuck[0], stuck_rank.why(rank_reports, stuck[0])), now)
            return

        for report in rank_reports:
            self._recorder.warn(stuck_rank.hung_at_exit(report))
        codes = [*self._group.done.values(), *(code for report in hung.values() for code in report.codes)]
        self._order(hung.keys(), msg.EndHungRanks(code=errors.combine_exit_codes(codes)))
        self._group.hung = {}

    def _compare(self, message: msg.PaceReported, now: float) -> None:
        group = self._group
        if group.paces is None:
            group.paces = PaceComparison(len(group.agents) * self._rules.ranks_per_node)

        line, straggler = group.paces.take(message.paces, now)
        if line is not None:
            self._recorder.log(line)
        if straggler is not None:
            self._recorder.slow(straggler, group.assignment.restart_count)

    def _end_hang(self, now: float) -> None:
        """Diagnose a suspected hang once the reports have come or their time is over.

        The rank that the diagnosis finds stuck counts as failed.
        """
        group = self._group
        if group.diagnosis is None or not group.diagnosis.is_complete(now):
            return

        verdict = group.diagnosis.verdict()
        group.diagnosis = None
        # If the worker group has failed in the meantime, the diagnosis is not needed.
        if verdict is not None and self.state == State.RUNNING:
            self._fail_stuck(verdict, now)

    def _fail_stuck(self, verdict: Verdict, now: float) -> None:
        group = self._group
        self._recorder.stalled(verdict.report, group.assignment.restart_count)
        # 0.0 keeps the known time of the last step: the report of a stuck rank has none.
        group.reach(verdict.report.step, 0.0)
        group.failures.append(verdict.failure(group.assignment.agents, self._rules.ranks_per_node))
        self._react(now)

    # Methods for restarts of the ranks.

    def _react(self, now: float) -> None:
        """After a failure, restart the ranks, wait for further reports, or end the attempt."""
        group = self._group
        if self.state == State.JOINING:
            self.fail(group.cause)
        elif self.state == State.RESTARTING:
            self._go_on_if_killed(now)
        elif self.state != State.ENDING:
            if self._decide().restart:
                self.state = State.RESTARTING
                group.killing = group.agents - group.lost
                self._order(group.killing, msg.KillWorkers())
            # A rank that failed because it lost its peer may be reported before that peer.
            elif is_consequence(group.cause):
                self._wait(State.AWAITING_CAUSE, now + CAUSE_WAIT_S)
            elif group.cause.asked_to_stop and not group.agents <= group.done.keys():
                self._wait(State.AWAITING_SAVES, now + STOP_WAIT_S)
            else:
                self.fail(group.cause)

    def _wait(self, state: State, until: float) -> None:
        """Enter `state` until the time `until`, to wait for reports; do not extend a wait that has begun."""
        if self.state in (State.RUNNING, State.AWAITING_CAUSE) and self.state != state:
            self.state = state
            self._end_by = until

    def _decide(self) -> Decision:
        self._stopping = self._stopping or self._is_over()
        group = self._group
        facts = Facts(
            codes=[failure.exit_code for failure in group.failures],
            stopping=self._stopping or any(failure.asked_to_stop for failure in group.failures),
            done=bool(group.done),
            lost=bool(group.lost),
            unhealthy=not self._unhealthy.keys().isdisjoint(group.agents),
            agents=self._next_agents(),
            restarts=group.assignment.restart_count,
            step=group.step,
            furthest=self._furthest,
        )
        return decide(facts, self._rules)

    def _next_agents(self) -> tuple[int, ...]:
        healthy = self._present - self._unhealthy.keys()
        return choose_agents(self._group.assignment.agents, healthy, self._rules)

    def _go_on_if_killed(self, now: float) -> None:
        """Once all agents have killed their ranks, start the next worker group or end the attempt."""
        if self.state != State.RESTARTING or self._group.killing:
            return

        # Decide again: since the first decision more failed ranks were reported, and one may rule out the
        # restart, for example by the exit code of a wrong configuration.
        if self._decide().restart:
            self._restart(now)
        elif self._stopping:
            self._recorder.failed(self._group.cause, self._group.assignment.restart_count)
            self._recorder.log("the run was asked to stop before the ranks were restarted")
            self.leave(EXIT_STOPPED)
        else:
            self.fail(self._group.cause)

    def _restart(self, now: float) -> None:
        """Order the start of the next worker group; the failure is recorded after the orders are sent."""
        group = self._group
        agents = self._next_agents()
        if len(agents) < len(group.agents):
            self._shrunk = group.cause
        self._furthest = max(self._furthest, group.step)

        self._later.append(partial(self._record_restart, group, now - group.stepped_at))
        self._start(agents)

    def _record_restart(self, failed: Group, silent_s: float) -> None:
        before = failed.assignment
        cause = failed.cause
        # Record the finding of the preflight as the cause: it explains more than the exit codes of the ranks.
        unhealthy = [agent for agent in before.agents if agent in self._unhealthy]
        if unhealthy:
            cause = unhealthy_node(unhealthy[0], self._hosts, self._unhealthy[unhealthy[0]])

        self._recorder.failed(cause, before.restart_count)
        self._recorder.restarted(self._group.assignment, before, cause, failed.step, silent_s)

    def write_records(self) -> None:
        """Write the records that were postponed; the agent calls this after it has sent the orders."""
        while self._later:
            self._later.pop(0)()

    def _start(self, agents: tuple[int, ...]) -> None:
        self._later.append(partial(self._recorder.continue_without, self._gone))
        self.state = State.RUNNING
        restart_count = self._group.assignment.restart_count + 1
        self._group = Group(Assignment(restart_count, agents))
        start = msg.StartWorkers(
            restart_count=restart_count,
            agents=agents,
            master=self._meet(self._group.assignment),
            # Until a step was completed, some nodes may be unchecked, such as a spare that replaces a node.
            preflight=self._furthest < 0,
            excluded=tuple(sorted(self._unhealthy)),
        )
        self._order(self._present, start)

    def _order(self, agents: Sequence[int] | Set[int], order: msg.Order) -> None:
        self.orders += [(agent, order) for agent in sorted(agents, reverse=True)]
