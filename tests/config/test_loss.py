"""A loss of your own: a file of a group, a default of the project, or an import path."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.config.compose import compose
from slurmddp.errors import ConfigError
from support.runs.projects import make_project

SMOOTH = "_target_: losses.Smooth\nsmoothing: 0.1\n"
SHIPPED = {"_target_": "slurmddp.training.trainer.token_cross_entropy", "_partial_": True}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = make_project(tmp_path / "p", loss__smooth=SMOOTH)
    (folder / "losses.py").write_text(
        "class Smooth:\n    pass\n\ndef plain(logits, targets):\n    return 0\n"
    )
    return folder


def loss_of(project: Path, *overrides: str) -> object:
    return compose(overrides, project)["loss"]


def test_the_shipped_loss_is_the_default(tmp_path: Path) -> None:
    assert loss_of(make_project(tmp_path / "q")) == SHIPPED


@pytest.mark.parametrize("spelling", ["loss=smooth", "+loss=smooth", "++loss=smooth", "loss='smooth'"])
def test_a_loss_file_is_chosen_as_any_other_group(project: Path, spelling: str) -> None:
    assert loss_of(project, spelling) == {"_target_": "losses.Smooth", "smoothing": 0.1}
    assert loss_of(project, spelling, "loss.smoothing=0.2") == {"_target_": "losses.Smooth", "smoothing": 0.2}


def test_a_default_of_the_project_chooses_the_loss(project: Path) -> None:
    defaults = project / "conf" / "slurmddp.yaml"
    defaults.write_text("defaults:\n  - loss: smooth\n")
    assert loss_of(project) == {"_target_": "losses.Smooth", "smoothing": 0.1}
    assert loss_of(project, "loss=token_cross_entropy") == SHIPPED
    defaults.write_text("loss:\n  _target_: losses.plain\n")
    assert loss_of(project) == {"_target_": "losses.plain"}


def test_an_import_path_brings_no_key_of_the_shipped_loss(project: Path) -> None:
    assert loss_of(project, "loss._target_=losses.plain") == {"_target_": "losses.plain"}


def test_a_wrong_choice_names_the_near_ones(project: Path) -> None:
    with pytest.raises(ConfigError, match="no loss 'smoth'") as caught:
        loss_of(project, "loss=smoth")
    assert "Did you mean smooth" in caught.value.hint


def test_only_the_trainer_needs_a_loss(project: Path) -> None:
    (project / "train.py").write_text("")
    assert loss_of(project, "loss=null", "program.script=train.py") is None
    with pytest.raises(ConfigError, match="`loss` is empty, but the trainer needs a loss"):
        loss_of(project, "loss=null")


def test_a_key_that_composing_does_not_have_is_named_whole(project: Path) -> None:
    with pytest.raises(ConfigError, match="no choice 'loss@loss'") as caught:
        loss_of(project, "loss@loss=smooth")
    assert "loss=NAME" in caught.value.hint
