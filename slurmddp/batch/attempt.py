"""One attempt of a run: its records, and the settings of its run.

Three records show how an attempt ended. Each has one writer and holds a fact that no other record holds:

- `failure.json`: the first failure. The agent that sees it first writes it, with or without a link to node 0.
- `exit-node-N`: the exit code of one agent. The agent writes it last, after its checkpoints.
- the event `ended`: the outcome, and the lost agents. The batch step writes it at the very end.

The agent of node 0 can't write one record for all nodes: it exits before the other agents, so it never learns
their exit codes. The batch step needs these codes. An agent without an exit code was killed, or its host
failed. Or the agent may still be writing a checkpoint: so the watch over srun waits twenty minutes if a code
is missing, but only one minute if all agents have recorded their codes.
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
"""Pauses, in seconds, between reads of a file that a shared file system may show late."""


class BatchSettings(NamedTuple):
    """The settings of the batch step, read from the file `job.json` that the submission wrote."""

    name: str
    """The name of the run's SLURM jobs, which is also part of the token of each submission."""
    project: str
    """The project folder."""
    nodes: int
    """The number of nodes, spare nodes included."""
    setup: bool
    """Whether the cluster file has setup lines."""
    checkpoints: str
    """A glob of the files that the program saves outside the run folder's own checkpoints; may be empty."""
    exclude: str
    """The nodes that the cluster file excludes, as a host list."""
    exclude_failed_h: int
    saves_at_stop: bool
    """Whether the program is the built-in trainer, which saves at every stop and records its first step."""
    tolerates_node_loss: bool
    """Whether the job continues when it loses a node (`--no-kill`)."""
    signal_lead_s: int
    grace_s: int | None
    requeue: bool
    max_restarts: int
    max_requeues_without_progress: int
    on_event: Sequence[str]
    """The command of `policy.on_event`: the program and its arguments; may be empty."""
    python: str
    """The interpreter of the ranks."""
    stage: str
    """The folder on each node's own disk for a copy of the environment; empty: no copy."""
    unset: Sequence[str]
    """Names of variables to unset: if another job submitted this job, they hold options of the other job."""


def read_settings(folder: RunFolder) -> BatchSettings:
    """Return the settings in `job.json`; ignore keys that this version does not know."""
    # A host that ran an earlier job of the run may still show the old file; listing the folder corrects that.
    names_in(folder.path)

    values = json.loads(folder.job_file.read_text(encoding="utf-8"))
    known = {key: value for key, value in values.items() if key in BatchSettings._fields}
    return BatchSettings(**known)


@contextmanager
def log_write_error(what: str, log: Callable[[str], None]) -> Iterator[None]:
    """Suppress an OSError of the `with` block, such as a full disk, and log that `what` was not recorded."""
    try:
        yield
    except OSError as error:
        log(f"{what} was not recorded: {error}")


