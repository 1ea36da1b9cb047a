"""One attempt of a run: its records, and the settings of its run.

Three records tell how an attempt ended. Each has one writer and a fact that no other record holds:

- `failure.json`: the first failure. The agent that sees it first writes it, with or without a link to node 0.
- `exit-node-N`: the exit code of one agent. The agent writes it last, after its checkpoints.
- the event `ended`: the outcome, and the agents that were lost. The batch step writes it at the very end.

Node 0's agent can't write one record for all nodes. It leaves first, and the other agents follow it, so it
never learns whether they came to their ends. The batch step must know. An agent without an exit code was
killed, or its host failed. And the watch ends srun a minute after the last agent has left, but gives an agent
that may still write a checkpoint twenty minutes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.batch import event_command, requeue_policy
from slurmddp.batch.event_command import EventCommands
from slurmddp.batch.progress import Saved, latest_name, progressed, saved
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED
from slurmddp.runs.folder.late_files import is_there, look_again, names_in, read_text
from slurmddp.runs.folder.layout import RunFolder

_LATE_S = (1, 2, 3)
"""Waits for a file that a shared filesystem shows late."""


class Settings(NamedTuple):
    """The facts and rules of a job that the batch step follows: `job.json`, written at submission."""

    name: str
    """The job's name in the tokens of its submissions."""
    project: str
    nodes: int
    setup: bool
    """Whether the cluster file has setup lines."""
    checkpoints: str
    """The files that the program saves beside the run folder's own, a glob."""
    exclude: str
    """The nodes that a person excludes."""
    exclude_failed_h: int
    saves_at_stop: bool
    """Whether the program is the built-in trainer, which saves at every stop and records its first step."""
    tolerates_node_loss: bool
    """Whether SLURM leaves the job alone when it loses a node."""
    signal_lead_s: int
    grace_s: int | None
    requeue: bool
    max_restarts: int
    max_requeues_without_progress: int
    on_event: Sequence[str]
    """The command that gets the events of the run."""
    python: str
    """The interpreter of the ranks."""
    stage: str
    """The folder on each node's own disk for a copy of the environment; empty: no copy."""
    unset: Sequence[str]
    """Variables with options of another job that has submitted this one."""


def read_settings(folder: RunFolder) -> Settings:
    """Return the settings in `job.json`; keys that this version does not know are ignored."""
    names_in(folder.path)  # This host may remember the file of an earlier submission, which is gone.
    found = json.loads(folder.job_file.read_text(encoding="utf-8"))
    return Settings(**{key: value for key, value in found.items() if key in Settings._fields})


