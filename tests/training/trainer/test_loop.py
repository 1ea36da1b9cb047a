"""The default program: it records its events, and refuses parts that do not fit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.training.trainer.loop import token_cross_entropy
from support.distributed import trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import curve, new_folder, trainer_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def gpt_on_text(folder: Path) -> dict[str, Any]:
    """Write small text files; return data and model of a tiny GPT on them."""
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.py").write_text("def f(x):\n    return x\n" * 20)
    text, gpt = "slurmddp.training.builtin.text.SourceText", "slurmddp.training.builtin.gpt.GPT"
    return {
        "data": {"_target_": text, "path": str(folder), "context": 8, "heldout_percent": 30},
        "model": {"_target_": gpt, "vocab_size": 98, "context": 8, "width": 8, "layers": 1, "heads": 1},
    }


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    train = {"steps": 8, "batch_size": 2, "log_every": 3, "eval_every": 4, "eval_batches": 3, "save_every": 3}
    scheduler = {"_target_": "slurmddp.training.builtin.schedules.cosine", "steps": 8, "warmup_steps": 2}
    train["sample_chars"] = 5
    return trainer_config(train=train, scheduler=scheduler, **gpt_on_text(tmp_path / "text"))


def test_a_training_records_its_events_and_metrics(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = new_folder(tmp_path / "run")
    folder.config_file.write_text("loggers: [csv, tensorboard]\n")
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), 4)
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), None)
    events = [(event["event"], event.get("step")) for event in folder.events()]
    assert [event for event in events if event[0] not in ("saved", "memory")] == [
        ("first_step", 1),
        ("signalled", None),
        ("resumed", 4),
        ("first_step", 5),
    ]
    assert [step for event, step in events if event == "saved"] == [3, 4, 6, 8]
    assert events.index(("saved", 4)) < events.index(("resumed", 4)), "a stop waits until all is durable"
    assert next(event for event in folder.events() if event["event"] == "resumed")["from"] == "disk"
    beside = {event["step"]: event["written_s"] > 0 for event in folder.events() if event["event"] == "saved"}
    assert beside == {3: True, 4: False, 6: True, 8: False}
    fresh, resumed = (event["phases"] for event in folder.events() if event["event"] == "first_step")
    assert list(fresh) == ["rendezvous", "data", "model", "checkpoint", "evaluation", "first_step"]
    assert list(resumed) == list(fresh), "the stop came before the evaluation that was due"
    assert all(seconds >= 0 for seconds in [*fresh.values(), *resumed.values()])
    signalled = next(event for event in folder.events() if event["event"] == "signalled")
    assert (signalled["signal"], signalled["rank"], signalled["attempt"]) == ("SIGTERM", 0, 0)
    assert [step for step, kind in curve(folder) if kind == "loss"] == [3, 6, 8]
    assert [step for step, kind in curve(folder) if kind == "eval_loss"] == [0, 4, 8]
    lines = list(read_lines(folder.metrics_file))
    with (folder.loggers_dir / "metrics.csv").open(newline="") as stream:
        rows = [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(stream)]
    assert rows == [{name: one[name] for name in one if name not in ("attempt", "time")} for one in lines]
    assert len(list(folder.tensorboard_dir.iterdir())) == 2, "one file for each start"
    line = next(line for line in lines if "loss" in line)
    assert line.keys() == {"step", "attempt", "time", "loss", "lr", "grad_norm", "tokens_per_s"}
    assert folder.sample_file.read_text().startswith("def ")
    assert len(folder.sample_file.read_text()) == 4 + 5
    assert sorted(path.name for path in folder.checkpoints_dir.glob("step-*"))[-1] == "step-0000000008"


def test_a_run_that_is_done_finishes_at_once(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = new_folder(tmp_path / "run")
    run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None)
    folder.sample_file.unlink()
    before = folder.metrics_file.read_text()
    assert run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None) == ["finished"]
    assert folder.metrics_file.read_text() == before
    assert [event["event"] for event in folder.events()][-2:] == ["saved", "resumed"]
    assert len(list(folder.checkpoints_dir.glob("step-*"))) == 3
    assert folder.sample_file.exists()


def test_without_a_possible_save_no_step_is_trained(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = new_folder(tmp_path / "run")
    folder.checkpoints_dir.write_text("in the way")
    for error in run_ranks(trainer_jobs.error_of_training, 2, config, str(folder.path)):
        assert "A test save to" in error and "failed" in error
    assert not folder.metrics_file.exists()
    assert folder.events() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"_target_": "builtins.int"}}, "data is a int"),
        ({"model": {"_target_": "builtins.dict"}}, "gives a dict"),
        ({"scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}, "ReduceLROnPlateau"),
        (
            {"train": {"stepps": 3}},
            "`train.stepps` is not a key of the configuration. Did you mean train.steps",
        ),
        ({"data": {"_target_": "builtins.list", "_args_": [[1, 2, 3, 4]]}}, "needs pairs"),
    ],
)
def test_parts_that_do_not_fit(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    folder = new_folder(tmp_path / "run")
    error = run_ranks(trainer_jobs.error_of_training, 1, {**config, **change}, str(folder.path))[0]
    assert error.startswith("ConfigError")
    assert message in error
    assert not list(folder.checkpoints_dir.glob("*"))


@pytest.mark.parametrize(
    ("logits", "targets", "found"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 1), "float32 (4, 3) and the data's target is float32 (4, 1)"),
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int32), "target is int32 (4,)"),
        (torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64), "target is int64 (2,)"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64), "output is float32 (4,)"),
        ({"logits": 1}, torch.zeros(4, dtype=torch.int64), "output is of type dict"),
    ],
)
def test_the_shipped_loss_names_its_setting_for_data_of_another_kind(
    logits: Any, targets: torch.Tensor, found: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        token_cross_entropy(logits, targets)
    assert "`loss` is token_cross_entropy" in caught.value.message and found in caught.value.message
    assert "loss._target_=" in caught.value.hint
