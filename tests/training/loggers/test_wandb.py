"""Weights & Biases without a key or a network: offline, unless a mode was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.training.loggers import LoggedRun
from slurmddp.training.loggers import wandb as module
from slurmddp.training.loggers.wandb import WandbLogger


class Unreachable(Exception):
    pass


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace wandb by a library that reaches no server, and is older than `finish_timeout`."""
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        asked.append(options)
        if options["mode"] != "offline":
            raise Unreachable("no route to host")
        return SimpleNamespace(define_metric=lambda name, step_metric: None, offline=True)

    class Settings:
        model_fields = ("console",)

        def __init__(self, console: str) -> None:
            self.console = console

    library = SimpleNamespace(init=init, Settings=Settings, errors=SimpleNamespace(Error=Unreachable))
    monkeypatch.setattr(module, "imported", lambda name: library)
    return asked


def test_an_unreachable_server_leads_to_an_offline_run(run: LoggedRun, monkeypatch, inits, caplog) -> None:
    monkeypatch.delenv("WANDB_MODE")
    WandbLogger(project="x").start(run)
    assert (
        f"wandb is offline. To upload the metrics later: wandb sync {run.folder}/wandb/offline-run-"
        in caplog.text
    )
    assert [(one["mode"], one["project"], one["name"]) for one in inits] == [
        (None, "x", "gpt-1"),
        ("offline", "x", "gpt-1"),
    ]
    assert inits[1]["settings"].console == "off"


@pytest.mark.parametrize(("mode", "variable"), [("online", ""), (None, "online")])
def test_a_mode_that_was_asked_for_stays(run: LoggedRun, monkeypatch, inits, mode, variable) -> None:
    monkeypatch.delenv("WANDB_MODE")
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    with pytest.raises(Unreachable):
        WandbLogger(mode=mode).start(run)
    assert len(inits) == 1
