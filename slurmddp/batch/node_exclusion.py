"""Keep the next attempts away from nodes that failed, if the cluster has other nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmddp.batch.attempt import BatchSettings, log_write_error
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.runs.folder.excluded_nodes import adopt, exclude, excluded_nodes, share, shared_nodes
from slurmddp.runs.folder.late_files import read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.command_output import parse_time

_FAILED = re.compile(r"(?:^|\+)(?:DOWN|FAIL|ERROR|NOT_RESPONDING)(?:[*+]|$)|\*")
"""States of a node that has failed. SLURM marks a node that does not respond by a star (sinfo(1))."""
_LOST = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_SOON_S = 300.0
"""A job leaves a failed node only if SLURM can start the job on other nodes within this many seconds."""
_TRIES = 5
"""The largest number of requests to SLURM to exclude nodes; SLURM may refuse the first for a moment."""


def lost_nodes(batch_log: Path) -> set[str]:
    """Return the nodes whose failure srun has reported in `batch_log`."""
    text = read_text(batch_log) or ""
    return {name for names in _LOST.findall(text) for name in hosts_of(names)}


class Exclusions:
    """Records a run's failed nodes in the run folder, and sets them as the job's excluded nodes."""

    def __init__(
        self, folder: RunFolder, job: SlurmJob, settings: BatchSettings, *, start_time: float
    ) -> None:
        """Store the settings that decide which nodes are excluded; record nothing yet.

        Args:
            folder: the run folder.
            job: the job that runs now.
            settings: the settings of the run.
            start_time: the start of the attempt, in epoch seconds; nodes that were recorded later failed
                during this attempt.
        """
        self.failed: set[str] = set()
        """The nodes that failed during the attempt."""
        self.choice = ""
        """The nodes that the next attempt must not get, separated by commas."""
        self._folder = folder
        self._job = job
        self._start_time = start_time
        self._hours = settings.exclude_failed_h
        self._by_person = settings.exclude
        self._is_sent = False

    @property
    def _has_notes(self) -> bool:
        """Whether failed nodes are recorded and `policy.exclude_failed_h` is above 0."""
        return self._hours > 0 and bool(read_text(self._folder.excluded_file))

    def note_failed(
        self,
        node_list: str,
        *,
        start_time: float,
        batch_log: Path,
        silent: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> bool:
        """Record the nodes that failed during an attempt; return whether any of the records is new.

        Args:
            node_list: the nodes of the attempt, as a host list.
            start_time: the start of the attempt, in epoch seconds.
            batch_log: the log of the attempt's batch script.
            silent: names of the nodes whose agents recorded no exit code; each counts as failed if its slurmd
                accepts no connection.
            replaced: names of the nodes without which the attempt continued.
        """
        nodes = self._job.nodes(node_list)
        lost = lost_nodes(batch_log)
        unanswering = self._job.unanswering([node for node in nodes if node["NodeName"] in silent])

        is_noted = False
        for node in nodes:
            name = node["NodeName"]
            state = node.get("State", "")
            if _FAILED.search(state):
                reason = f"SLURM shows its state as {state}"
            elif name in lost:
                reason = "srun reported its failure"
            elif name in silent and (parse_time(node.get("SlurmdStartTime", "")) or 0.0) > start_time:
                reason = "its slurmd has restarted since the attempt started"
            elif name in replaced:
                reason = "the ranks continued without it"
            elif name in unanswering:
                reason = "its slurmd does not answer"
            else:
                continue
            is_noted |= self._note(name, reason, start_time)

        self._exchange(start_time)
        return is_noted

    def _exchange(self, start_time: float) -> None:
        """Exchange the failed nodes of this cluster between the run and the list that all runs share."""
        if self._hours <= 0 or not (self._has_notes or shared_nodes()):
            return

        cluster = self._job.environ.get("SLURM_CLUSTER_NAME") or self._job.config("ClusterName")
        if cluster:
            with log_write_error("The shared list of failed nodes", self._job.log):
                share(self._folder, cluster, since=start_time)
                adopt(self._folder, cluster)

    def _note(self, node: str, reason: str, start_time: float) -> bool:
        """Record a failed node; return whether a new record was written."""
        self.failed.add(node)
        if self._hours <= 0 or node in excluded_nodes(self._folder, since=start_time):
            return False

        self._job.log(f"Node {node} has failed: {reason}.")
        with log_write_error(f"The failed node {node}", self._job.log):
            exclude(self._folder, node, reason, hours=self._hours)
            return True
        # A record that can't be written must not count: it would be new at each start, and `begin` would
        # requeue the job for ever.
        return False

    def _chosen_by_person(self) -> set[str]:
        """Return the nodes that a person excludes by the cluster file or by an option of sbatch."""
        # ExcNodeList also holds the nodes that earlier attempts have excluded, so these nodes are subtracted.
        asked_for = set(hosts_of(self._job.facts.get("ExcNodeList", "")))
        by_person = asked_for - set(excluded_nodes(self._folder, now=0.0))

        # For sbatch a value with a slash is the name of a file with nodes; that file is not read here.
        if "/" not in self._by_person:
            by_person.update(hosts_of(self._by_person))
        return by_person

    def choose(self) -> None:
        """Set `choice` to as many failed nodes as SLURM would accept: all, those of this attempt, or none.

        The nodes that a person excludes are always part of `choice`.
        """
        if not self._has_notes:
            return

        by_person = self._chosen_by_person()
        failed: list[str] = []
        refusal = ""
        for since in (0.0, self._start_time):
            newer = excluded_nodes(self._folder, since=since)
            self.choice = ",".join(sorted(by_person.union(newer)))
            if not newer:
                return

            failed = newer
            reply = self._job.sbatch("--test-only", f"--exclude={self.choice}", str(self._folder.script_file))
            if reply.code == 0:
                return
            refusal = (reply.err.strip() or reply.out.strip()).rpartition("\n")[2]

        self.choice = ",".join(sorted(by_person))
        self._job.log(
            f"The next attempt may run on {','.join(failed)} again: SLURM would refuse a job that excludes "
            f"these failed nodes ({refusal})."
        )

    def send(self) -> None:
        """Set the job's ExcNodeList to `choice`; SLURM accepts the change only while the job is pending."""
        if not self._has_notes or self._is_sent:
            return
        current = self._job.facts.get("ExcNodeList", "")
        if current == self.choice or (current == "(null)" and not self.choice):
            return

        for _ in range(_TRIES):
            reply = self._job.scontrol("update", f"JobId={self._job.id}", f"ExcNodeList={self.choice}")
            if reply.code == 0 or not reply.is_retryable:
                break
            # Just after a requeue SLURM may refuse the change for a moment, because its accounting uses the
            # job's record.
            self._job.sleep(1)

        if reply.code == 0:
            self._is_sent = True
            if self.choice:
                self._job.log(f"The next attempt runs on other nodes than {self.choice}.")
            else:
                self._job.log("The next attempt may run on all nodes.")
        else:
            self._job.log(reply.err.strip())
            self._job.log(
                f"SLURM refused to set the excluded nodes of this job to {self.choice or '(none)'}."
            )

    def others_are_free(self) -> bool:
        """Decide whether a requeue would replace the job's failed nodes within `_SOON_S` seconds."""
        hosts = self._job.hosts
        noted = excluded_nodes(self._folder, now=self._start_time)
        failed = set(hosts) & set(noted)
        if not failed or self._job.poll().code or self._job.facts.get("Requeue") != "1":
            return False

        excluded = ",".join(sorted({*self._chosen_by_person(), *noted, *hosts}))
        reply = self._job.sbatch(
            "--test-only",
            f"--nodes={len(failed)}",
            f"--exclude={excluded}",
            str(self._folder.script_file),
        )
        match = re.search(r" to start at (\S+) ", reply.out + reply.err)
        start = parse_time(match[1]) if match else None
        return start is not None and start <= self._start_time + _SOON_S


def note_vanished(exclusions: Exclusions, folder: RunFolder, events: Sequence[Mapping[str, Any]]) -> bool:
    """Record the failed nodes of the last attempt if it has no event `ended`; return whether a record is new.

    The batch script of such an attempt is gone, perhaps because the job's first node, on which it ran, has
    failed.
    """
    turns = [event for event in events if event.get("event") in ("started", "ended")]
    if not turns or turns[-1]["event"] == "ended":
        return False

    start = turns[-1]
    attempt = start.get("attempt")
    start_time = start.get("time")
    node_list = str(start.get("nodes") or "")
    if not isinstance(attempt, int) or not isinstance(start_time, (int, float)) or not node_list:
        return False

    return exclusions.note_failed(
        node_list,
        start_time=int(start_time),
        batch_log=folder.batch_log(attempt),
        silent=hosts_of(node_list)[:1],
    )
