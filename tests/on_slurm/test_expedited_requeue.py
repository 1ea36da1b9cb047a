"""Expedited requeues of SLURM 25.11: a run starts again at once, and no job of a run that is over is held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurmddp.errors import SlurmError
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.states import ACTIVE
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.stub_runs import ENDLESS, Run, Start
from support.slurm.versions import by_version

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def site(sandbox: FaultySandbox) -> Iterator[None]:
    """A site that allows expedited requeues, and delays the others until long after the tests."""
    conf = sandbox.root / "slurm.conf"
    before = conf.read_text()
    allowed = "SlurmctldParameters=enable_expedited_requeue\n"
    conf.write_text(before.replace("bf_interval=1", "bf_interval=1,requeue_delay=86400") + allowed)
    sandbox.restart_controller()
    yield
    conf.write_text(before)
    sandbox.restart_controller()


def started(start: Start, *, by_plugin: bool = False, **values: object) -> Run | None:
    """Start a run of one node with expedited requeues; return None on a version that refuses them.

    Args:
        start: submits a run.
        by_plugin: whether a submit plugin of the site, and not the cluster file, asks for them.
        values: further arguments of `start`.
    """
    how = {"options": ("--requeue=expedite",)} if by_plugin else {"sbatch": {"requeue": "expedite"}}
    try:
        run = start(goal=ENDLESS, nodes=1, **how, **values)
    except SlurmError as error:
        assert "`requeue: expedite`" in error.hint
        assert by_version(True, True, False), error
        return None

    assert by_version(False, False, True)
    return run


def test_a_run_with_expedited_requeues_starts_again_at_once(start: Start, sandbox: FaultySandbox) -> None:
    run = started(start)
    if run is None:
        return
    run.wait_started()
    sandbox.command("scontrol", "requeue", run.job_id)
    run.wait_stopped()
    run.wait_over()
    assert run.ends() == [("stopped", "requeue"), ("finished", "none")]


def test_a_plain_run_waits_for_the_delay_of_the_site(start: Start, slurm: SlurmClient) -> None:
    """The delay is new in 25.11; before, SLURM waits for the life of a credential, 5 s in the sandbox."""
    run = start(goal=ENDLESS, nodes=1)
    run.wait_started()
    slurm.query(["scontrol", "requeue", run.job_id])
    run.wait_stopped()
    if by_version(True, True, False):
        run.wait_over()
        return
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].reason == "BeginTime", "delay")
    assert slurm.jobs([run.job_id])[run.job_id].pending


@pytest.mark.parametrize("by_plugin", [False, True], ids=["cluster file", "plugin"])
@pytest.mark.parametrize("how", ["fails", "is stopped"])
def test_a_run_that_is_over_leaves_no_held_job(
    start: Start, slurm: SlurmClient, how: str, by_plugin: bool
) -> None:
    """The batch script ends with a code other than 0, after which SLURM would hold the job."""
    crash = {"STUB_STUCK": "1", "STUB_CRASH": "1"}
    run = started(start, by_plugin=by_plugin, env=crash if how == "fails" else {})
    if run is None:
        return
    if how == "is stopped":
        run.wait_started()
        run.folder.stop_file.touch()
        slurm.query(["scancel", "--signal=USR2", "--full", run.job_id])

    run.wait_over()
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state not in ACTIVE, "end of the job")
    job = slurm.jobs([run.job_id])[run.job_id]
    assert (job.state, job.reason) == ("FAILED", "NonZeroExitCode")
    assert run.ends() == [("failed" if how == "fails" else "stopped", "none")]
