"""The records of an attempt in the run folder: log lines, events, failures, reports of agents without a link.

If a record can't be written, as on a full disk, the attempt continues without it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from slurmddp.checkpoint.files.durable import write_small
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.launchers.coordinator.recorder import Record
from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.launchers.watchdog.stragglers import Straggler
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, as_json, describe, from_json
from slurmddp.runs.folder.late_files import names_in
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import own_script


def say(text: str) -> None:
    """Write a line to this node's log."""
    print(f"slurmddp agent: {text}", file=sys.stderr, flush=True)


class Records(Record):
    """The files of one attempt, as the coordinator writes them (see `Record`)."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt

    def say(self, text: str) -> None:
        say(text)

    def warn(self, text: str) -> None:
        say(text)
        self._add("warned", about="node", text=text)

    def awaits(self, nodes: str) -> None:
        self._add("awaits", nodes=nodes)

    def ranks_apart(self, ranks: int, nodes: int) -> None:
        """Note that the ranks of a program, which has ended well, were not seen to connect to each other."""
        program = own_script(self._folder.config()["program"])
        once = "-n 1" if nodes == 1 else "nodes=1 -n 1"
        self._add(
            "warned",
            about="ranks",
            text=f"note: no connection was seen between the {ranks} ranks of {program}. Unless they divide "
            f"the work by RANK, each did all of it and wrote the same files: {once} runs it once.",
        )

    def is_stopped(self) -> bool:
        """Whether a person has asked the run to stop."""
        return self._folder.is_stopped

    def failure(self) -> Failure | None:
        """Return the failure that ended the attempt; None before a failure, or if the file can't be read."""
        return capture.read(self._folder, self._attempt)

    def code_of_first_node(self) -> int | None:
        """Return the exit code of node 0's agent, if it has left."""
        return self._folder.exit_code_of(self._attempt, 0)

    def has_ended(self) -> bool:
        """Whether the attempt has failed, or node 0's agent has left."""
        return self.failure() is not None or self.code_of_first_node() is not None

    def leave_unable(self, agent: int, why: Failure) -> bool:
        """Leave a report for node 0 that this agent can run no ranks; return False if that fails."""
        try:
            write_small(self._unable_file(agent), as_json(why))
        except OSError as error:
            say(f"the report to node 0 was not written: {error}")
            return False
        return True

    def unable(self) -> list[tuple[int, Failure]]:
        """Return the agents that left a report that they can run no ranks, with the reasons."""
        found = []
        with suppress(OSError):
            for path in sorted(self._unable_file(0).parent.glob("unable-node-*.json")):
                why = from_json(path.read_text(encoding="utf-8"))
                if why is not None and why.node_rank:
                    found.append((why.node_rank, why))
        return found

    def confirm_unable(self, agent: int) -> None:
        """Confirm to an agent that node 0 has read the agent's report."""
        with suppress(OSError):
            self._unable_file(agent).unlink()

    def is_confirmed(self, agent: int) -> bool:
        """Whether node 0 has read this agent's report."""
        names = names_in(self._folder.log_dir(self._attempt))
        return bool(names) and self._unable_file(agent).name not in names

    def _unable_file(self, agent: int) -> Path:
        return self._folder.unable_file(self._attempt, agent)

    def flush_newest(
        self, checkpoints: CheckpointService, *, states: bool = True, parts: bool = True
    ) -> None:
        """Write the newest state to disk if only memory holds it: the attempt ends without another save.

        Args:
            checkpoints: hold the state.
            states: whether this agent may write a state that the memory of one node holds.
            parts: whether all nodes can write their parts of a state.
        """

        def claim(step: int, is_part: bool) -> bool:
            return parts if is_part else states and self._claim_save(step)

        try:
            step = checkpoints.flush_newest(self._folder.path, self._attempt, claim)
        except OSError as error:
            say(f"the state in memory was not saved, because the checkpoints can't be listed: {error}")
            return
        if step is not None:
            say(f"the state of step {step}, which only memory holds, is written to disk")

    def _claim_save(self, step: int) -> bool:
        """Claim the save of a step's state; return False if another agent has claimed it."""
        try:
            (self._folder.log_dir(self._attempt) / f"saving-{step}").mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            say(f"the save of step {step} could not be claimed, so another node may save it too: {error}")
        return True

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        try:
            capture.record(self._folder, self._attempt, cause, restart_count=restart_count)
        except OSError as error:
            say(f"the failure was not recorded: {error}")

    def restarted(
        self, assignment: Assignment, before: Assignment, cause: Failure, step: int, silent_s: float
    ) -> None:
        facts: dict[str, object] = {}
        taken = [agent for agent in assignment.agents if agent not in before.agents]
        if taken:
            facts["spare"] = taken
        if len(assignment.agents) != len(before.agents):
            facts["nodes"] = len(assignment.agents)
        if step >= 0:
            facts["silent_s"] = round(silent_s, 3)
        reached = f"; they had come to step {step}" if step >= 0 else ""
        say(
            f"{describe(cause)} Restart {assignment.restart_count} of the ranks begins on "
            f"{len(assignment.agents)} node(s){reached}."
        )
        self._add(
            "restarted",
            restart_count=assignment.restart_count,
            reason=describe(cause),
            node=cause.node_rank,
            rank=cause.rank,
            step=step,
            **facts,
        )

    def stalled(self, report: RankReport, restart_count: int) -> None:
        facts = {"rank": report.rank, "host": report.host, "phase": report.phase, "step": report.step}
        self._add("stalled", restart_count=restart_count, **facts, seconds=report.seconds)

    def slow(self, found: Straggler, restart_count: int) -> None:
        self._add("straggler", restart_count=restart_count, rank=found.rank, host=found.host, text=found.line)

    def _add(self, event: str, **facts: object) -> None:
        try:
            if not self._folder.is_superseded(self._attempt):
                self._folder.add_event(event, attempt=self._attempt, **facts)
        except OSError as error:
            say(f"{event} was not recorded: {error}")

    def continue_without(self, agents: Collection[int]) -> None:
        if agents:
            self._add("continued", without=sorted(agents))
