"""The batch script on a real SLURM, with a stub in place of the agents: only what SLURM and the shell do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmddp.launchers.submitter import build
from slurmddp.runs.folder import RunFolder
from slurmddp.runs.prepare import prepare
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.sandbox import Sandbox
from slurmddp.slurm.script import render
from slurmddp.spec import Cluster, Job, Policy, Program, Resources

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STUB = Path(__file__).parent / "stub-agent.sh"
BOTH = pytest.mark.parametrize("submitter", ["sbatch", "submitit"])


@pytest.fixture
def slurm(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    return SlurmClient()


class Run:
    """One job with the stub inside, and what its folder tells."""

    def __init__(self, folder: Path, job: Job, job_id: str) -> None:
        self.folder = RunFolder(folder)
        self.job = job
        self.job_id = job_id

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.events() if event["event"] == name]

    def ends(self) -> list[tuple[str, str]]:
        return [(event["outcome"], event["next"]) for event in self.events("ended")]

    def steps(self) -> int:
        return int((self.folder.checkpoints_dir / "latest").read_text())

    def wait(self, until: Callable[[], object], what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            logs = [path.read_text() for path in self.folder.path.glob("logs/**/*.*")]
            assert time.monotonic() < deadline, f"no {what}: {self.folder.events()} {logs}"
            time.sleep(0.2)

    def wait_started(self, attempts: int = 1) -> None:
        log = self.folder.log_dir(attempts - 1) / "node-0.log"
        self.wait(lambda: log.exists() and "starts at" in log.read_text(), f"start {attempts}")

    def wait_over(self) -> None:
        self.wait(lambda: self.ends() and self.ends()[-1][1] == "none", "end")


Start = Callable[..., Run]


@pytest.fixture
def start(slurm: SlurmClient, tmp_path: Path) -> Start:
    """Return a function that submits a job whose stub counts to `goal`, five a second."""
    python = tmp_path / "it's python"
    agent = f'[ "$2" = slurmddp.launchers.agent ] && exec bash {shlex.quote(str(STUB))} "$@"'
    python.write_text(f'#!/bin/bash\n{agent}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)

    def submit(
        submitter: str = "sbatch",
        *,
        goal: int,
        nodes: int = 2,
        time_limit_min: int | None = None,
        lead_s: int = 30,
        max_restarts: int = 3,
        env: Mapping[str, str] | None = None,
        sbatch: Mapping[str, Any] | None = None,
        options: tuple[str, ...] = (),
    ) -> Run:
        folder = tmp_path / "runs" / f"it's 50% {submitter}"
        job = Job(
            name="stub",
            run_name=folder.name,
            run_dir=folder,
            project_dir=tmp_path,
            launcher="slurm",
            submitter=submitter,
            python=str(python),
            cluster=Cluster(
                name="sandbox", partition="low", mem_request="none", env=env or {}, sbatch=sbatch or {}
            ),
            resources=Resources(nodes=nodes, ranks_per_node=2, time_limit_min=time_limit_min),
            policy=Policy(signal_lead_s=lead_s, max_restarts=max_restarts),
            program=Program(target="none", config={"name": "stub"}),
            snapshot=False,
        )
        prepare(job, render(job))
        (folder / "goal").write_text(str(goal))
        client = _WithOptions(options) if options else slurm
        return Run(folder, job, build(submitter, client).submit(job))

    return submit


class _WithOptions(SlurmClient):
    """A site, or a person, that adds options to every sbatch."""

    def __init__(self, added: tuple[str, ...]) -> None:
        super().__init__()
        self._added = added

    def submit(self, script: Path, *, token: str, options: Any = ()) -> str:
        return super().submit(script, token=token, options=[*self._added, *options])


def occupy(run: Run) -> None:
    """Submit a short job of higher priority to the nodes on which `run` has started."""
    nodes = run.events("started")[-1]["nodes"]
    command = ["sbatch", "--partition=high", f"--nodelist={nodes}", f"--nodes={run.job.resources.nodes}"]
    command += ["--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(command, check=True, capture_output=True)


@BOTH
def test_a_job_runs_to_its_end(start: Start, slurm: SlurmClient, submitter: str) -> None:
    run = start(submitter, goal=3, nodes=3)
    run.wait_over()
    assert run.ends() == [("finished", "none")]
    assert run.steps() == 3
    logs = [(run.folder.log_dir(0) / f"node-{node}.log").read_text() for node in range(3)]
    assert [f"node {node} of 3 starts at 0" in log for node, log in enumerate(logs)] == [True] * 3
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "COMPLETED", "completed job")


@BOTH
def test_a_preempted_job_comes_back_and_goes_on(start: Start, submitter: str) -> None:
    run = start(submitter, goal=25)
    run.wait_started()
    occupy(run)
    run.wait_over()
    assert run.ends() == [("stopped", "requeue"), ("finished", "none")]
    assert {event["job_id"] for event in run.events("started")} == {run.job_id}
    assert [event["restart_count"] for event in run.events("started")] == [0, 1]
    assert "starts at 0" not in (run.folder.log_dir(1) / "node-0.log").read_text()
    assert run.steps() == 25


@BOTH
def test_a_job_at_its_time_limit_saves_and_goes_on(start: Start, submitter: str) -> None:
    run = start(submitter, goal=400, nodes=1, time_limit_min=1, lead_s=40)
    run.wait_started(attempts=2)
    assert run.ends()[0] == ("stopped", "requeue")
    assert "ends at" in (run.folder.log_dir(0) / "node-0.log").read_text()
    assert " on USR2" in (run.folder.log_dir(0) / "node-0.log").read_text()


@pytest.mark.slow
def test_a_job_killed_at_its_time_limit_goes_on_from_what_it_saved(start: Start) -> None:
    """Here the ranks hear nothing before the limit itself, and save in the seconds that SLURM then leaves."""
    run = start(goal=400, nodes=1, time_limit_min=1, lead_s=5, env={"STUB_DEAF": "USR2"})
    run.wait_started(attempts=2)
    assert run.ends()[0] == ("stopped", "requeue")
    assert " on TERM" in (run.folder.log_dir(0) / "node-0.log").read_text()


@BOTH
def test_a_job_cancelled_with_scancel_stays_cancelled(
    start: Start, slurm: SlurmClient, submitter: str
) -> None:
    run = start(submitter, goal=1000)
    run.wait_started()
    slurm.cancel(run.job_id)
    run.wait_over()
    assert run.ends() == [("cancelled", "none")]
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "CANCELLED", "cancelled job")


def test_a_stop_signal_from_a_person_puts_the_job_back(start: Start, sandbox: Sandbox) -> None:
    run = start(goal=25)
    run.wait_started()
    subprocess.run(["scancel", "--signal=TERM", run.job_id], check=True)
    run.wait_over()
    assert run.ends() == [("stopped", "requeue"), ("finished", "none")]


def test_where_requeueing_is_refused_a_new_job_goes_on_in_the_same_folder(start: Start) -> None:
    run = start(goal=25, nodes=1, options=("--no-requeue",))
    run.wait_started()
    subprocess.run(["scancel", "--signal=TERM", run.job_id], check=True)
    run.wait_over()
    assert run.ends() == [("stopped", "resubmit"), ("finished", "none")]
    first, second = run.events("started")
    assert first["job_id"] == run.job_id
    assert second["job_id"] == run.events("submitted")[1]["job_id"] != run.job_id


def test_a_failing_job_is_tried_again_a_limited_number_of_times(start: Start, slurm: SlurmClient) -> None:
    """One agent dies without a word, srun stops the other, which saves: srun's own code says 75."""
    run = start(goal=1000, env={"STUB_FAIL": "1"}, max_restarts=1)
    run.wait_over()
    assert run.ends() == [("failed", "requeue"), ("failed", "none")]
    run.wait(lambda: slurm.jobs([run.job_id])[run.job_id].state == "FAILED", "failed job")


