"""Reasons that SLURM never starts a job: sbatch has the last word on a finding."""

from __future__ import annotations

import pytest

from slurmddp.launchers.submit.fit import fit_of
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.script import render
from support.slurm.slurm_jobs import PARTITIONS, FakePrograms, make_job

TAKES = 'echo "sbatch: Job 7 to start at 2026-11-25T07:49:25 using 8 processors on nodes n1" >&2'
REFUSES = 'echo "allocation failure: Requested node configuration is not available" >&2; exit 1'
IS_SILENT = 'echo "allocation failure: Unable to contact slurm controller (connect failure)" >&2; exit 1'
HIDDEN = {"partition": "condo"}
LONG = {"partition": "low", "time_limit_min": 1441}
MANY = {"partition": "high", "nodes": 3}


@pytest.mark.parametrize(
    ("changes", "config", "answer", "reasons", "doubts"),
    [
        ({"partition": "low"}, "", REFUSES, 0, 0),  # sbatch itself gives the better reason
        (HIDDEN, "", TAKES, 0, 0),
        (HIDDEN, "", REFUSES, 1, 0),
        (HIDDEN, "", IS_SILENT, 0, 1),
        (MANY, "", TAKES, 0, 0),
        (MANY, "", REFUSES, 1, 0),
        (MANY, "JobSubmitPlugins=lua", REFUSES, 1, 0),
        (LONG, "", TAKES, 1, 0),
        (LONG, "", REFUSES, 1, 0),
        (LONG, "", IS_SILENT, 0, 1),
        (LONG, "JobSubmitPlugins=lua", TAKES, 0, 1),
        ({**LONG, "qos": "long"}, "", TAKES, 0, 1),
        ({**LONG, "partition": None}, "JobSubmitPlugins=lua", TAKES, 0, 1),
        ({"nodes": 5}, "JobSubmitPlugins=lua", REFUSES, 0, 1),
    ],
)
def test_a_finding_is_a_reason_only_if_sbatch_refuses_the_job_or_nothing_can_lift_it(
    programs: FakePrograms,
    changes: dict[str, object],
    config: str,
    answer: str,
    reasons: int,
    doubts: int,
) -> None:
    for name, text in {"partitions": PARTITIONS, "config": config, "test-only": answer}.items():
        programs.write(name, text)
    job = make_job(**changes)
    fit = fit_of(job, render(job), SlurmClient())
    assert (len(fit.reasons), len(fit.doubts), len(fit.notes)) == (reasons, doubts, doubts)
    assert "--all -o show partition" in programs.read("scontrol.calls")
