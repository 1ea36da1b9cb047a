"""The default program: it learns, resumes bit for bit after a stop, and records its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.errors import ConfigError
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.training.run_log import signal_and_rank
from slurmddp.training.trainer.components import is_due
from slurmddp.training.trainer.loop import token_cross_entropy
from support.distributed import trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import curve, new_folder

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        lines = [f"def f{number}_{i}(x):\n    return x + {i * number}\n" for i in range(20)]
        (folder / f"{number}.py").write_text("".join(lines))
    return folder


def make_config(text: Path, **train: Any) -> dict[str, Any]:
    settings = {
        "steps": 8,
        "batch_size": 2,
        "log_every": 3,
        "eval_every": 4,
        "eval_batches": 3,
        "save_every": 3,
    }
    return {
        "seed": 0,
        "nodes": 1,
        "ranks_per_node": 2,
        "train": {**settings, "sample_chars": 5, **train},
        "data": {
            "_target_": "slurmddp.training.builtin.text.SourceText",
            "path": str(text),
            "context": 8,
            "heldout_percent": 30,
        },
        "model": {
            "_target_": "slurmddp.training.builtin.gpt.GPT",
            "vocab_size": 98,
            "context": 8,
            "width": 32,
            "layers": 2,
            "heads": 2,
            "dropout": 0.2,
        },
        "loss": {"_target_": "slurmddp.training.trainer.token_cross_entropy", "_partial_": True},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
        "scheduler": {
            "_target_": "slurmddp.training.builtin.schedules.cosine",
            "steps": 8,
            "warmup_steps": 2,
        },
        "strategy": {"name": "ddp"},
        "program": {"_target_": "slurmddp.training.trainer.train"},
    }


def test_a_training_records_its_events_and_metrics(tmp_path: Path, text: Path) -> None:
    folder, config = new_folder(tmp_path / "run"), make_config(text)
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), 4)
    run_ranks(trainer_jobs.train_once, 2, config, str(folder.path), None)
    events = [(event["event"], event.get("step")) for event in folder.events()]
    assert [event for event in events if event[0] != "saved"] == [
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
    line = next(line for line in read_lines(folder.metrics_file) if "loss" in line)
    assert line.keys() == {"step", "attempt", "time", "loss", "lr", "tokens_per_s"}
    assert folder.sample_file.read_text().startswith("def ")
    assert len(folder.sample_file.read_text()) == 4 + 5
    assert sorted(path.name for path in folder.checkpoints_dir.glob("step-*"))[-1] == "step-0000000008"


def test_a_run_that_is_done_finishes_at_once(tmp_path: Path, text: Path) -> None:
    folder, config = new_folder(tmp_path / "run"), make_config(text)
    run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None)
    folder.sample_file.unlink()
    before = folder.metrics_file.read_text()
    assert run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None) == ["finished"]
    assert folder.metrics_file.read_text() == before
    assert [event["event"] for event in folder.events()][-2:] == ["saved", "resumed"]
    assert len(list(folder.checkpoints_dir.glob("step-*"))) == 3
    assert folder.sample_file.exists()


def test_it_learns(tmp_path: Path, text: Path) -> None:
    folder = new_folder(tmp_path / "run")
    config = make_config(text, steps=60, batch_size=8, eval_every=0, save_every=0, log_every=20)
    config["scheduler"] = None
    run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None)
    lines = curve(folder)
    assert lines[60, "eval_loss"][0] < 0.7 * lines[0, "eval_loss"][0]
    assert lines[60, "loss"][0] < lines[20, "loss"][0]


def test_the_heldout_loss_does_not_depend_on_the_ranks(text: Path) -> None:
    config = make_config(text, eval_batches=7, batch_size=3)
    found = [loss for ranks in (1, 2, 4) for loss, _ in run_ranks(trainer_jobs.heldout_loss, ranks, config)]
    assert found == pytest.approx([found[0]] * 7, rel=1e-6)
    assert all(quiet for _, quiet in run_ranks(trainer_jobs.heldout_loss, 2, config))


def test_a_loss_that_is_not_finite_names_the_step(tmp_path: Path, text: Path) -> None:
    folder = new_folder(tmp_path / "run")
    config = make_config(text, log_every=5, clip_norm=None)
    config["optimizer"] = {"_target_": "torch.optim.SGD", "lr": 1e30}
    config["scheduler"] = None
    for error in run_ranks(trainer_jobs.error_of_training, 2, config, str(folder.path)):
        assert "The loss of step 2 is nan" in error
        assert "optimizer.lr" in error
    assert not list(folder.checkpoints_dir.glob("*")), "nothing is saved of it"


def test_without_a_possible_save_no_step_is_trained(tmp_path: Path, text: Path) -> None:
    folder = new_folder(tmp_path / "run")
    folder.checkpoints_dir.write_text("in the way")
    for error in run_ranks(trainer_jobs.error_of_training, 2, make_config(text), str(folder.path)):
        assert "A test save to" in error and "failed" in error
    assert not folder.metrics_file.exists()
    assert folder.events() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "data": {
                    "_target_": "slurmddp.training.builtin.text.SourceText",
                    "context": 8,
                    "path": "/nowhere",
                }
            },
            "/nowhere",
        ),
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
def test_parts_that_do_not_fit(tmp_path: Path, text: Path, change: dict[str, Any], message: str) -> None:
    folder = new_folder(tmp_path / "run")
    error = run_ranks(trainer_jobs.error_of_training, 1, {**make_config(text), **change}, str(folder.path))[0]
    assert error.startswith("ConfigError")
    assert message in error
    assert not list(folder.checkpoints_dir.glob("*"))


def test_another_model_is_not_loaded_into(tmp_path: Path, text: Path) -> None:
    folder, config = new_folder(tmp_path / "run"), make_config(text, steps=2)
    run_ranks(trainer_jobs.train_once, 1, config, str(folder.path), None)
    config["model"]["width"] = 16
    error = run_ranks(trainer_jobs.error_of_training, 1, config, str(folder.path))[0]
    assert error.startswith("CheckpointError: The checkpoint's model does not fit this GPT")
    assert checkpoint.latest(folder.checkpoints_dir) is not None


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path, text: Path) -> None:
    config = make_config(text, steps=100_000, save_every=0, eval_every=0, log_every=100)
    config["data"] = {"_target_": "support.distributed.trainer_jobs.SignalText"}
    config["model"] = {"_target_": "support.distributed.rank_jobs.Net"}
    folder = new_folder(tmp_path / "run")
    folder.config_file.write_text(json.dumps(config))
    assert run_ranks(trainer_jobs.train_until_signalled, 2, config, str(folder.path), 20) == [75, 75]
    events = {event["event"]: event for event in folder.events()}
    assert 20 <= events["saved"]["step"] < 100_000
    assert (events["signalled"]["signal"], events["signalled"]["rank"]) == ("SIGTERM", 1)


def test_every_third_step_is_due() -> None:
    assert [is_due(3, step) for step in range(7)] == [True, False, False, True, False, False, True]
    assert not is_due(0, 0)


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


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        ("SIGTERM on rank 12 (node-3)", {"signal": "SIGTERM", "rank": 12}),
        ("the file /runs/a/stop", {"signal": "the file /runs/a/stop", "rank": None}),
        ("", {"signal": "", "rank": None}),
    ],
)
def test_the_reason_of_a_stop_has_signal_and_rank(reason: str, facts: dict[str, Any]) -> None:
    assert signal_and_rank(reason) == facts


def test_the_shipped_warm_up_fits_a_training_of_any_length() -> None:
    from slurmddp.training.builtin.schedules import cosine

    for steps in (1, 6, 19, 400):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        assert cosine(optimizer, steps=steps, warmup_steps=None).get_last_lr()[0] == (
            1.0 if steps < 20 else pytest.approx(1 / (steps // 20 + 1))
        )