def test_an_element_of_an_array_requeues_only_itself(start: Start, sandbox: Sandbox) -> None:
    """The last element to start bears the array's own job id; requeueing that would restart them all."""
    run = start(goal=40, nodes=1, options=("--array=1-2",))
    run.wait(lambda: len(run.events("started")) == 2, "two elements")
    run.wait_started(attempts=2)
    element = next(event for event in run.events("started") if event["job_id"].endswith("_2"))
    subprocess.run(["scancel", "--signal=TERM", element["job_id"]], check=True)
    run.wait(lambda: len(run.events("ended")) == 3, "three ends")
    started = [event["job_id"].rpartition("_")[2] for event in run.events("started")]
    assert sorted(started) == ["1", "2", "2"]


def test_what_a_person_writes_reaches_sbatch_as_it_is(
    start: Start, slurm: SlurmClient, sandbox: Sandbox
) -> None:
    words = 'it\'s "5 $HOME" # `id` \\ ; rm -rf /'
    run = start(goal=1, nodes=1, env={"WORDS": words}, sbatch={"comment": words, "wckey": words})
    run.wait_over()
    shown = subprocess.run(
        ["squeue", "-h", "-t", "all", "-j", run.job_id, "-o", "%k"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.rstrip("\n").endswith(f" {words}")
    assert (run.folder.path / "logs" / f"slurm-{run.job_id}.out").exists()


def test_a_submission_from_inside_a_job_inherits_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SBATCH_TIMELIMIT", "SLURM_CPU_BIND", "SLURM_STEP_ID", "SLURM_NTASKS", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "nonsense")
    run = start(goal=1)
    run.wait_over()
    assert run.ends() == [("finished", "none")]
    assert os.environ["SLURM_CPU_BIND"] == "nonsense"


def test_limits_are_read_and_hold(slurm: SlurmClient, start: Start) -> None:
    limits = slurm.limits()
    assert limits.partitions["low"].total_nodes == 3
    assert limits.max_array_size is not None
    with pytest.raises(Exception, match="nodes=9 is more than partition 'low' gives a job"):
        start(goal=1, nodes=9)
