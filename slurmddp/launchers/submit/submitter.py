"""The ways to hand a prepared run to SLURM, by name."""

from __future__ import annotations

from typing import Protocol

from slurmddp.errors import ConfigError, near_matches
from slurmddp.plugins import locate
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient

# Import paths, because submitit takes a while to import.
_SUBMITTERS = {
    "sbatch": "slurmddp.launchers.submit.sbatch.SbatchSubmitter",
    "submitit": "slurmddp.launchers.submit.submitit.SubmititSubmitter",
}


class Submitter(Protocol):
    """Hands a prepared run folder to SLURM; the job later does the same, whichever submitter queued it."""

    def script(self, job: Job) -> str:
        """Return the text that `submit` sends, byte for byte, without writing it or asking SLURM."""

    def submit(self, job: Job) -> str:
        """Queue the prepared `job`, record it in the run folder, and return the job's id."""


def build(name: str, slurm: SlurmClient | None = None) -> Submitter:
    """Return the submitter `sbatch` or `submitit`."""
    if name not in _SUBMITTERS:
        raise ConfigError(f"submitter={name!r} is not known.", hint=near_matches(name, _SUBMITTERS))
    submitter: Submitter = locate(_SUBMITTERS[name], key="submitter")(slurm or SlurmClient())
    return submitter