class Attempt:
    """A claimed attempt of a run: reads and writes its records, and decides its outcome."""

    def __init__(
        self, folder: RunFolder, number: int, settings: BatchSettings, job_id: str, log: Callable[[str], None]
    ) -> None:
        """Store the identity of the attempt; read and write no file.

        Args:
            folder: the run folder.
            number: the number of the attempt.
            settings: the settings of the run.
            job_id: the id of the job that runs the attempt.
            log: called with each line for the log of the batch step.
        """
        self.folder = folder
        self.number = number
        self.settings = settings
        self.job_id = job_id
        self.log = log
        self.log_dir = folder.log_dir(number)
        self.commands = EventCommands(folder, settings.on_event, Path(settings.project), log)
        self._start_file = self.log_dir / "start.json"

    def start(self, node_list: str, restart_count: int) -> None:
        """Write `start.json` and the event `started`, and run the command of `policy.on_event`.

        `start.json` holds the start time and the newest checkpoint, for the comparison by `has_progressed`.

        Args:
            node_list: the nodes of the job, as a host list.
            restart_count: the number of requeues before this start of the job.
        """
        start = {"time": int(time.time()), **self._saved()._asdict()}
        facts = {"restart_count": restart_count, "nodes": node_list, "launcher": "slurm"}
        with log_write_error("The event `started`", self.log):
            self._start_file.write_text(json.dumps(start) + "\n", encoding="utf-8")
            self.folder.add_event("started", attempt=self.number, job_id=self.job_id, **facts)

        self.commands.start("started", self.number, job_id=self.job_id, **facts)

    def _saved(self) -> Saved:
        return saved(self.folder, Path(self.settings.project), self.settings.checkpoints)

    def _read_start(self) -> dict[str, Any]:
        """Return the content of `start.json`; empty if the file is missing or damaged."""
        try:
            start = json.loads(self._start_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return start if isinstance(start, dict) else {}

    @property
    def start_time(self) -> float:
        """The start of the attempt in epoch seconds; 0 if no start was recorded."""
        return float(self._read_start().get("time", 0))

    def has_progressed(self) -> bool:
        """Decide whether the run has a newer checkpoint or newly saved files since the attempt started."""
        start = self._read_start()
        return progressed(Saved(start.get("step", 0), start.get("files", "")), self._saved())

    def exit_code_of(self, node: int) -> int | None:
        """Return the exit code that the agent of a node has recorded; None if it has recorded none."""
        return self.folder.exit_code_of(self.number, node)

    def common_exit_code(self, sleep: Callable[[float], None]) -> int | None:
        """Combine the exit codes of all agents.

        Args:
            sleep: a function that waits for a number of seconds.

        Returns:
            0 if all agents recorded 0; 75 if at least one recorded 75 and the others 0; None otherwise. Only
            the agent of node 0 counts if the job tolerates the loss of nodes.
        """
        common = EXIT_FINISHED
        for node in range(self.settings.nodes):
            code = self._await_exit_code(node, sleep)
            if code not in (EXIT_FINISHED, EXIT_STOPPED):
                # An agent that had not started when a person stopped the run records no code. The attempt
                # counts as stopped all the same.
                is_late = code is None and common == EXIT_STOPPED and self.folder.is_stopped
                return common if is_late else None

            common = max(common, code)
            # If nodes may be lost, node 0's code is enough: its agent knows which other agents were needed.
            if self.settings.tolerates_node_loss:
                return common

        return common

    def _await_exit_code(self, node: int, sleep: Callable[[float], None]) -> int | None:
        """Return the exit code of a node's agent; None if no code is recorded within six seconds.

        A shared file system may show the file with the code late.
        """
        for delay in _LATE_S:
            look_again(self.log_dir)
            code = self.exit_code_of(node)
            if code is not None:
                return code
            sleep(delay)

        look_again(self.log_dir)
        return self.exit_code_of(node)

    def recorded_failure(self) -> int | None:
        """Return the exit code in `failure.json`, 0 if it holds no code; None without this file."""
        if not is_there(self.folder.failure_file(self.number)):
            return None
        code = self._failure().get("exit_code")
        return code if isinstance(code, int) else 0

    def _failure(self) -> dict[str, Any]:
        """Return the content of `failure.json`; empty if the file is missing or damaged."""
        try:
            failure = json.loads(read_text(self.folder.failure_file(self.number)) or "")
        except ValueError:
            return {}
        return failure if isinstance(failure, dict) else {}

    def silent_nodes(self) -> list[int]:
        """Return the indexes of the nodes whose agents recorded no exit code."""
        return self.folder.silent_nodes(self.number, self.settings.nodes)

    def replaced_nodes(self) -> list[int]:
        """Return the indexes of the nodes without an exit code that a restart of the ranks left out."""
        without = {node for event in self._events("continued") for node in event["without"]}
        return [node for node in self.silent_nodes() if node in without]

    def lost_agents(self, hosts: Sequence[str]) -> dict[int, str]:
        """Return the host of each agent that started but recorded no exit code, by node index.

        Such an agent was killed, or its host failed. A node whose index is beyond `hosts` gets an empty name.
        """
        names = names_in(self.log_dir)
        lost = [node for node in self.silent_nodes() if self.folder.node_log(self.number, node).name in names]
        return {node: hosts[node] if node < len(hosts) else "" for node in lost}

    def _events(self, kind: str) -> list[dict[str, Any]]:
        """Return this attempt's events of one kind, such as `ended`, since the attempt started."""
        events = [event for event in self.folder.readable_events() if event.get("attempt") == self.number]
        # If a person deletes the logs of an attempt, a later attempt gets the same number. So only the events
        # since the newest start count.
        starts = [index for index, event in enumerate(events) if event.get("event") == "started"]
        newest = events[max(starts, default=0) :]
        return [event for event in newest if event.get("event") == kind]

    def recorded_end(self) -> requeue_policy.Outcome | None:
        """Return the outcome in the `ended` event of this attempt; None without the event."""
        ends = self._events("ended")
        if not ends:
            return None

        end = ends[-1]
        return requeue_policy.Outcome(
            str(end.get("outcome")), str(end.get("next")), int(end.get("exit_code") or 0)
        )

    def decide(
        self, code: int, job_state: str, has_progressed: bool, *, near_limit: bool = False
    ) -> requeue_policy.Outcome:
        """Decide the outcome of this attempt, and whether the run starts again.

        Args:
            code: the exit code of the attempt.
            job_state: the state of the job: one of the names in `requeue_policy`.
            has_progressed: whether the run has saved anything new since the attempt started.
            near_limit: whether SLURM had sent the signal that precedes the time limit.
        """
        # `trained` decides whether a stop without progress counts against the run. A preemption may come
        # before the first step, so it counts only after the event `first_step`. A time limit always counts,
        # because it has to be long enough for the first step.
        at_limit = job_state in (requeue_policy.RUNNING, requeue_policy.TIMEOUT)
        end = requeue_policy.End(
            code,
            job_state,
            has_progressed,
            latest_name(self.folder),
            trained=self.settings.saves_at_stop and (at_limit or bool(self._events("first_step"))),
            cancelled=self.folder.is_cancelled,
            stop_asked=self.folder.is_stopped,
            names_files=bool(self.settings.checkpoints),
            near_limit=near_limit,
            failed_at_stop=bool(self._failure().get("asked_to_stop")),
        )
        counts = requeue_policy.count_all(self.folder.readable_events())
        return requeue_policy.decide(end, counts, self.settings)

    def record_end(
        self,
        outcome: requeue_policy.Outcome,
        has_progressed: bool,
        *,
        lost: Mapping[int, str],
        is_revised: bool = False,
    ) -> None:
        """Append the event `ended` to the events of the run.

        Args:
            outcome: the outcome of the attempt.
            has_progressed: whether the run has saved anything new since the attempt started.
            lost: the hosts of lost agents, by node index.
            is_revised: whether the event corrects an earlier `ended` event, because SLURM refused to run the
                job again.
        """
        facts: dict[str, Any] = {"exit_code": outcome.code, "outcome": outcome.outcome}
        # For `begin` a run with this field is not over: if SLURM starts the job again after all, the run
        # continues.
        if is_revised:
            facts["requeued"] = False
        facts["next"] = outcome.next
        if outcome.reason:
            facts["reason"] = outcome.reason
        if outcome.stalled_at is not None:
            facts["stalled_at"] = outcome.stalled_at
        if outcome.without_progress:
            facts["without_progress"] = outcome.without_progress
        if has_progressed:
            facts["progressed"] = True
        if lost:
            facts["lost"] = lost

        with log_write_error("The event `ended`", self.log):
            self.folder.add_event("ended", attempt=self.number, job_id=self.job_id, **facts)

        kind = event_command.kind_of_end(outcome.outcome, outcome.next)
        self.commands.start(kind, self.number, job_id=self.job_id, **facts)
