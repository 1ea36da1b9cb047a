"""A sweep as a whole, before any of its runs is started."""

from __future__ import annotations

import pytest

from slurmddp.control.sweep import runs_dir_of
from slurmddp.errors import ConfigError
from support.slurm.slurm_jobs import make_job


def test_points_that_are_the_same_run_are_named_by_what_a_person_typed() -> None:
    """Hydra's launcher gives each point arguments of its own that no one typed."""
    jobs = [
        make_job(overrides=("+cluster=here", f'program.free_args=["hydra.job.num={number}"]', "+x=1"))
        for number in (0, 1)
    ]
    with pytest.raises(ConfigError, match=r"gpt-0123abcd: \+cluster=here \+x=1, and \+cluster=here \+x=1\."):
        runs_dir_of(jobs)
