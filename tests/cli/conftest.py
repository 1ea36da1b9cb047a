"""Fixtures of the `slurmddp train` tests: a project, a login node with SLURM, local runs without ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from slurmddp.cli import commands
from slurmddp.control import jobs
from slurmddp.errors import EXIT_FAILED, RankFailure
from slurmddp.launchers.local import run as local
from slurmddp.pages import drawing
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm import client
from support.runs.projects import make_project
from support.slurm.slurm_in_memory import FakeSlurm


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = make_project(tmp_path / "project")
    monkeypatch.chdir(project)
    monkeypatch.setattr(jobs, "visible_gpus", lambda environ: 0)
    monkeypatch.setattr(client, "on_path", lambda: False)
    return project


@pytest.fixture
def cluster(project: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    for found in iter_modules(commands.__path__):  # A first import later would keep the fake for other tests.
        import_module(f"{commands.__name__}.{found.name}")
    monkeypatch.setattr(client, "on_path", lambda: True)
    for module in ("control.resume", "control.status"):
        monkeypatch.setattr(f"slurmddp.{module}.SlurmClient", lambda: fake)
    monkeypatch.setattr(client, "SlurmClient", lambda **options: fake)
    return fake


class FakeLocal:
    """A `LocalRun` without ranks: it writes their records and ends as `ends` says."""

    ends: Callable[[], int] = staticmethod(lambda: 0)
    started = 0

    def __init__(
        self, job: Any, folder: RunFolder, lock: Any, say: Callable[[str], None], *, allocation: Any = None
    ) -> None:
        self.folder, self.steps = folder, job.program.config["train"]["steps"]

    def start(self) -> None:
        type(self).started += 1
        self.attempt = self.folder.claim_attempt()
        self.folder.add_event(
            "started", attempt=self.attempt, job_id="local-1", restart_count=0, nodes="here", launcher="local"
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics that the run logs."""
        return [{"step": 0, "eval_loss": 4.5}, {"step": self.steps, "eval_loss": 2.25}]

    def wait(self, on_tick: Callable[[], None]) -> int:
        for record in self.records():
            append_line(self.folder.metrics_file, {"attempt": self.attempt, "time": 1.0, **record})
        on_tick()
        code = type(self).ends()
        outcome = {0: "finished", 75: "stopped"}.get(code, "failed")
        self.folder.add_event("saved", attempt=self.attempt, step=40, seconds=0.1)
        self.folder.add_event(
            "ended", attempt=self.attempt, job_id="local-1", exit_code=code, outcome=outcome, next="none"
        )
        if code == EXIT_FAILED:
            raise RankFailure("A rank failed.")
        return code


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeLocal]:
    fake = type("OneLocal", (FakeLocal,), {"started": 0})
    monkeypatch.setattr(local, "LocalRun", fake)
    # The reports are written without pictures, which take more time than all the rest.
    monkeypatch.setattr(drawing, "write_png", lambda *picture: None)
    monkeypatch.setattr(drawing, "figure_svg", lambda name, draw: "")
    return fake
