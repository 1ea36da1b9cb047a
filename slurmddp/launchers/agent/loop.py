"""What an agent does while its node's ranks run, or wait to: it takes things as they come and obeys the lead.

A turn of the loop waits once, for a signal, a word of another agent or the end of a rank, and acts on it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from slurmddp.batch import outcome
from slurmddp.checkpoint.memory.service import Keeper
from slurmddp.environments.time_limits import Limits, leave_at
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED
from slurmddp.launchers.agent.worker_group import Crew
from slurmddp.launchers.coordinator.coordinator import LEFT_ALONE_S, Lead
from slurmddp.launchers.coordinator.join import Arrival, end_without_lead
from slurmddp.launchers.coordinator.messages import Message, all_as_facts, lost_agent, why_no_ranks
from slurmddp.launchers.coordinator.records import Records
from slurmddp.launchers.coordinator.restart_policy import Generation, Rules
from slurmddp.launchers.link.events import Line
from slurmddp.launchers.watchdog.node_watch import Watch
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure

_KILL_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL for the ranks that outlive a failed one: time to end a write, not to save."""
_WRITING_S = 600.0
"""How long an agent whose ranks have ended waits for a checkpoint to be written."""
DEAF_SHARE, WRITING_SHARE = 0.8, 0.6
"""Parts of `RESERVE_S` that are left when agents end deaf ranks, and when they give up a checkpoint.

The batch script needs the rest: on a busy host it takes three seconds to write `ended` and to requeue.
"""
_ENDS = frozenset({"fell", "stopped", "done", "report", "hung"})
"""Words that also tell which ranks had ended with 0 by then."""
_TICK_S = 1.0
_STOPPING_TICK_S = 0.1


