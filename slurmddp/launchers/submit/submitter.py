"""The seam between a prepared run and the SLURM that takes it; two submitters stand behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slurmddp.errors import ConfigError, near_matches
from slurmddp.slurm.client import Slurm, SlurmClient
from slurmddp.spec import Job


class Submitter(Protocol):
    """Hands a prepared run folder to SLURM; the folder and all that happens later are the same for each."""

    def script(self, job: Job) -> str:
        """Return the text that `submit` sends, byte for byte; nothing is written, and SLURM is not asked."""

    def submit(self, job: Job) -> str:
        """Queue the prepared `job`, record it in the run folder, and return the job's id."""


def build(name: str, slurm: Slurm | None = None) -> Submitter:
    """Return the submitter `sbatch` or `submitit`."""
    if name not in _SUBMITTERS:
        raise ConfigError(f"submitter={name!r} is not known.", hint=near_matches(name, _SUBMITTERS))
    return _SUBMITTERS[name](slurm or SlurmClient())


def _sbatch(slurm: Slurm) -> Submitter:
    from slurmddp.launchers.submit.sbatch import SbatchSubmitter

    return SbatchSubmitter(slurm)


def _submitit(slurm: Slurm) -> Submitter:
    from slurmddp.launchers.submit.submitit import SubmititSubmitter

    return SubmititSubmitter(slurm)


_SUBMITTERS: dict[str, Callable[[Slurm], Submitter]] = {"sbatch": _sbatch, "submitit": _submitit}
