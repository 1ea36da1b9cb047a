"""Write and read the records of an attempt in the run folder.

The records are log lines, events, failures, and reports of agents without a link. If a record can't be
written, as on a full disk, the attempt continues without it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from slurmddp.checkpoint.files.durable import write_small
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.launchers.coordinator.recorder import Recorder
from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.launchers.watchdog.stragglers import Straggler
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, as_json, describe, from_json
from slurmddp.runs.folder.late_files import names_in
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import own_script


def log_line(text: str) -> None:
    """Write a line to standard error, which is the log of this node's agent."""
    print(f"slurmddp agent: {text}", file=sys.stderr, flush=True)


class RunFolderRecorder(Recorder):
    """Writes the records of one attempt to the run folder (see `Recorder`), and reads them."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._folder = folder
        self._attempt = attempt

    def log(self, text: str) -> None:
        log_line(text)

    def warn(self, text: str) -> None:
        log_line(text)
        self._add("warned", about="node", text=text)

    def awaits(self, nodes: str) -> None:
        self._add("awaits", nodes=nodes)

    def ranks_apart(self, ranks: int, nodes: int) -> None:
        """Record a warning that the ranks of a program, which ended well, never connected to each other."""
        program = own_script(self._folder.config()["program"])
        options = "-n 1" if nodes == 1 else "nodes=1 -n 1"
        self._add(
            "warned",
            about="ranks",
            text=f"note: no connection was seen between the {ranks} ranks of {program}. Unless they divide "
            f"the work by RANK, each did all of it and wrote the same files. To run it once, add {options}.",
        )

    def is_stopped(self) -> bool:
        """Return whether a person has asked the run to stop."""
        return self._folder.is_stopped

    def failure(self) -> Failure | None:
        """Return the failure that ended the attempt; None before a failure, or if the file can't be read."""
        return capture.read(self._folder, self._attempt)

    def code_of_first_node(self) -> int | None:
        """Return the exit code of node 0's agent; None if that agent has not exited."""
        return self._folder.exit_code_of(self._attempt, 0)

    def has_ended(self) -> bool:
        """Return whether the attempt has failed, or node 0's agent has exited."""
        return self.failure() is not None or self.code_of_first_node() is not None

    def leave_unable(self, agent: int, failure: Failure) -> bool:
        """Leave a report for node 0 that this agent can run no ranks; return False if it can't be written."""
        try:
            write_small(self._unable_file(agent), as_json(failure))
        except OSError as error:
            log_line(f"the report to node 0 was not written: {error}")
            return False
        return True

    def unable(self) -> list[tuple[int, Failure]]:
        """Return the reports of agents that can run no ranks: the agents' node ranks and failures."""
        reports = []
        with suppress(OSError):
            for path in sorted(self._unable_file(0).parent.glob("unable-node-*.json")):
                failure = from_json(path.read_text(encoding="utf-8"))
                if failure is not None and failure.node_rank:
                    reports.append((failure.node_rank, failure))
        return reports

    def confirm_unable(self, agent: int) -> None:
        """Confirm to an agent that node 0 has read the agent's report: remove the report."""
        with suppress(OSError):
            self._unable_file(agent).unlink()

    def is_confirmed(self, agent: int) -> bool:
        """Return whether node 0 has read this agent's report."""
        names = names_in(self._folder.log_dir(self._attempt))
        # The folder always holds other files. So an empty listing has failed, and does not show that the
        # report is gone.
        return bool(names) and self._unable_file(agent).name not in names

    def _unable_file(self, agent: int) -> Path:
        return self._folder.unable_file(self._attempt, agent)

    def flush_newest(
        self, checkpoints: CheckpointService, *, states: bool = True, parts: bool = True
    ) -> None:
        """Write the newest checkpoint to disk if only the memory holds it; for attempts that did not finish.

        Args:
            checkpoints: the service that holds checkpoints in memory.
            states: whether this agent may write a checkpoint that its memory holds whole.
            parts: whether all nodes can write their parts of a sharded checkpoint.
        """

        def claim(step: int, is_part: bool) -> bool:
            # Each node writes its own part of a sharded checkpoint. One agent writes a whole checkpoint.
            if is_part:
                return parts
            return states and self._claim_save(step)

        try:
            step = checkpoints.flush_newest(self._folder.path, self._attempt, claim)
        except OSError as error:
            log_line(
                "the state in memory was not saved, so the run resumes from its last checkpoint on disk: "
                f"the checkpoints can't be listed ({error})"
            )
            return

        if step is not None:
            log_line(f"the state of step {step}, which only memory holds, is written to disk")

    def _claim_save(self, step: int) -> bool:
        """Claim the right to write a step's checkpoint to disk; return False if another agent has it.

        An error of the file system counts as a success: writing a checkpoint twice is better than not at all.
        """
        # mkdir is atomic: only one agent can create the folder.
        try:
            (self._folder.log_dir(self._attempt) / f"saving-{step}").mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            log_line(f"the save of step {step} was not claimed, so another node may save it, too: {error}")
        return True

    def failed(self, cause: Failure, restart_count: int | None = None) -> None:
        try:
            capture.record(self._folder, self._attempt, cause, restart_count=restart_count)
        except OSError as error:
            log_line(f"the failure was not recorded: {error}")

    def restarted(
        self, assignment: Assignment, before: Assignment, cause: Failure, step: int, silent_s: float
    ) -> None:
        facts: dict[str, object] = {}
        spares = [agent for agent in assignment.agents if agent not in before.agents]
        if spares:
            facts["spare"] = spares
        if len(assignment.agents) != len(before.agents):
            facts["nodes"] = len(assignment.agents)
        if step >= 0:
            facts["silent_s"] = round(silent_s, 3)

        reached = f"; they had completed step {step}" if step >= 0 else ""
        log_line(
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

    def slow(self, straggler: Straggler, restart_count: int) -> None:
        facts = {"rank": straggler.rank, "host": straggler.host, "text": straggler.line}
        self._add("straggler", restart_count=restart_count, **facts)

    def _add(self, event: str, **facts: object) -> None:
        try:
            # Once a later attempt has begun, only its agents write the event file of the run.
            if not self._folder.is_superseded(self._attempt):
                self._folder.add_event(event, attempt=self._attempt, **facts)
        except OSError as error:
            log_line(f"{event} was not recorded: {error}")

    def continue_without(self, agents: Collection[int]) -> None:
        if agents:
            self._add("continued", without=sorted(agents))
