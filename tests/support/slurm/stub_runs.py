"""Jobs on the real SLURM with a stub in place of the agents, for several tests."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmddp.host.atomic_file import write_atomic
from slurmddp.launchers.submit.fit import refuse_misfit
from slurmddp.launchers.submit.submitter import build
from slurmddp.runs.folder.create import prepare
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.sandbox import Sandbox
from slurmddp.settings.schema import Cluster, PolicySettings
from slurmddp.settings.spec import Job, Program, Resources
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.script import render

STUB = Path(__file__).parent / "stub-agent.sh"
ENDLESS = 1_000_000
"""Number of steps for runs that another event ends first; `Run.aim` then sets a near goal."""


@pytest.fixture
def slurm(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    """Return a client of the sandbox's SLURM, and put SLURM's commands on this process's PATH."""
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    return SlurmClient()


class Run:
    """A job that runs the stub in place of agents, and its run folder."""

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

    def aim(self, goal: int) -> None:
        """Set the step at which the stub ends.

        It reads the number in each step, so write the file atomically.
        """
        write_atomic(self.folder.path / "goal", str(goal))

    def log(self, attempt: int) -> str:
        return (self.folder.log_dir(attempt) / "node-0.log").read_text()

    def wait(self, until: Callable[[], object], what: str, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, f"no {what}: {self.story()}"
            time.sleep(0.2)

    def story(self) -> str:
        """Return the events and logs of the run folder, for the message of an assertion."""
        logs = {path.name: path.read_text() for path in self.folder.path.glob("logs/**/*.*")}
        return f"{self.folder.events()} {logs}"

    def wait_started(self, attempts: int = 1) -> None:
        """Wait until the stubs of all nodes have started and have installed their signal handlers."""
        folder = self.folder.log_dir(attempts - 1)
        logs = [folder / f"node-{node}.log" for node in range(self.job.resources.all_nodes)]

        def begun() -> bool:
            return all(log.exists() and "starts at" in log.read_text() for log in logs)

        self.wait(begun, f"start {attempts}")

    def wait_stopped(self) -> int:
        """Wait for the first end of an attempt, let the run finish soon after it.

        Return the saved step.
        """
        self.wait(self.ends, "first end")
        assert (self.folder.checkpoints_dir / "latest").exists(), f"an end without a save: {self.story()}"
        saved = self.steps()
        self.aim(saved + 3)
        return saved

    def wait_over(self) -> None:
        self.wait(lambda: self.ends() and self.ends()[-1][1] == "none", "end")


Start = Callable[..., Run]


@pytest.fixture
def start(slurm: SlurmClient, tmp_path: Path) -> Start:
    """Return a function that submits a job whose stub counts to `goal`, with five steps per second."""
    return starter(tmp_path, slurm)


def starter(tmp_path: Path, slurm: SlurmClient) -> Start:
    """Return the function of the fixture `start`, with its files in `tmp_path`."""
    python = tmp_path / "it's python"
    agent = f'[ "$2" = slurmddp.launchers.agent ] && exec bash {shlex.quote(str(STUB))} "$@"'
    python.write_text(f'#!/bin/bash\n{agent}\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)

    def submit(
        submitter: str = "sbatch",
        *,
        goal: int,
        nodes: int = 2,
        spare_nodes: int = 0,
        elastic: bool = False,
        name: str = "",
        partition: str = "low",
        target: str = "none",
        refused: bool = False,
        time_limit_min: int | None = None,
        lead_s: int = 30,
        max_restarts: int = 3,
        env: Mapping[str, str] | None = None,
        sbatch: Mapping[str, Any] | None = None,
        setup: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> Run:
        folder = tmp_path / "runs" / (name or f"it's 50% {submitter}")
        job = Job(
            name="stub",
            run_name=folder.name,
            run_dir=folder,
            project_dir=tmp_path,
            launcher="slurm",
            submitter=submitter,
            python=str(python),
            cluster=Cluster(
                name="sandbox",
                partition=partition,
                mem_request="none",
                setup=setup,
                env=env or {},
                sbatch=sbatch or {},
            ),
            resources=Resources(
                nodes=nodes, spare_nodes=spare_nodes, ranks_per_node=2, time_limit_min=time_limit_min
            ),
            policy=PolicySettings(signal_lead_s=lead_s, max_restarts=max_restarts),
            program=Program(target=target, config={"name": "stub"}),
            snapshot=False,
            elastic=elastic,
        )
        refuse_misfit(job, slurm)
        prepare(job, refuse_requeue(render(job)) if refused else render(job))
        (folder / "goal").write_text(str(goal))
        client = _WithOptions(options) if options else slurm
        return Run(folder, job, build(submitter, client).submit(job))

    return submit


def refuse_requeue(script: str) -> str:
    """Return the script as changed by a site's submit filter that permits no requeue."""
    assert "\n#SBATCH --requeue\n" in script
    return script.replace("\n#SBATCH --requeue\n", "\n#SBATCH --no-requeue\n")


class _WithOptions(SlurmClient):
    """A client that adds options to each sbatch, as a site or a person may do."""

    def __init__(self, added: tuple[str, ...]) -> None:
        super().__init__()
        self._added = added

    def submit(self, script: Path, *, token: str, options: Any = (), known: Any = ()) -> str:
        return super().submit(script, token=token, options=[*self._added, *options], known=known)
