"""The key `loggers`: names, options and libraries, checked before anything is queued."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.errors import ConfigError
from slurmddp.settings import loggers
from slurmddp.settings.loggers import NAMED, is_installed, targets
from slurmddp.training.instantiate import locate


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this Python have no library of any logger."""
    monkeypatch.setattr(loggers, "is_installed", lambda library: False)


def test_names_options_and_own_classes_become_targets() -> None:
    own = {"_target_": "mine.Logger", "size": 3}
    found = targets(["csv", {"name": "wandb", "project": "x"}, own])
    assert found == {
        "loggers[0]": {"_target_": "slurmddp.training.loggers.csv.CsvLogger"},
        "loggers[1]": {"_target_": "slurmddp.training.loggers.wandb.WandbLogger", "project": "x"},
        "loggers[2]": own,
    }
    assert targets("csv") == {"loggers": found["loggers[0]"]}
    assert targets(None) == targets([]) == {}


def test_the_options_are_the_arguments_of_the_classes() -> None:
    for named in NAMED.values():
        taken = inspect.signature(locate(named.target)).parameters.values()
        assert tuple(one.name for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD) == named.options


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("tensorbord", "known loggers are tensorboard, csv, wandb, mlflow. Did you mean tensorboard"),
        ([3], r"`loggers\[0\]` is 3; known loggers"),
        ({"project": "x"}, "known loggers are"),
        (["csv", "csv"], r"`loggers\[1\]` names csv a second time"),
        ({"name": "wandb", "projekt": "x"}, "`loggers.projekt` is not an option of wandb.*project"),
        ({"name": "csv", "path": "x"}, "csv takes no options"),
    ],
)
def test_a_wrong_logger_is_refused(value, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        targets(value)


def test_auto_is_tensorboard_where_it_is_installed(lacking) -> None:
    assert targets("auto") == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loggers, "is_installed", lambda library: library == "tensorboard")
        assert list(targets(["auto"]).values()) == [{"_target_": NAMED["tensorboard"].target}]


def test_a_missing_library_is_refused_unless_another_python_runs_the_ranks(lacking) -> None:
    with pytest.raises(ConfigError, match=r"names mlflow.*pip install 'slurmddp\[mlflow\]'") as refused:
        targets(["csv", "mlflow"])
    assert sys.executable in str(refused.value)
    assert len(targets(["csv", "mlflow"], same_python=False)) == 2


def test_a_folder_of_output_is_no_installed_package(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "loggers_output").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("loggers_output") is not None
    assert not is_installed("loggers_output") and is_installed("yaml") and not is_installed("no_such.thing")


def test_the_command_line_chooses_loggers_and_stays_the_same_run(tmp_path: Path, monkeypatch) -> None:
    jobs = [
        build_job(compose(more, tmp_path), project_dir=tmp_path)
        for more in ([], ["loggers=[csv,{name:wandb,project:x}]"], ["loggers=null"])
    ]
    assert len({job.run_name for job in jobs}) == 1
    given = [job.program.config["loggers"] for job in jobs]
    assert given == ["auto", ["csv", {"name": "wandb", "project": "x"}], None]
    with pytest.raises(ConfigError, match=r"`loggers\._target_` is nowhere\.Logger, but there is no module"):
        compose(["loggers={_target_: nowhere.Logger}"], tmp_path)
