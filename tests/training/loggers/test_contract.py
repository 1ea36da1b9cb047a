"""Each logger, and the one in memory, keeps one experiment over all starts of a run."""

from __future__ import annotations

import csv
import importlib.util
import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError
from slurmddp.training.loggers import LoggedRun, Logger, MemoryLogger
from slurmddp.training.loggers.csv import CsvLogger
from slurmddp.training.loggers.mlflow import MlflowLogger
from slurmddp.training.loggers.tensorboard import TensorBoardLogger
from slurmddp.training.loggers.wandb import WandbLogger

Values = dict[str, dict[int, float]]
Case = tuple[Callable[[], Logger], Callable[[Path, Logger], Values]]


def in_memory(folder: Path, logger: Logger) -> Values:
    assert isinstance(logger, MemoryLogger)
    return logger.values


def in_csv(folder: Path, logger: Logger) -> Values:
    values: Values = {}
    with (folder / "metrics.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            step = int(row.pop("step"))
            for name, text in row.items():
                if text:
                    values.setdefault(name, {})[step] = float(text)
    return values


def in_tensorboard(folder: Path, logger: Logger) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert found.Tags()["tensors"] == ["config/text_summary"]
    return {name: {one.step: one.value for one in found.Scalars(name)} for name in found.Tags()["scalars"]}


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of wandb's file, which has the format of LevelDB's log: blocks of 32 KiB."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""


def in_wandb(folder: Path, logger: Logger) -> Values:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # As at the exit of a rank: then wandb's service has written all.
    values: Values = {}
    for file in sorted(folder.glob("wandb/offline-run-*-gpt-1/run-gpt-1.wandb")):
        found = list(map(Record.FromString, records(file)))
        axes = [(one.metric.glob_name, one.metric.step_metric) for one in found if one.HasField("metric")]
        assert ("*", "step") in axes, "wandb's own step can't go back"
        for record in found:
            items = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
            for name in items.keys() - {"step"}:
                if not name.startswith("_"):
                    values.setdefault(name, {})[items["step"]] = items[name]
    return values


def in_mlflow(folder: Path, logger: Logger) -> Values:
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert run.data.params == {"train.steps": "4", "model._target_": "gpt"}
    return {
        name: {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


CASES = {
    "memory": (MemoryLogger, in_memory),
    "csv": (CsvLogger, in_csv),
    "tensorboard": (TensorBoardLogger, in_tensorboard),
    "wandb": (WandbLogger, in_wandb),
    "mlflow": (MlflowLogger, in_mlflow),
}


@pytest.mark.parametrize("name", CASES)
def test_a_logger_continues_its_experiment_and_replaces_repeated_steps(name: str, run: LoggedRun) -> None:
    made, read = CASES[name]
    first: Logger = made()
    first.start(run)
    begun = int(time.time())
    for step in (1, 2, 3):
        first.log({"loss": 1.0 / step, "images_per_s": 7.0}, step)
    first.log({"val/f1": 0.25}, 3)
    first.flush()
    first.close(finished=False)

    # A new process, which has nothing but the folder.
    second = first if isinstance(first, MemoryLogger) else made()
    while name == "wandb" and int(time.time()) <= begun:  # Its folders are named by the second.
        time.sleep(0.05)
    second.start(replace(run, first_step=3, is_continued=True))
    for step in (3, 4):
        second.log({"loss": 10.0 * step, "images_per_s": 8.0, "val/f1": 0.5}, step)
    second.close(finished=True)
    assert read(run.folder, second) == {
        "loss": {1: pytest.approx(1.0), 2: pytest.approx(0.5), 3: 30.0, 4: 40.0},
        "images_per_s": {1: 7.0, 2: 7.0, 3: 8.0, 4: 8.0},
        "val/f1": {3: 0.5, 4: 0.5},
    }


@pytest.mark.parametrize("name", ["memory", "csv", "tensorboard"])
def test_steps_that_are_not_logged_again_are_gone(name: str, run: LoggedRun) -> None:
    made, read = CASES[name]
    logger: Logger = made()
    for start, steps in ((1, (1, 2, 3, 4)), (3, (3,))):
        logger.start(replace(run, first_step=start))
        for step in steps:
            logger.log({"loss": float(start)}, step)
        logger.close(finished=True)
    assert read(run.folder, logger) == {"loss": {1: 1.0, 2: 1.0, 3: 3.0}}


def test_mlflow_without_a_server_or_a_data_base_says_to_name_one(
    run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sqlalchemy" else find(name, *more)
    )
    with pytest.raises(ConfigError, match=r"can't write to sqlite:///a\.db.*MLFLOW_TRACKING_URI"):
        MlflowLogger(tracking_uri="sqlite:///a.db").start(run)