@contextmanager
def said_if_not_recorded(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say that a record can't be written, on a full disk for example; nothing else follows from that."""
    try:
        yield
    except OSError as error:
        say(f"{what} was not recorded: {error}")


class Attempt:
    """An attempt that has been claimed."""

    def __init__(
        self, folder: RunFolder, number: int, settings: Settings, job_id: str, say: Callable[[str], None]
    ) -> None:
        self.folder, self.number, self.settings, self.job_id = folder, number, settings, job_id
        self.say = say
        self.log_dir = folder.log_dir(number)
        self._start_file = self.log_dir / "start.json"
        self.commands = EventCommands(folder, settings.on_event, Path(settings.project), say)

    def start(self, node_list: str, restart_count: int) -> None:
        """Record the start, and what the run has saved by then."""
        found = {"time": int(time.time()), **self._saved()._asdict()}
        facts = {"restart_count": restart_count, "nodes": node_list, "launcher": "slurm"}
        with said_if_not_recorded("started", self.say):
            self._start_file.write_text(json.dumps(found) + "\n", encoding="utf-8")
            self.folder.add_event("started", attempt=self.number, job_id=self.job_id, **facts)
        self.commands.start("started", self.number, job_id=self.job_id, **facts)

    def _saved(self) -> Saved:
        return saved(self.folder, Path(self.settings.project), self.settings.checkpoints)

    def _found(self) -> dict[str, Any]:
        try:
            found = json.loads(self._start_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def began(self) -> float:
        """When the attempt began, in epoch seconds."""
        return float(self._found().get("time", 0))

    def has_progressed(self) -> bool:
        """Return whether the run has saved anything new since the start."""
        found = self._found()
        return progressed(Saved(found.get("step", 0), found.get("files", "")), self._saved())

    def exit_code_of(self, node: int) -> int | None:
        """Return the exit code that the agent of a node left; None without one."""
        return self.folder.exit_code_of(self.number, node)

    def common_exit_code(self, sleep: Callable[[float], None]) -> int | None:
        """Return 0 or 75 if every agent left with one of these, 75 if any did; None otherwise."""
        common = EXIT_FINISHED
        for node in range(self.settings.nodes):
            code = self._patient_exit_code_of(node, sleep)
            if code not in (EXIT_FINISHED, EXIT_STOPPED):
                # An agent that had not begun when a person stopped the run leaves no code.
                only_late = code is None and common == EXIT_STOPPED and self.folder.is_stopped
                return common if only_late else None
            common = max(common, code)
            if self.settings.tolerates_node_loss:
                return common  # The first agent has heard of all others, and knows which were needed.
        return common

    def _patient_exit_code_of(self, node: int, sleep: Callable[[float], None]) -> int | None:
        for delay in _LATE_S:
            look_again(self.log_dir)
            code = self.exit_code_of(node)
            if code is not None:
                return code
            sleep(delay)
        look_again(self.log_dir)
        return self.exit_code_of(node)

    def recorded_failure(self) -> int | None:
        """Return the exit code in the record of the first failure, 0 without one; None without a record."""
        if not is_there(self.folder.failure_file(self.number)):
            return None
        code = self._failure().get("exit_code")
        return code if isinstance(code, int) else 0

    def _failure(self) -> dict[str, Any]:
        """Return the record of the first failure; empty without a record, or if it is not whole."""
        try:
            failure = json.loads(read_text(self.folder.failure_file(self.number)) or "")
        except ValueError:
            return {}
        return failure if isinstance(failure, dict) else {}

    def silent_nodes(self) -> list[int]:
        """Return the nodes whose agents left no exit code."""
        return self.folder.silent_nodes(self.number, self.settings.nodes)

    def replaced_nodes(self) -> list[int]:
        """Return the silent nodes without which node 0's agent let the ranks continue."""
        without = {node for event in self._events("continued") for node in event["without"]}
        return [node for node in self.silent_nodes() if node in without]

    def lost_agents(self, hosts: Sequence[str]) -> dict[int, str]:
        """Return the host of each agent that began and left no exit code, by node; empty if not known.

        Such an agent was killed, or its host is gone.
        """
        names = names_in(self.log_dir)
        began = self.folder.node_log
        lost = [node for node in self.silent_nodes() if began(self.number, node).name in names]
        return {node: hosts[node] if node < len(hosts) else "" for node in lost}

    def _events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind since this attempt started; deleted logs may have had its number."""
        events = [event for event in self.folder.readable_events() if event.get("attempt") == self.number]
        starts = [at for at, one in enumerate(events) if one.get("event") == "started"]
        return [one for one in events[max(starts, default=0) :] if one.get("event") == kind]

    def recorded_end(self) -> requeue_policy.Outcome | None:
        """Return the outcome in the `ended` event of this attempt; None without the event."""
        ended = self._events("ended")
        if not ended:
            return None
        end = ended[-1]
        return requeue_policy.Outcome(
            str(end.get("outcome")), str(end.get("next")), int(end.get("exit_code") or 0)
        )

    def decide(
        self, code: int, fate: str, has_progressed: bool, *, near_limit: bool = False
    ) -> requeue_policy.Outcome:
        """Return what the end of this attempt means.

        Args:
            code: the exit code of the attempt.
            fate: the job's state for SLURM.
            has_progressed: whether the run has saved anything new since the start.
            near_limit: whether SLURM had sent the signal for the time limit.
        """
        # A preemption may come while the training starts. The time limit has to leave the start enough time.
        at_limit = fate in (requeue_policy.RUNNING, requeue_policy.TIMEOUT)
        end = requeue_policy.End(
            code,
            fate,
            has_progressed,
            latest_name(self.folder),
            trained=self.settings.saves_at_stop and (at_limit or bool(self._events("first_step"))),
            cancelled=self.folder.is_cancelled,
            stop_asked=self.folder.is_stopped,
            names_files=bool(self.settings.checkpoints),
            near_limit=near_limit,
            failed_at_stop=bool(self._failure().get("asked_to_stop")),
        )
        return requeue_policy.decide(
            end, requeue_policy.count_all(self.folder.readable_events()), self.settings
        )

    def record_end(
        self,
        decision: requeue_policy.Outcome,
        has_progressed: bool,
        *,
        lost: Mapping[int, str],
        is_revised: bool = False,
    ) -> None:
        """Append the `ended` event.

        Args:
            decision: what the end means.
            has_progressed: whether the run has saved anything new since the start.
            lost: the hosts of lost agents, by node.
            is_revised: whether this attempt has an `ended` event already, and nothing starts the run again.
        """
        facts: dict[str, Any] = {"exit_code": decision.code, "outcome": decision.outcome}
        if is_revised:
            facts["requeued"] = False  # Should SLURM start the job again after all, the run goes on.
        facts["next"] = decision.next
        if decision.reason:
            facts["reason"] = decision.reason
        if decision.stalled_at is not None:
            facts["stalled_at"] = decision.stalled_at
        if decision.without_progress:
            facts["without_progress"] = decision.without_progress
        if has_progressed:
            facts["progressed"] = True
        if lost:
            facts["lost"] = lost
        with said_if_not_recorded("ended", self.say):
            self.folder.add_event("ended", attempt=self.number, job_id=self.job_id, **facts)
        kind = event_command.kind_of_end(decision.outcome, decision.next)
        self.commands.start(kind, self.number, job_id=self.job_id, **facts)
