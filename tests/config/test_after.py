"""`after=RUN`: which job a job waits for, and which runs it can't wait for."""

from __future__ import annotations

import re

import pytest

from slurmddp.config.after import jobs_of
from slurmddp.errors import ConfigError, RunNotFoundError
from slurmddp.runs import sweeps
from slurmddp.slurm import client
from slurmddp.slurm.sbatch_options import sbatch_options
from support.runs.cli_runs import end, local_process, start, submit
from support.runs.projects import job_of
from support.slurm.slurm_in_memory import FakeSlurm


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(client, "SlurmClient", lambda: fake)
    return fake


@pytest.fixture
def runs(make_run, slurm):
    """Make a run in each state: `prep` is queued as job 7, `fit` runs as job 8."""
    prep, fit, done, bad = (make_run(f"{name}-0000000a") for name in ("prep", "fit", "done", "bad"))
    submit(prep)
    slurm.set_state("7", "PENDING", reason="Priority")
    for folder, job_id in ((fit, "8"), (done, "9"), (bad, "10")):
        submit(folder, job_id)
        start(folder, job_id=job_id)
    slurm.set_state("8", "RUNNING")
    end(done, "finished", job_id="9")
    end(bad, "failed", code=1, job_id="10")
    return prep.path.parent


def test_a_job_waits_for_the_jobs_of_runs_that_have_not_finished(runs, project):
    assert jobs_of(["prep", "done", "fit", "prep-0000000a"], "slurm") == ("7", "8")
    assert jobs_of(["done"], "local") == jobs_of([], "local") == ()
    sweeps.write(runs, "two-sweep", [("prep-0000000a", []), ("fit-0000000a", [])])
    assert jobs_of(["two-sweep"], "slurm") == ("7", "8")
    job = job_of(project, "+cluster=big", "after=[prep,fit]")
    assert sbatch_options(job)["dependency"] == "afterok:7:8"
    assert job.run_name == job_of(project, "+cluster=big").run_name
    assert "dependency" not in sbatch_options(job_of(project, "+cluster=big", "after=done"))
    both = job_of(project, "+cluster=big", "after=prep", "+cluster.sbatch.dependency=singleton")
    with pytest.raises(ConfigError, match="sets dependency, which slurmddp writes itself"):
        sbatch_options(both)


@pytest.mark.parametrize(
    ("name", "launcher", "kind", "said"),
    [
        ("nix", "slurm", RunNotFoundError, r"after=nix: .*no run named 'nix'.*after=\[\] to start"),
        ("bad", "slurm", ConfigError, "is failed, so the job would never start. First `slurmddp resume bad-"),
        ("prep", "local", ConfigError, "is queued, but only SLURM jobs.*logs -f prep-0000000a"),
    ],
)
def test_a_wait_without_end_is_refused(runs, name, launcher, kind, said):
    with pytest.raises(kind) as caught:
        jobs_of([name], launcher)
    assert re.search(said, str(caught.value))


def test_no_job_waits_for_a_run_of_this_machine(make_run, slurm):
    with (
        local_process(make_run()),
        pytest.raises(ConfigError, match="only SLURM jobs can wait"),
    ):
        jobs_of(["gpt"], "slurm")
