"""What node 0's agent does for all: it lets ranks begin together, again after a fall, and end together.

It does no work of its own. It is told what agents say and what time it is, and leaves orders for them:

    go       begin the ranks of a generation; agents without a place in it wait as spares
    stop     end your ranks at once, and answer with `stopped`: other ones are to begin
    pass_on  ask your ranks to stop: others have stopped before them
    others_left  ranks of another node have ended well: look whether yours hang at their exit
    end_hung     end the ranks that hang at their exit: all others have ended well
    leave    all ranks have come to their end
    end      the attempt has failed: end your ranks and leave

Agents say `fell` (a rank has died), `stopped`, `done` (all ranks ended as they should), `stopping` (a
signal has asked the run to stop) and `hung` (all ranks left on the node hang at their exit; with no
reports: they work after all). Each way takes one message; nobody asks twice. With each of these comes
which ranks had ended with 0 by then: if others have lost them, or wait for them, that was too early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from slurmddp.batch import outcome
from slurmddp.errors import EXIT_CONFIG, EXIT_STOPPED
from slurmddp.launchers.coordinator.join import Gathering
from slurmddp.launchers.coordinator.messages import (
    Message,
    as_failure,
    hung_at_exit,
    lost_agent,
    stalled_rank,
    unable_node,
)
from slurmddp.launchers.coordinator.records import Record
from slurmddp.launchers.coordinator.restart_policy import (
    Decision,
    Facts,
    Generation,
    Reached,
    Rules,
    choose_agents,
    decide,
)
from slurmddp.launchers.coordinator.unfit import Unfit
from slurmddp.launchers.watchdog.diagnosis import Comparison, Inquiry, Verdict
from slurmddp.launchers.watchdog.stuck_rank import RankReport, at_exit, why
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure

CAUSE_WAIT_S = 0.3
"""How long a rank that only lost its peer lets the peer's own agent be first to report."""
LEFT_ALONE_S = 0.9
"""How long ranks may take to follow those of another node that have stopped before they are told to."""

MeetingPoint = Callable[[Generation], tuple[str, int]]
"""Gives address and port at which the ranks of a generation can meet if they bring no rendezvous."""


