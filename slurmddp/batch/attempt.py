"""One attempt of a run: its record, the traces that its agents left, and the settings of its run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.batch import outcome
from slurmddp.batch.progress import Saved, latest_name, progressed, saved
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, SlurmddpError
from slurmddp.runs.folder.fence import superseded
from slurmddp.runs.folder.layout import RunFolder

_LATE_S = (1, 2, 3)
"""Waits for a file that a shared filesystem shows late."""


class Settings(NamedTuple):
    """What the batch step needs to know of the job: `job.json`, written at submission."""

    name: str = ""
    """The job's name in the tokens of its submissions."""
    project: str = ""
    nodes: int = 1
    setup: bool = False
    """Whether the cluster file has setup lines."""
    checkpoints: str = ""
    """The files that the program saves beside the run folder's own, a glob."""
    exclude: str = ""
    """The nodes that a person excludes."""
    exclude_failed_h: int = 24
    saves_at_stop: bool = True
    """Whether the program is the built-in trainer, which saves at every stop and records its first step."""
    tolerates_node_loss: bool = False
    """Whether SLURM leaves the job alone when it loses a node."""
    signal_lead_s: int = 120
    grace_s: int | None = None
    requeue: bool = True
    max_restarts: int = 3
    max_requeues_without_progress: int = 3

    @property
    def policy(self) -> outcome.Policy:
        return outcome.Policy(self.requeue, self.max_restarts, self.max_requeues_without_progress)


def read_settings(folder: RunFolder) -> Settings:
    """Return the settings in `job.json`; keys that this version does not know are ignored."""
    found = json.loads(folder.job_file.read_text(encoding="utf-8"))
    return Settings(**{key: value for key, value in found.items() if key in Settings._fields})


def events_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the events of a run; empty if the record is damaged, so that a job can still end."""
    try:
        return folder.events()
    except (SlurmddpError, OSError):
        return []


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

    def start(self, node_list: str, restart_count: int) -> None:
        """Record the start, and what the run has saved by then."""
        found = {"time": int(time.time()), **self._saved()._asdict()}
        facts = {"restart_count": restart_count, "nodes": node_list, "launcher": "slurm"}
        with said_if_not_recorded("started", self.say):
            self._start_file.write_text(json.dumps(found) + "\n", encoding="utf-8")
            self.folder.add_event("started", attempt=self.number, job_id=self.job_id, **facts)

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

    @property
    def is_superseded(self) -> bool:
        return superseded(self.folder, self.number)

    def exit_code_of(self, node: int) -> int | None:
        """Return the exit code that the agent of a node left; None without one."""
        try:
            text = (self.log_dir / f"exit-node-{node}").read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return int(text) if text.isdigit() else None

    def common_exit_code(self, sleep: Callable[[float], None]) -> int | None:
        """Return 0 or 75 if every agent left with one of these, 75 if any did; None otherwise."""
        common = EXIT_FINISHED
        for node in range(self.settings.nodes):
            code = self._patient_exit_code_of(node, sleep)
            if code not in (EXIT_FINISHED, EXIT_STOPPED):
                # An agent that had not begun when a person stopped the run leaves no code.
                only_late = code is None and common == EXIT_STOPPED and self.folder.stop_file.exists()
                return common if only_late else None
            common = max(common, code)
            if self.settings.tolerates_node_loss:
                return common  # The first agent has heard of all others, and knows which were needed.
        return common

    def _patient_exit_code_of(self, node: int, sleep: Callable[[float], None]) -> int | None:
        for delay in _LATE_S:
            code = self.exit_code_of(node)
            if code is not None:
                return code
            sleep(delay)
        return self.exit_code_of(node)

    def recorded_failure(self) -> int | None:
        """Return the exit code in the record of the first failure, 0 without one; None without a record."""
        path = self.folder.failure_file(self.number)
        if not path.exists():
            return None
        try:
            code = json.loads(path.read_text(encoding="utf-8", errors="replace")).get("exit_code")
        except (OSError, ValueError, AttributeError):
            return 0
        return code if isinstance(code, int) else 0

    def silent_nodes(self, trace: str = "") -> list[int]:
        """Return the nodes whose agents left no exit code, and that have a file `TRACE-node-N` if asked."""
        return [
            node
            for node in range(self.settings.nodes)
            if not (self.log_dir / f"exit-node-{node}").exists()
            and (not trace or (self.log_dir / f"{trace}-node-{node}").exists())
        ]

    def note_lost_agents(self, hosts: list[str]) -> None:
        """Note the agents that began and left no exit code: they were killed, or their hosts are gone."""
        for node in self.silent_nodes():
            if not (self.log_dir / f"node-{node}.log").exists():
                continue
            host = hosts[node] if node < len(hosts) else ""
            self.say(f"The agent of node {node} ({host or 'unknown host'}) left no exit code.")
            self.note_lost(node, host)

    def note_lost(self, node: int, host: str) -> None:
        """Note for readers of the run that the agent of a node is gone."""
        with said_if_not_recorded("lost node", self.say):
            (self.log_dir / f"lost-node-{node}").write_text(f"{host}\n", encoding="utf-8")

    def end(self, code: int, fate: str, has_progressed: bool) -> outcome.End:
        """Return the end of this attempt, to be judged."""
        latest = latest_name(self.folder)
        events = events_of(self.folder)
        began = any(one.get("event") == "first_step" and one.get("attempt") == self.number for one in events)
        # A preemption may come while the training starts. The time limit has to leave the start enough time.
        at_limit = fate in (outcome.RUNNING, outcome.TIMEOUT)
        return outcome.End(
            code,
            fate,
            has_progressed,
            latest,
            trained=self.settings.saves_at_stop and (began or at_limit),
            cancelled=self.folder.cancelled_file.exists(),
            stop_asked=self.folder.stop_file.exists(),
        )

    def record_end(self, decision: outcome.Outcome, has_progressed: bool, *, refused: bool = False) -> None:
        """Append the `ended` event; `refused` says that SLURM neither put the job back nor took a new one."""
        facts: dict[str, Any] = {"exit_code": decision.code, "outcome": decision.outcome}
        if refused:
            facts["put_back"] = False  # Should SLURM start the job again after all, it goes on.
        facts["next"] = decision.next
        if decision.stalled_at is not None:
            facts["stalled_at"] = decision.stalled_at
        if decision.without_progress:
            facts["without_progress"] = decision.without_progress
        if has_progressed:
            facts["progressed"] = True
        with said_if_not_recorded("ended", self.say):
            self.folder.add_event("ended", attempt=self.number, job_id=self.job_id, **facts)
