"""Preemption at sites of every kind: the run resumes in its folder, whatever SLURM does to the job.

The partitions differ in the fate of a preempted job and in its grace time. In each partition SLURM may
requeue one run, and refuses to requeue another. A single job of higher priority preempts all runs.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

from slurmddp.sandbox import Sandbox
from slurmddp.slurm.client import SlurmClient
from support.slurm.stub_runs import ENDLESS, Run, Start

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SITES = {
    "requeue-0": "PreemptMode=REQUEUE GraceTime=0",
    "requeue-5": "PreemptMode=REQUEUE GraceTime=5",
    "cancel-0": "PreemptMode=CANCEL GraceTime=0",
    "cancel-5": "PreemptMode=CANCEL GraceTime=5",
}

Configure = Callable[..., None]


@pytest.fixture(scope="module")
def configure(sandbox: Sandbox) -> Iterator[Configure]:
    """Return a function that gives the SLURM these partitions, with or without `send_user_signal`."""
    conf = sandbox.root / "slurm.conf"
    before = conf.read_text()
    extra = [f"PartitionName={name} Nodes=ALL PriorityTier=1 {options}" for name, options in SITES.items()]

    def write(*, user_signal: bool) -> None:
        # From SLURM 23.02 on it is PreemptParameters=send_user_signal.
        option = ["SlurmctldParameters=preempt_send_user_signal"] if user_signal else []
        patient = re.sub(
            r"(?m)^KillWait=.*", "KillWait=60", before
        )  # a slow machine is no reason to be killed
        conf.write_text("\n".join([patient, *extra, *option, ""]))
        sandbox.command("scontrol", "reconfigure")

    yield write
    conf.write_text(before)
    sandbox.command("scontrol", "reconfigure")


def preempt_all(sandbox: Sandbox) -> None:
    """Submit a short job of higher priority that needs every node."""
    command = ["sbatch", "--partition=high", f"--nodes={len(sandbox.nodes)}", "--exclusive"]
    subprocess.run([*command, "--output=/dev/null", "--wrap=sleep 1"], check=True, capture_output=True)


@pytest.mark.parametrize("user_signal", [False, True], ids=["SIGTERM", "send_user_signal"])
def test_a_preempted_run_goes_on_at_every_site(
    configure: Configure, start: Start, sandbox: Sandbox, user_signal: bool
) -> None:
    configure(user_signal=user_signal)
    requeued = [start(goal=ENDLESS, nodes=1, name=site, partition=site) for site in SITES]
    refused = [start(goal=ENDLESS, nodes=1, name=f"{s}-refused", partition=s, refused=True) for s in SITES]
    for run in requeued + refused:
        run.wait_started()
    preempt_all(sandbox)
    for run in requeued + refused:
        run.wait(run.ends, "first end")
        run.aim(run.steps() + 1)
    for run in requeued + refused:
        run.wait_over()
        assert_went_on(run, "requeue" if run in requeued else "resubmit")
        if run.folder.name.startswith(("requeue-5", "cancel-5")):  # without a grace SIGTERM follows at once
            assert f" on {'USR2' if user_signal else 'TERM'}\n" in run.log(0)


def test_a_preemption_while_the_setup_lines_run_is_none_of_their_failures(
    configure: Configure, start: Start, sandbox: Sandbox
) -> None:
    """SLURM signals the setup lines' commands too, starts no rank, and kills commands that continue."""
    configure(user_signal=False)
    touch = 'touch "$SLURMDDP_RUN_DIR/set-up-$SLURMDDP_ATTEMPT"'
    setup = ("set -e", touch, '[ "$SLURMDDP_ATTEMPT" != 0 ] || sleep 1000')
    sites = ("requeue-0", "cancel-0")
    requeued = [start(goal=1, nodes=1, name=site, partition=site, setup=setup) for site in sites]
    refused = [start(goal=1, nodes=1, name=f"{s}-no", partition=s, setup=setup, refused=True) for s in sites]
    for run in requeued + refused:
        run.wait((run.folder.path / "set-up-0").exists, "setup")
    preempt_all(sandbox)
    for run in requeued + refused:
        run.wait_over()
        how = "requeue" if run in requeued else "resubmit"
        assert run.ends() == [("stopped", how), ("finished", "none")], run.folder.name


def test_a_run_that_a_person_stops_while_it_is_preempted_leaves_no_job_in_the_queue(
    configure: Configure, start: Start, sandbox: Sandbox, slurm: SlurmClient
) -> None:
    configure(user_signal=False)
    runs = [start(goal=ENDLESS, nodes=1, name=site, partition=site) for site in SITES]
    for run in runs:
        run.wait_started()
        run.folder.stop_file.touch()  # the stub looks for no file
    preempt_all(sandbox)
    for run in runs:
        run.wait(run.ends, "end")
        assert run.ends() == [("stopped", "none")], run.folder.name
        run.wait(lambda run=run: slurm.jobs([run.job_id])[run.job_id].terminal, "end of the job")


def assert_went_on(run: Run, how: str) -> None:
    """Check that a second attempt, of this job or a resubmitted one, went on from where the first saved."""
    assert run.ends() == [("stopped", how), ("finished", "none")], run.folder.name
    saved = int(run.log(0).rpartition("ends at ")[2].split()[0])
    assert f"starts at {saved}," in run.log(1)
    assert run.steps() == saved + 1
    jobs = [event["job_id"] for event in run.events("submitted")]
    assert jobs[0] == run.job_id
    assert len(jobs) == (1 if how == "requeue" else 2)
    assert [event["job_id"] for event in run.events("started")] == [jobs[0], jobs[-1]]