class Lead:
    """The state of one attempt, as the agents tell it; times are of one monotonic clock."""

    def __init__(
        self, rules: Rules, hosts: Sequence[str], record: Record, now: float, meet: MeetingPoint
    ) -> None:
        self.orders: list[tuple[int, Message]] = []
        """What to send next, and to whom; its own agent comes last."""
        self._rules, self._hosts, self._record, self._meet = rules, hosts, record, meet
        self._gathering = Gathering(hosts, rules, record.say, now)
        self._phase = "joining"
        self._present = {0}
        self._gone: dict[int, Failure] = {}
        """The agents that are lost or have given up."""
        self._unfit = Unfit(hosts, rules, record)
        self._generation = Generation(-1, tuple(range(rules.nodes)))
        self._restarts, self._furthest = 0, -1
        self._stopping = False
        self._shrunk: Failure | None = None
        """With what a node was missed after which the others went on without another in its place."""
        self._inquiry, self._comparison = Inquiry(()), Comparison(0)
        self._forget()

    def _forget(self) -> None:
        """Make room for what is told of a new generation."""
        self._reached = Reached()
        self._fallen: list[Failure] = []
        self._left: dict[int, Failure] = {}
        """Ranks that ended with 0, by their numbers."""
        self._lost: set[int] = set()
        self._done: dict[int, int] = {}
        self._hung: dict[int, Mapping[str, Any]] = {}
        """The agents whose remaining ranks hang at their exit, with the message."""
        self._awaited: set[int] = set()
        self._act_at: float | None = None

    @property
    def next_look(self) -> float | None:
        """When `look` is to be called, should nothing happen before."""
        if self._phase == "joining":
            return self._gathering.next_notice
        return min(filter(None, (self._act_at, self._inquiry.next_look)), default=None)

    # What happens.

    def take(self, sender: int, message: Mapping[str, Any], now: float) -> None:
        """Take in what an agent says, or what the link says of it; other kinds are passed over."""
        kind = message["kind"]
        if "left" in message and message["generation"] == self._generation.number:
            self._left |= {facts["rank"]: as_failure(facts) for facts in message["left"]}
        if kind == "arrived":
            self._present.add(sender)
        elif kind == "stopping":
            self._stopping = True
        elif kind == "lost":
            self._take_loss(sender, message, now)
        elif kind == "fell" and message.get("generation", -1) in (-1, self._generation.number):
            self._take_fall(sender, message, now)
        elif kind in ("stall", "report", "pace") and message["generation"] == self._generation.number:
            self._take_sight(sender, message, now)
        elif kind == "hung" and message["generation"] == self._generation.number:
            self._hung[sender] = message
            self._end_hung(now)
        elif kind in ("stopped", "done") and message["generation"] == self._generation.number:
            (self._take_stopped if kind == "stopped" else self._take_done)(sender, message, now)

    def look(self, now: float, missing: Sequence[int] = ()) -> None:
        """Do what is due; `missing` are the agents that have not arrived yet."""
        if self._phase == "joining":
            self._present = set(range(self._rules.all_nodes)) - set(missing) - self._gone.keys()
            self._join(now)
        elif self._act_at is not None and now >= self._act_at:
            self._act_at = None
            if self._phase == "failing":
                self.end(self._cause())
            elif self._phase == "running":
                self._order([a for a in self._generation.agents if a not in self._done], {"kind": "pass_on"})
        self._judge(now)

    def _join(self, now: float) -> None:
        self._stopping = self._stopping or self._record.is_over()
        if self._stopping:
            self.leave(EXIT_STOPPED)
            return
        agents, missed = self._gathering.look(now, self._present, self._gone) or ((), None)
        if agents:
            self._shrunk = missed if len(agents) < self._rules.nodes else None
            self._go(agents)
        elif missed is not None:
            self.end(missed)

    def _take_loss(self, sender: int, message: Mapping[str, Any], now: float) -> None:
        if self._phase == "leaving":
            return
        lost = lost_agent(sender, self._hosts, message, here=0)
        self._record.say(lost.sentence)
        if self._miss(sender, lost):
            self._fallen.append(lost)
            self._fall(now)

    def _take_fall(self, sender: int, message: Mapping[str, Any], now: float) -> None:
        found = [as_failure(facts) for facts in message["failures"]]
        unable = [one for one in found if one.rank is None]  # The agent itself can't go on.
        if unable:
            missed = self._miss(sender, gone := unable_node(sender, self._hosts, unable[0]))
            if not missed and (self._phase != "joining" or self._rules.outlives_nodes):
                self._record.warn(capture.describe(unable[0]))
                return
            if self._rules.outlives_nodes:  # What one node refuses need not be wrong on others.
                found = [gone]
        self._note(message, found, now)
        self._fall(now)

    def _miss(self, sender: int, why: Failure) -> bool:
        """Count no more on an agent; return whether its ranks are missed too."""
        self._gone[sender] = why
        self._present.discard(sender)
        self._awaited.discard(sender)
        if self._phase == "joining" or sender in self._done:
            return False
        if sender not in self._generation.agents:
            self._record.go_on_without([sender])
            return False
        self._lost.add(sender)
        return True

    def _take_stopped(self, sender: int, message: Mapping[str, Any], now: float) -> None:
        self._note(message, [as_failure(facts) for facts in message["failures"]], now)
        self._stopping |= bool(message.get("stopping"))
        self._awaited.discard(sender)
        if self._phase == "stopping" and not self._awaited:
            self._conclude(now)

    def _take_done(self, sender: int, message: Mapping[str, Any], now: float) -> None:
        self._done[sender] = int(message["code"])
        self._note(message, [], now)
        if self._phase == "running" and set(self._generation.agents) <= set(self._done):
            self.leave(outcome.combine(self._done.values()))
        elif self._phase == "running" and EXIT_STOPPED in self._done.values() and self._act_at is None:
            self._act_at = now + LEFT_ALONE_S
        if self._phase == "running":
            if len(self._done) == 1:
                self._order(set(self._generation.agents) - {sender}, {"kind": "others_left"})
            self._end_hung(now)

    def _end_hung(self, now: float) -> None:
        """End the ranks that hang at their exit once all others have left well; their result stands."""
        hung = {
            agent: told for agent, told in self._hung.items() if agent not in self._done and told["reports"]
        }
        codes = [*self._done.values(), *(code for told in hung.values() for code in told["codes"])]
        everyone = set(self._generation.agents) <= self._done.keys() | hung.keys()
        if self._phase != "running" or not (hung and codes and everyone):
            return
        found = [RankReport.from_json(values) for told in hung.values() for values in told["reports"]]
        if stuck := [one for one in found if not at_exit(one)]:  # Others left too early, say.
            self._stall(Verdict(stuck[0], why(found, stuck[0])), now)
            return
        for one in found:
            self._record.warn(hung_at_exit(one))
        self._order(hung.keys(), {"kind": "end_hung", "code": outcome.combine(codes)})
        self._hung = {}

    def _take_sight(self, sender: int, message: Mapping[str, Any], now: float) -> None:
        """Take in what an agent sees of its ranks: that they stand still, what each does, their pace."""
        if message["kind"] == "pace":
            line, found = self._comparison.take(message, now)
            if line is not None:
                self._record.say(line)
            if found is not None:
                self._record.slow(found, self._generation.number)
        elif message["kind"] == "report":
            self._inquiry.take(sender, message)
            self._judge(now)
        elif self._phase == "running" and self._inquiry.begin(now):
            self._order(self._generation.agents, {"kind": "report", "generation": self._generation.number})

    def _judge(self, now: float) -> None:
        """Let the rank that holds up all others count as fallen."""
        verdict = self._inquiry.verdict(now)
        if verdict is not None and self._phase == "running":
            self._stall(verdict, now)

    def _stall(self, verdict: Verdict, now: float) -> None:
        self._record.stalled(verdict.report, self._generation.number)
        self._reached.take(verdict.report.step, 0.0)
        self._fallen.append(stalled_rank(verdict, self._generation.agents, self._rules.ranks_per_node))
        self._fall(now)

    def _note(self, message: Mapping[str, Any], found: Sequence[Failure], now: float) -> None:
        self._fallen += found
        self._reached.take(int(message.get("step", -1)), now - float(message.get("silent_s", math.inf)))

    # What follows.

    def _fall(self, now: float) -> None:
        """A rank or a node is gone: end all ranks, so that others begin, or the attempt."""
        if self._phase == "joining":
            self.end(self._cause())
        elif self._phase == "stopping" and not self._awaited:
            self._conclude(now)
        elif self._phase in ("running", "failing"):
            self._unfit.heed(self._generation)
            cause = self._cause()
            wait = CAUSE_WAIT_S if capture.is_consequence(cause) else self._unfit.wait(cause, self._fallen)
            if self._decide().restart:
                self._phase, self._act_at = "stopping", None
                self._awaited = set(self._generation.agents) - self._lost
                self._order(self._awaited, {"kind": "stop", "generation": self._generation.number})
            elif not wait:
                self.end(cause)
            elif self._phase == "running":
                self._phase, self._act_at = "failing", now + wait

    def _cause(self) -> Failure:
        return capture.likely_first([*self._fallen, *self._left.values()])

    def _decide(self) -> Decision:
        self._stopping = self._stopping or self._record.is_over()
        facts = Facts(
            codes=[fallen.exit_code for fallen in self._fallen],
            stopping=self._stopping,
            done=bool(self._done),
            lost=bool(self._lost),
            unfit=self._unfit.among(self._generation),
            agents=self._next_agents(),
            restarts=self._restarts,
            step=self._reached.step,
            furthest=self._furthest,
        )
        return decide(facts, self._rules)

    def _next_agents(self) -> tuple[int, ...]:
        return choose_agents(self._generation.agents, self._present - self._unfit.agents, self._rules)

    def _conclude(self, now: float) -> None:
        """All ranks of a generation have ended: begin with the next, or end the attempt after all."""
        self._unfit.heed(self._generation)
        cause = self._cause()
        decision = self._decide()
        if decision.restart:
            self._restart(cause, now)
        elif self._stopping:
            self._record.fell(cause, self._generation.number)
            self._record.say("asked to stop before the ranks had begun again")
            self.leave(EXIT_STOPPED)
        else:
            self.end(cause)

    def _restart(self, cause: Failure, now: float) -> None:
        before, reached = self._generation, self._reached
        agents = self._next_agents()
        if len(agents) < len(before.agents):
            self._shrunk = cause
        cause = self._unfit.cause(before) or cause
        self._record.fell(cause, before.number)
        self._furthest = max(self._furthest, reached.step)
        self._restarts += 1
        after = Generation(before.number + 1, agents)
        self._record.restarted(after, before, cause, reached.step, now - reached.at)
        self._go(agents)

    def _go(self, agents: tuple[int, ...]) -> None:
        self._forget()
        self._record.go_on_without(self._gone)
        self._phase = "running"
        self._generation = after = Generation(self._generation.number + 1, agents)
        self._inquiry = Inquiry(agents)
        self._comparison = Comparison(len(agents) * self._rules.ranks_per_node)
        # Until there was a step, the nodes may not have been looked at, or a spare is new among them.
        facts = {"look": self._furthest < 0, "unfit": sorted(self._unfit.agents)}
        facts |= {"generation": after.number, "agents": list(agents), "master": self._meet(after)}
        self._order(self._present, {"kind": "go", **facts})

    def leave(self, code: int) -> None:
        """Let all agents leave; `code` is for those that have run no ranks."""
        self._phase = "leaving"
        self._order(self._present, {"kind": "leave", "code": code})

    def end(self, cause: Failure) -> None:
        """The attempt has failed for good: let all agents end their ranks and leave."""
        if self._phase == "leaving":
            return
        if cause.exit_code == EXIT_CONFIG and self._shrunk is not None and self._reached.step < 0:
            self._record.say("the ranks refuse to go on with fewer nodes")
            cause = self._shrunk  # The next attempt gets all of them again.
        decision = self._decide()
        why = "" if decision.restart or self._generation.number < 0 else f": {decision.why}"
        self._record.say(f"{capture.describe(cause)} The attempt ends{why}.")
        self._record.failed(cause)
        self._phase = "leaving"
        self._order(self._present, {"kind": "end", "code": capture.node_code(cause)})

    def _order(self, agents: Sequence[int] | Set[int], message: Message) -> None:
        self.orders += [(agent, message) for agent in sorted(agents, reverse=True)]
