"""Differences between SLURM 22.05, 24.11 and 26.05, and equal results: docs/internals/slurm-versions.md."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmddp.environments.detect import detect
from slurmddp.environments.scrub import scrub
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.reasons import explain
from slurmddp.slurm.rejections import hint_for
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.stub_runs import ENDLESS, Start
from support.slurm.train_project import Command, make_project
from support.slurm.versions import by_version

pytestmark = pytest.mark.slurm

SHOW = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
CPUS = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_ON_NODE")
OF_MPI = {
    "HYDRA_BOOTSTRAP": "slurm",
    "I_MPI_HYDRA_BOOTSTRAP": "slurm",
    "OMPI_MCA_plm_slurm_args": "--external-launcher",
    "PRTE_MCA_plm_slurm_args": "--external-launcher",
}


def run(sandbox: FaultySandbox, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**scrub(os.environ), **sandbox.environment(), **variables}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)


def shown(sandbox: FaultySandbox, *words: str) -> dict[str, str]:
    """Return the environment that a command in a job of one task with four CPUs prints."""
    done = run(sandbox, "salloc", "-n1", "--cpus-per-task=4", *words, *SHOW)
    assert done.returncode == 0, done.stderr
    environ: dict[str, str] = json.loads(done.stdout)
    return environ


def test_a_job_on_24_11_has_the_cpus_of_a_task_in_a_second_variable(sandbox: FaultySandbox) -> None:
    """It overrules SRUN_CPUS_PER_TASK, but not the option --cpus-per-task, which the script gives."""
    assert shown(sandbox).get("SLURM_TRES_PER_TASK") == by_version(None, "cpu=4")
    step = shown(sandbox, "env", "SRUN_CPUS_PER_TASK=2", "srun", "--mpi=none")
    assert [step.get(name) for name in CPUS] == by_version(["2", None, "2"], ["4", "cpu=4", "4"])
    step = shown(sandbox, "env", "SRUN_CPUS_PER_TASK=4", "srun", "--mpi=none", "--cpus-per-task=2")
    assert step["SLURM_CPUS_ON_NODE"] == "2"


def test_srun_on_24_11_refuses_two_variables_that_differ(sandbox: FaultySandbox) -> None:
    step = ("env", "SLURM_CPUS_PER_TASK=2", "srun", "--mpi=none", "true")
    done = run(sandbox, "salloc", "-n1", "--cpus-per-task=4", *step)
    assert ("set by two different environment variables" in done.stderr) == by_version(False, True)
    assert (done.returncode != 0) == by_version(False, True)


def test_variables_for_mpi_in_every_job_do_not_make_its_tasks_ranks_of_mpi(sandbox: FaultySandbox) -> None:
    step = shown(sandbox, "srun", "--mpi=none")
    assert {name: step[name] for name in OF_MPI if name in step} == by_version({}, OF_MPI)
    info = detect(step)
    assert (info.environment, info.rank, info.world_size) == ("slurm", 0, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-N1 -n2 -O --gpus-per-task=1", "Requested node configuration is not available"),
        ("-N2 -n2 --distribution=arbitrary", "--nodes is incompatible with --distribution=arbitrary"),
    ],
)
def test_options_that_24_11_no_longer_takes_together(
    sandbox: FaultySandbox, tmp_path: Path, options: str, said: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{node}\n" for node in sandbox.nodes[:2]))
    given = {"SLURM_HOSTFILE": str(hosts)} if "arbitrary" in options else {}
    done = run(sandbox, "srun", "--mpi=none", *options.split(), "true", **given)
    assert (done.returncode, said in done.stderr) == by_version((0, False), (1, True))


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--constraint=no", "`constraint`"),
        ("--reservation=no", "`reservation`"),
        ("--licenses=no", "`licenses`"),
        ("--gpus-per-node=9", "gpus_per_node"),
        ("--gres=no:1", "gpu_request"),
        ("--partition=no", "partition="),
    ],
)
def test_refusals_have_the_same_advice(sandbox: FaultySandbox, option: str, advice: str) -> None:
    done = run(sandbox, "sbatch", "--test-only", option, "--wrap=true")
    assert done.returncode != 0
    assert advice in hint_for(done.stderr)


def test_a_script_submitted_inside_a_job_gets_the_cpus_of_its_own_job(
    sandbox: FaultySandbox, start: Start, slurm: SlurmClient
) -> None:
    first = start(goal=ENDLESS, nodes=1, sbatch={"exclusive": True})
    first.wait_started()
    slurm.cancel(first.job_id)
    first.wait_over()
    first.aim(1)
    inside = ("srun", "--mpi=none", "-n1", "--cpus-per-task=1", "sbatch", "--parsable", "--partition=low")
    done = run(sandbox, *inside, str(first.folder.script_file))
    assert done.returncode == 0, done.stderr
    first.wait(lambda: first.ends()[-1] == ("finished", "none"), "end of the second job")
    assert "CPUs none of 4\n" in (first.folder.log_dir(1) / "node-0.log").read_text()


NO_WAIT = {"None", "InvalidReason", "NonZeroExitCode", "RaisedSignal", "TimeLimit", "InactiveLimit"}
NO_WAIT |= {"InvaildReason", "OutOfMemory", "BlockFreeAction", "BlockMaxError"}
"""Reasons of jobs that have ended, of machines that are gone, and of numbers without a reason."""
NEW_REASONS = {"MaxPoweredUpNodes", "MpiPortsBusy", "NvidiaImexChannels"}


def all_reasons() -> set[str]:
    """Return the names of all reasons that the installed SLURM knows, by its own library."""
    (library,) = Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so")
    name = by_version("slurm_job_reason_string", "slurm_job_state_reason_string")
    function = getattr(ctypes.CDLL(str(library)), name)
    function.restype = ctypes.c_char_p
    return {function(number).decode() for number in range(250)}


def test_every_reason_for_which_a_job_waits_is_explained() -> None:
    # For a number without a reason 22.05 returns the number, and newer versions return `InvalidReason`.
    reasons = {reason for reason in all_reasons() if not reason.isdigit()} - NO_WAIT
    assert len(reasons) > 150
    assert reasons & NEW_REASONS == by_version(set(), NEW_REASONS - {"NvidiaImexChannels"}, NEW_REASONS)
    quoted = {why for reason in reasons if "reason is" in (why := explain(reason, run="gpt", job_id="7")[0])}
    assert not quoted


def test_a_step_may_ask_for_some_of_the_gpus_of_its_job(sandbox: FaultySandbox, tmp_path: Path) -> None:
    """srun of 26.05 refuses --gres beside the variable of --gpus-per-node, so the script removes it."""
    step = ("srun", "--mpi=none", "--gres=gpu:1", "true")
    done = run(sandbox, "salloc", "-N1", "--gpus-per-node=2", *step)
    assert ("mutually exclusive" in done.stderr) == by_version(False, False, True), done.stderr

    project = make_project(tmp_path / "project")
    (project / "show.py").write_text("import os\nprint('GPUs', os.environ['CUDA_VISIBLE_DEVICES'])\n")
    resources = ["nodes=1", "ranks_per_node=1", "cluster.gpus_per_node=2", "+cluster.srun.gres=gpu:1"]
    shown = Command(project, sandbox.environment()).submit("gres", "program.script=show.py", *resources)
    shown.wait_finished()
    assert "GPUs 0\n" in (shown.folder / "logs/attempt-0/rank-0.log").read_text()


def test_a_sluid_names_one_start_of_a_job_and_not_the_job(sandbox: FaultySandbox, tmp_path: Path) -> None:
    """It changes with each requeue, so the batch step recognizes its job by its script on all versions."""
    shown = tmp_path / "sluids"
    again = '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 600; }'
    script = f'echo "${{SLURM_JOB_SLUID:-none}}" >>{shown}; {again}'
    done = run(sandbox, "sbatch", "--parsable", "--requeue", "--output=/dev/null", f"--wrap={script}")
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 120
    while not shown.exists() or len(sluids := shown.read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len(set(sluids)) == by_version(1, 1, 2)
    assert sluids[0].startswith(by_version("none", "none", "s"))


def test_licences_that_a_job_has_lost_can_be_restored(
    sandbox: FaultySandbox, slurm: SlurmClient, tmp_path: Path
) -> None:
    conf = sandbox.root / "slurm.conf"
    before = conf.read_text()
    conf.write_text(f"{before}Licenses=m:1\n")
    sandbox.restart_controller()
    command = Command(make_project(tmp_path), sandbox.environment())
    waiting = command.submit(
        "licences", "nodes=1", "+cluster.sbatch.licenses=m:1", "+cluster.sbatch.hold=true"
    )
    assert "restores it" not in command("explain", "licences")

    slurm.query(["scontrol", "update", f"JobId={waiting.job_id}", "Licenses="])
    (remedy,) = re.findall("`(scontrol update .*)` restores it", command("explain", "licences"))
    slurm.query(remedy.split())
    assert "restores it" not in command("explain", "licences")
    slurm.cancel(waiting.job_id)
    conf.write_text(before)
    sandbox.restart_controller()


GIVEN = ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "SLURM_STEP_NUM_TASKS")


def test_a_step_for_an_external_launcher_sees_what_a_shared_step_sees(sandbox: FaultySandbox) -> None:
    """So the agents of an allocation need no other option than --overlap, which all versions have."""
    given = []
    for option in ("--overlap", "--external-launcher"):
        step = ("srun", "--mpi=none", option, "-n1", "--cpus-per-task=4", *SHOW)
        done = run(sandbox, "salloc", "-n1", "--cpus-per-task=4", "--gpus-per-node=2", *step)
        if done.returncode == 0:
            environ = json.loads(done.stdout)
            given.append([environ.get(name) for name in GIVEN])
    assert given == [["4", "4", "0,1", "1"]] * by_version(1, 2)


def test_segments_that_do_not_fit_are_refused_with_advice(sandbox: FaultySandbox) -> None:
    done = run(sandbox, "sbatch", "--test-only", "--nodes=3", "--segment=2", "--wrap=true")
    assert (done.returncode != 0) == by_version(True, False, True), done.stderr
    assert ("change nodes= or spare_nodes=" in hint_for(done.stderr)) == by_version(False, False, True)
