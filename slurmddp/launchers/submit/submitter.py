"""Define what submits a prepared run to SLURM, and choose a submitter by name."""

from __future__ import annotations

from typing import Protocol

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches
from slurmddp.plugins import locate
from slurmddp.settings.spec import Job
from slurmddp.slurm.client import SlurmClient

# Import paths, not classes, so that submitit, which takes a while to import, is imported only if chosen.
_SUBMITTERS = {
    "sbatch": "slurmddp.launchers.submit.sbatch.SbatchSubmitter",
    "submitit": "slurmddp.launchers.submit.submitit.SubmititSubmitter",
}


class Submitter(Protocol):
    """Submits prepared runs to SLURM. The job does the same, whichever submitter has queued it."""

    def script(self, job: Job) -> str:
        """Return the script that `submit` sends, byte for byte, without writing it or asking SLURM."""

    def submit(self, job: Job) -> str:
        """Queue the prepared `job`, record its submission in the run folder, and return the job's id."""


def build(name: str, slurm: SlurmClient | None = None) -> Submitter:
    """Return the submitter with the name `sbatch` or `submitit`.

    Args:
        name: the name.
        slurm: the client to submit with; None: a new one.

    Raises:
        ConfigError: there is no such submitter.
    """
    if name not in _SUBMITTERS:
        raise ConfigError(f"submitter={name!r} is not known.", hint=near_matches(name, _SUBMITTERS))
    submitter: Submitter = locate(_SUBMITTERS[name], key="submitter")(slurm or SlurmClient())
    return submitter
