"""The folder of a run's loggers, and an environment without the trackers of the person who tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.training.loggers import LoggedRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoggedRun]:
    for name in [one for one in os.environ if one.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_RUN_ID", "gpt-1")
    monkeypatch.setenv("WANDB_RESUME", "allow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    config = {"train": {"steps": 4}, "model": {"_target_": "gpt"}}
    yield LoggedRun(name="gpt-1", folder=tmp_path / "loggers", config=config, first_step=1)
    if "wandb" in sys.modules:  # Its service would stay until this process exits.
        sys.modules["wandb"].teardown()