class AgentLoop:
    """One agent's part of an attempt, from the moment at which it could start ranks to its exit code."""

    def __init__(
        self,
        line: Line,
        rules: Rules,
        crew: Crew,
        keeper: Keeper,
        watch: Watch,
        records: Records,
        limits: Limits,
    ) -> None:
        self._node, self._link, self._events = line.node, line.link, line.events
        self._rules, self._crew, self._keeper, self._watch = rules, crew, keeper, watch
        self._records, self._limits = records, limits
        self._begun = time.monotonic()
        self._arrival = Arrival(line.node.hosts, rules, records, self._begun)
        self._lead: Lead | None = None
        if line.node.node_rank == 0:
            self._lead = Lead(rules, line.node.hosts, records, self._begun, crew.meeting_point)
        self._generation: Generation | None = None
        self._at_work = False
        """Whether ranks of the present generation are to be waited for here."""
        self._fallen: list[Failure] = []
        self._answer: dict[str, Any] | None = None
        """What to say once all ranks have ended that were told to."""
        self._codes: list[int] = []
        """How those of its ranks have ended that ended as they should."""
        self._others_left = False
        """Whether ranks of other nodes have ended as they should."""
        self._code: int | None = None
        self.lost_lead = False
        """Whether this agent had to end because node 0's is gone."""
        self._stopping = False
        self._terminated: float | None = None
        self._left_at: float | None = None

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
            self._records.save_newest(self._keeper)
        self._keeper.hurry()
        while (
            (self._keeper.busy() or (self._lead is None and not self._link.missing()))
            and time.monotonic() < until
            and not self._out_of_time(WRITING_SHARE)
        ):
            self._turn(time.monotonic() + _STOPPING_TICK_S)
        self._keeper.finish(0.0)

    def _may_save(self) -> bool:
        """Whether this agent may save what memory holds: node 0's does, without node 0 any that trains."""
        if self._generation is None or self._lead is not None:
            return self._lead is not None
        return self.lost_lead and self._generation.place(self._node.node_rank) is not None

    def give_up(self, why: Failure) -> None:
        """Tell the others that this agent can't go on; without them, the run folder."""
        self._crew.end(0.0)
        if self._lead is not None:
            self._lead.end(why)
            self._send_orders(obey=False)
        elif self._link.missing():
            end_without_lead(why, self._rules, self._records)
        else:
            self._tell("fell", failures=all_as_facts([why]))
        if self._lead is not None:
            self._records.save_newest(self._keeper)
        self._keeper.finish(_WRITING_S)

    def _turn(self, until: float) -> None:
        happened = self._events.wait(until)
        self._take_signals(happened.signals)
        self._reap()
        for sender, message in happened.messages:
            self._hear(sender, message)

    def _next_look(self) -> float:
        soon = self._stopping or self._left_at is not None
        due = time.monotonic() + (_STOPPING_TICK_S if soon else _TICK_S)
        due = min(due, self._watch.next_look()) if self._at_work else due
        lead = self._lead.next_look if self._lead is not None else None
        return due if lead is None else min(due, lead)

    def _look(self, now: float) -> None:
        """Do what the moment asks for."""
        if self._generation is None:
            self._hear_unable()
            self._look_before_ranks(now)
        if self._lead is not None and self._code is None:
            self._lead.look(now, self._link.missing())
            self._send_orders()
        self._obey_stop_file()
        self._pass_on_stop(now)
        for message in self._watch.look(now, left_in=self._left_in()) if self._at_work else []:
            self._tell(message.pop("kind"), codes=self._codes, **message)
        if self._at_work and self._out_of_time():
            self._records.say(
                "SLURM is about to kill: ranks end here, the run resumes from its last checkpoint"
            )
            self._crew.end(0.0)
            self._at_work = False
            if self._lead is not None:
                self._lead.leave(EXIT_STOPPED)
                self._send_orders()
            else:
                self._tell("done", code=EXIT_STOPPED)
                self._code = EXIT_STOPPED

    def _left_in(self) -> int | None:
        """Return the generation, once some of its ranks have ended as they should."""
        return self._generation.number if self._generation and (self._codes or self._others_left) else None

    def _look_before_ranks(self, now: float) -> None:
        found = self._records.failure()  # It may be that of an agent whose line did not stand yet.
        if found is not None and self._lead is not None:
            self._lead.end(found)
        elif found is not None:
            self._code = capture.node_code(found)
        elif self._lead is None and self._link.missing():
            self._code = self._arrival.look(now)

    def _hear_unable(self) -> None:
        """Report agents without a link that can run no ranks to the lead."""
        for agent, why in self._records.unable() if self._lead is not None else []:
            self._hear(agent, {"kind": "fell", "generation": -1, "failures": all_as_facts([why])})
            self._records.hear_unable(agent)

    # Words of other agents.

    def _tell(self, kind: str, **facts: Any) -> None:
        """Tell the lead, which may be this very agent."""
        number = -1 if self._generation is None else self._generation.number
        message: Message = {"kind": kind, "generation": number, **self._crew.progress(), **facts}
        if kind in _ENDS and self._crew.left:
            message["left"] = all_as_facts(self._crew.left)
        if self._lead is None:
            self._link.send(0, message)
        else:
            self._lead.take(0, message, time.monotonic())
            self._send_orders()

    def _hear(self, sender: int, message: Message) -> None:
        if self._lead is not None:
            self._lead.take(sender, message, time.monotonic())
            self._send_orders()
        elif message["kind"] == "lost":
            self._lose_lead(message)
        else:
            self._obey(message)

    def _send_orders(self, *, obey: bool = True) -> None:
        """Send what the lead has ordered; its own agent, which may wait for ranks to end, comes last."""
        while self._lead is not None and self._lead.orders:
            to, message = self._lead.orders.pop(0)
            if to != 0:
                self._link.send(to, message)
            elif obey:
                self._obey(message)

    def _obey(self, message: Message) -> None:
        orders: dict[str, Callable[[Message], None]] = {
            "go": self._begin,
            "stop": self._stop_ranks,
            "report": lambda message: self._watch.ask(message["generation"]),
            "pass_on": lambda message: self._take_signals([signal.SIGTERM]),
            "others_left": lambda message: setattr(self, "_others_left", True),
            "end_hung": self._end_hung,
            "leave": self._leave,
            "end": self._end,
        }
        order = orders.get(message["kind"])
        if order is not None and self._code is None:
            order(message)

    def _lose_lead(self, message: Message) -> None:
        """Without node 0 nobody decides, and no rank can train: end as with a rank that failed there."""
        lost = lost_agent(0, self._node.hosts, message, here=self._node.node_rank)
        self._records.say(lost.sentence)
        self.lost_lead = True
        if self._code is not None:
            return  # It only stays until a checkpoint is written.
        if self._generation is not None and not self._at_work:
            self._code = outcome.combine(self._codes) if self._codes else EXIT_STOPPED
            return
        cause = capture.likely_first([*self._fallen, lost])
        self._crew.end(_KILL_GRACE_S)
        self._code = end_without_lead(cause, self._rules, self._records)

    # Orders.

    def _begin(self, message: Message) -> None:
        self._generation = Generation(message["generation"], tuple(message["agents"]))
        self._fallen, self._codes, self._left_at, self._others_left = [], [], None, False
        if self._generation.place(self._node.node_rank) is None:
            self._records.say(why_no_ranks(self._node.node_rank, message))
        elif self._stopping:
            self._codes = [EXIT_STOPPED]
            self._tell("done", code=EXIT_STOPPED)
        else:
            self._at_work = True
            self._crew.start(self._generation, *message["master"], look=message["look"])

    def _stop_ranks(self, message: Message) -> None:
        self._at_work = False
        bad = self._crew.failures(self._crew.reap())  # Not by our hand, so one of them may be the cause.
        self._answer = {"failures": all_as_facts(bad)}
        self._watch.forget()
        self._crew.kill()
        self._answer_stop()

    def _answer_stop(self) -> None:
        """Tell that no rank is left, once that is so; raises SlurmddpError when one can't be ended."""
        if self._answer is not None and self._crew.is_gone():
            answer, self._answer = self._answer, None
            self._tell("stopped", **answer, stopping=self._stopping)

    def _leave(self, message: Message) -> None:
        found = None  # Once ranks have run, their result stands.
        if self._generation is None:
            self._records.say("stopped before the ranks were started")
            found = self._records.failure()
        if self._at_work:
            self._crew.end(0.0)
            self._codes.append(EXIT_STOPPED)
        own = outcome.combine(self._codes) if self._codes and self._lead is None else int(message["code"])
        self._code = capture.node_code(found) if found is not None else own

    def _end_hung(self, message: Message) -> None:
        """End the ranks that hang at their exit; the code of the others stands for them."""
        if self._at_work:
            self._at_work = False
            self._crew.end(0.0)
            self._tell("done", code=outcome.combine([*self._codes, int(message["code"])]))

    def _end(self, message: Message) -> None:
        if self._at_work and not self._fallen:
            self._records.say("the attempt has failed elsewhere")
        self._crew.end(_KILL_GRACE_S)
        self._code = int(message["code"])

    # The own ranks.

    def _reap(self) -> None:
        ended = self._crew.reap()
        if not self._at_work:
            self._answer_stop()
            return
        self._codes += [one.returncode for one in ended if one.good]
        bad = self._crew.failures(ended)
        self._fallen += bad
        if bad:
            self._tell("fell", failures=all_as_facts(bad))
        elif ended and not self._crew and not self._fallen:
            self._at_work = False
            self._tell("done", code=outcome.combine(self._codes))

    def _pass_on_stop(self, now: float) -> None:
        """Stop the ranks that outlive one which stopped: before the training begins it stops alone."""
        if self._stopping or EXIT_STOPPED not in self._codes or not self._crew:
            return
        self._left_at = self._left_at or now
        if now - self._left_at > LEFT_ALONE_S:
            self._take_signals([signal.SIGTERM])

    def _obey_stop_file(self) -> None:
        """Send the ranks of a script the signal of a stop that a person has asked for by the stop file."""
        if self._at_work and self._rules.is_script and not self._stopping and self._records.is_stopped():
            self._take_signals([signal.SIGUSR2])

    def _take_signals(self, received: Sequence[signal.Signals]) -> None:
        for sent in received:
            if sent == signal.SIGCHLD:
                continue
            if sent == signal.SIGTERM:
                self._terminated = self._terminated or time.time()
            if self._at_work and not self._fallen:
                self._crew.signal(signal.SIGTERM if sent == signal.SIGINT else sent)
            if not self._stopping:
                self._stopping = True
                self._note_stop(sent)

    def _note_stop(self, sent: signal.Signals) -> None:
        if self._generation is not None:
            self._records.say(f"received {sent.name}: passed on to the ranks, for a save and an end")
        if self._generation is None and self._lead is None and self._link.missing():
            self._records.say("stopped before the ranks were started")
            self._code = EXIT_STOPPED  # Nobody to agree with, and nothing to lose.
        else:
            self._tell("stopping")

    def _out_of_time(self, share: float = DEAF_SHARE) -> bool:
        """Whether even the ranks' own guards, which come first, have not made all of them leave in time."""
        at = leave_at(self._limits, self._terminated, share)
        return at is not None and time.time() >= at
