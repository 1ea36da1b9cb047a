"""A SLURM in memory, for tests of everything above the client."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmddp.errors import SlurmError
from slurmddp.slurm.command_output import parse_run
from slurmddp.slurm.job_script import script_of
from slurmddp.slurm.limits.partitions import Partition
from slurmddp.slurm.states import JobState, parse_state


@dataclass(frozen=True)
class Submission:
    """A submission that was accepted, with its arguments."""

    job_id: str
    script: str
    token: str
    options: tuple[str, ...]
    path: Path = Path()
    """The path of the script at the submission."""


@dataclass
class FakeSlurm:
    """A client that behaves as `SlurmClient` on a real SLURM; both pass the same contract tests."""

    site: dict[str, Partition] = field(default_factory=dict)
    refusal: str = ""
    """SLURM's refusal of every submission; empty: it accepts them."""
    largest_array: int = 1001
    lacks_nodes: bool = False
    """Whether SLURM replies that it lacks the nodes for a job."""
    silence: str = ""
    """The reason why SLURM answers no command; empty: it answers."""
    submissions: list[Submission] = field(default_factory=list)
    states: dict[str, JobState] = field(default_factory=dict)

    def submit(
        self, script: Path, *, token: str, options: Sequence[str] = (), known: Collection[str | None] = ()
    ) -> str:
        self._answer()
        if self.refusal:
            raise SlurmError(f"sbatch failed: {self.refusal}", hint="The fake was told to refuse.")

        text = script.read_text(encoding="utf-8")
        job_id = str(len(self.submissions) + 1)
        self.submissions.append(Submission(job_id, text, token, tuple(options), script.absolute()))
        array = re.search(r"^#SBATCH --array=0-(\d+)", text, re.MULTILINE)
        for task_id in [f"{job_id}_{index}" for index in range(int(array[1]) + 1)] if array else [job_id]:
            self.states[task_id] = JobState(
                job_id=task_id, state="PENDING", reason="Priority", run=parse_run(token)
            )
        return job_id

    def would_take(self, script: Path, options: Sequence[str] = ()) -> bool:
        return not (self.silence or self.refusal or self.lacks_nodes)

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        self._answer()
        return {job_id: self.states[job_id] for job_id in job_ids if job_id in self.states}

    def jobs_of_each(self, folders: Sequence[Path]) -> dict[Path, dict[str, JobState]]:
        self._answer()
        return {
            folder: {id_: job for id_, job in self.states.items() if self._is_of(id_, folder)}
            for folder in folders
        }

    def _is_of(self, job_id: str, folder: Path) -> bool:
        number, _, index = job_id.partition("_")
        scripts = [submission.path for submission in self.submissions if submission.job_id == number]
        if index:
            return any(folder in Path(script_of(job_id, str(path))).parents for path in scripts)

        return any(folder.absolute() in path.parents for path in scripts)

    def cancel(self, *job_ids: str) -> None:
        self._answer()
        for job_id in job_ids:
            job = self.states.get(job_id)
            if job is not None and not job.terminal:
                self.states[job_id] = replace(job, state="CANCELLED", reason="")

    def query(self, command: list[str], timeout_s: float | None = None) -> str:
        """Print the site as SLURM's programs print it: its configuration and its partitions."""
        self._answer()
        if command[-1] == "config":
            return f"ClusterName = alpha\nMaxArraySize = {self.largest_array}\n"
        if command[-1] == "partition":
            return "".join(map(_show, self.site.values()))

        return ""

    def test(self, text: str) -> str:
        """Refuse a job with more nodes than its partition gives, as `sbatch --test-only` does."""
        self._answer()
        match = re.search(r"^#SBATCH --nodes=(\d+)", text, re.MULTILINE)
        nodes = int(match[1]) if match else 1
        named = re.search(r"^#SBATCH --partition=(\S+)", text, re.MULTILINE)
        asked = [self.site[name] for name in named[1].split(",") if name in self.site] if named else []
        fits = [
            partition
            for partition in asked or self.site.values()
            if nodes <= min(partition.max_nodes or nodes, partition.total_nodes or nodes)
        ]
        if (self.site and not fits) or (named and not asked):
            raise SlurmError("sbatch failed: Requested node configuration is not available.", hint="")

        return ""

    def set_state(self, job_id: str, state: str, *, reason: str = "", nodes: str = "") -> None:
        """Let a job be in `state` from now on."""
        self.states[job_id] = JobState(job_id=job_id, state=parse_state(state), reason=reason, nodes=nodes)

    def forget(self, job_id: str) -> None:
        """Let SLURM forget a job, as it does some minutes after the job's end without accounting."""
        self.states.pop(job_id, None)

    def _answer(self) -> None:
        if self.silence:
            raise SlurmError(self.silence, hint="The fake was told not to answer.")


def _show(partition: Partition) -> str:
    """Return the line of `scontrol -o show partition`, with the limits that tests set."""
    limits = {
        "MaxNodes": partition.max_nodes,
        "MaxTime": partition.max_time_min,
        "TotalNodes": partition.total_nodes,
        "Default": "YES" if partition.is_default else "NO",
    }
    shown = [f"{key}={value}" for key, value in limits.items() if value is not None]
    return " ".join([f"PartitionName={partition.name}", *shown]) + "\n"
