"""Keep the next attempts away from nodes that failed, where the cluster has others."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmddp.batch.attempt import Settings, said_if_not_recorded
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.runs.folder.excluded_nodes import adopt, exclude, excluded_nodes, share, shared_nodes
from slurmddp.runs.folder.late_files import read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.command_output import parse_time

_FAILED = re.compile(r"(?:^|\+)(?:DOWN|FAIL|ERROR|NOT_RESPONDING)(?:[*+]|$)|\*")
_LOST = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_SOON_S = 300.0
"""An attempt leaves a failed node only for others that it gets within this time."""
_TRIES = 5
"""The most requests for one exclusion while SLURM can't take it yet."""


def lost_nodes(batch_log: Path) -> set[str]:
    """Return the nodes that SLURM gave up, according to srun's messages in `batch_log`."""
    text = read_text(batch_log) or ""
    return {name for names in _LOST.findall(text) for name in hosts_of(names)}


class Exclusions:
    """The nodes that the next attempts avoid: noted in the run folder, then sent to SLURM."""

    def __init__(self, folder: RunFolder, job: SlurmJob, settings: Settings, *, began: float) -> None:
        """Prepare the exclusions of a run.

        Args:
            folder: the run folder.
            job: the job that runs now.
            settings: the rules of the run.
            began: when the attempt began, in epoch seconds; the nodes noted since then are the newest.
        """
        self.failed: set[str] = set()
        """The nodes that failed under the attempt."""
        self.choice = ""
        """The nodes that the next attempt must not get."""
        self._folder, self._job, self._began = folder, job, began
        self._hours, self._by_person = settings.exclude_failed_h, settings.exclude
        self._is_sent = False

    @property
    def _any(self) -> bool:
        return self._hours > 0 and bool(read_text(self._folder.excluded_file))

    def note_failed(
        self,
        node_list: str,
        *,
        began: float,
        batch_log: Path,
        silent: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> bool:
        """Note the nodes of an attempt that failed under it; return whether any was noted.

        Args:
            node_list: the attempt's nodes.
            began: when the attempt began, in epoch seconds.
            batch_log: the log of the attempt's batch script.
            silent: nodes whose agents left no exit code; the batch step probes them.
            replaced: nodes without which the attempt continued.
        """
        nodes, lost = self._job.nodes(node_list), lost_nodes(batch_log)
        unanswering = self._job.unanswering([one for one in nodes if one["NodeName"] in silent])
        noted = False
        for node in nodes:
            name, state = node["NodeName"], node.get("State", "")
            if _FAILED.search(state):
                why = f"SLURM calls it {state}"
            elif name in lost:
                why = "SLURM gave it up"
            elif name in silent and (parse_time(node.get("SlurmdStartTime", "")) or 0.0) > began:
                why = "it was started again"
            elif name in replaced:
                why = "the run lost it"
            elif name in unanswering:
                why = "it does not answer"
            else:
                continue
            noted |= self._note(name, why, began)
        self._exchange(began)
        return noted

    def _exchange(self, began: float) -> None:
        """Share the nodes that failed under this attempt, and adopt those of other runs on this cluster."""
        if self._hours <= 0 or not (self._any or shared_nodes()):
            return
        cluster = self._job.environ.get("SLURM_CLUSTER_NAME") or self._job.config("ClusterName")
        if cluster:
            with said_if_not_recorded("The shared list of failed nodes", self._job.say):
                share(self._folder, cluster, since=began)
                adopt(self._folder, cluster)

    def _note(self, node: str, why: str, began: float) -> bool:
        self.failed.add(node)
        if self._hours <= 0 or node in excluded_nodes(self._folder, since=began):
            return False  # Noted for the same attempt.
        self._job.say(f"Node {node} has failed: {why}.")
        with said_if_not_recorded(f"node {node}", self._job.say):
            exclude(self._folder, node, why, hours=self._hours)
            return True
        return False  # A note that can't be written would be new at each start, and requeue the job for ever.

    def _chosen_by_person(self) -> set[str]:
        asked = set(hosts_of(self._job.facts.get("ExcNodeList", "")))
        own = set() if "/" in self._by_person else set(hosts_of(self._by_person))
        return asked - set(excluded_nodes(self._folder, now=0.0)) | own

    def choose(self) -> None:
        """Choose all failed nodes, or the newest, or none, as the cluster can spare them."""
        if not self._any:
            return
        own, answer, failed = self._chosen_by_person(), "", ""
        for since in (0.0, self._began):
            found = excluded_nodes(self._folder, since=since)
            failed, self.choice = ",".join(found), ",".join(sorted(own.union(found)))
            if not found:
                return
            tried = self._job.sbatch("--test-only", f"--exclude={self.choice}", str(self._folder.script_file))
            if tried.code == 0:
                return
            answer = (tried.err.strip() or tried.out.strip()).rpartition("\n")[2]
        self.choice = ",".join(sorted(own))
        self._job.say(
            f"The next attempt may run on {failed} again: SLURM would not take the job without ({answer})."
        )

    def send(self) -> None:
        """Send the choice to SLURM, which takes it only while the job is pending."""
        if not self._any or self._is_sent:
            return
        known = self._job.facts.get("ExcNodeList", "")
        if known == self.choice or (known == "(null)" and not self.choice):
            return
        for _ in range(_TRIES):
            answer = self._job.scontrol("update", f"JobId={self._job.id}", f"ExcNodeList={self.choice}")
            if answer.code == 0 or not answer.is_retryable:
                break
            self._job.sleep(1)  # Just after a requeue, SLURM's accounting may hold the job's record.
        if answer.code == 0:
            self._is_sent = True
            self._job.say(f"The next attempt runs on other nodes than {self.choice or '(none)'}.")
        else:
            self._job.say(answer.err.strip())
            self._job.say(f"SLURM does not let this job exclude {self.choice or 'no node'}.")

    def others_are_free(self) -> bool:
        """Return whether the job got a failed node, may be requeued, and would soon get others instead."""
        mine, noted = self._job.hosts, excluded_nodes(self._folder, now=self._began)
        bad = set(mine) & set(noted)
        if not bad or self._job.poll().code or self._job.facts.get("Requeue") != "1":
            return False
        away = ",".join(sorted({*self._chosen_by_person(), *noted, *mine}))
        tried = self._job.sbatch(
            "--test-only", f"--nodes={len(bad)}", f"--exclude={away}", str(self._folder.script_file)
        )
        start = re.search(r" to start at (\S+) ", tried.out + tried.err)
        begin = parse_time(start[1]) if start else None
        return begin is not None and begin <= self._began + _SOON_S


def note_vanished(exclusions: Exclusions, folder: RunFolder, events: Sequence[Mapping[str, Any]]) -> bool:
    """Note failed nodes of an attempt without an `ended` event: its first host may be gone."""
    told = [one for one in events if one.get("event") in ("started", "ended")]
    if not told or told[-1]["event"] == "ended":
        return False
    attempt, began, nodes = told[-1].get("attempt"), told[-1].get("time"), str(told[-1].get("nodes") or "")
    if not isinstance(attempt, int) or not isinstance(began, (int, float)) or not nodes:
        return False
    log = folder.batch_log(attempt)
    return exclusions.note_failed(nodes, began=int(began), batch_log=log, silent=hosts_of(nodes)[:1])
