"""The program that wrote a checkpoint: a load names it, and refuses the checkpoints of another program."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import slurmddp
from slurmddp.checkpoint.files import manifest
from slurmddp.errors import CheckpointError, StoppedAtCheckpoint
from slurmddp.training.distributon import Distributon

pytestmark = pytest.mark.distributed

Run = Callable[..., int]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that trains as the program FILE with its arguments, and returns the last step."""
    monkeypatch.chdir(tmp_path)

    def run(file: str | None, *words: str, steps: int = 2, **load: Any) -> int:
        main = ModuleType("__main__")
        if file is not None:
            main.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "argv", [file or "-c", *words])
        with Distributon() as d:
            d.launch()
            model = d.setup_model(nn.Linear(2, 1))
            optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            step = d.load(model=model, optimizer=optimizer, **load) or 0
            while step < steps:
                d.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                step += 1
            d.save(step, model=model, optimizer=optimizer, root=load.get("root"))
        return step

    return run


def test_a_load_says_which_step_of_whom_it_resumes_and_that_nothing_is_left(
    program: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    program("digits.py", "--lr", "3e-3")
    assert capsys.readouterr().err == ""

    assert program("digits.py", "--lr", "3e-3", steps=4) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"slurmddp: resuming from step 2 of \./checkpoints \(saved \d+s ago by digits\.py --lr 3e-3\)", line
    )

    program("digits.py", "--lr", "1e-2", steps=4)
    other, nothing = capsys.readouterr().err.splitlines()
    assert other.endswith("ago by digits.py --lr 3e-3; this is digits.py --lr 1e-2)")
    assert "no step followed step 4 of ./checkpoints: nothing was left to train" in nothing
    assert "delete that folder or pass another folder as root=" in nothing

    program("digits.py", steps=4, step=4)
    assert capsys.readouterr().err.startswith("slurmddp: loaded step 4 of ./checkpoints (saved ")


@pytest.mark.parametrize("other", ["gan.py", "old/digits.py"])
def test_the_checkpoints_of_another_program_are_refused_until_their_folder_is_named(
    program: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    program("digits.py")
    with pytest.raises(CheckpointError) as refused:
        program(other)
    assert f"The checkpoints in {tmp_path}/checkpoints belong to another program: digits.py" in str(
        refused.value
    )
    assert f"this program is {other}. Nothing was loaded." in refused.value.message
    for remedy in ("root=FOLDER in load and in save", "Or delete", "load(..., root='checkpoints')"):
        assert remedy in refused.value.hint
    capsys.readouterr()

    assert program(other, root="checkpoints", steps=3) == 3
    assert "by digits.py; this is" in capsys.readouterr().err
    assert program(other, steps=3) == 3, "the newest one is its own by now"


def save_without_load(*steps: int) -> None:
    with Distributon() as d:
        d.launch()
        model = d.setup_model(nn.Linear(2, 1))
        for step in steps:
            d.save(step, model=model, keep_last=2, metrics={"loss": step}, keep_best=("loss", "min"))


def test_a_program_that_only_saves_deletes_and_replaces_nothing_of_another_program(
    program: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    program("digits.py", steps=1)
    program("digits.py", steps=4)
    before = {
        number: (folder / manifest.folder_name(number) / manifest.MANIFEST_FILE).read_text()
        for number in (1, 4)
    }
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "gan.py"))
    capsys.readouterr()
    save_without_load(2, 3, 4, 5, 6)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slurmddp: ./checkpoints also contains checkpoints of digits.py. They are kept; ")
    assert "Give gan.py a folder of its own: root=FOLDER in save and in load." in line
    assert (folder / "abandoned-step-0000000004" / manifest.MANIFEST_FILE).read_text() == before[4]
    assert (folder / "step-0000000001" / manifest.MANIFEST_FILE).read_text() == before[1]
    own = [path for path in manifest.checkpoint_folders(folder) if manifest.program_of(path) == "gan.py"]
    assert [manifest.step_of(path) for path in own] == [6, 5, 2], "its own best one is kept"

    with pytest.raises(
        CheckpointError, match=r"gan\.py saved the newest checkpoint .*, and this program is digits\.py"
    ):
        program("digits.py")


def test_a_program_without_a_name_and_an_earlier_checkpoint_are_not_compared(
    program: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(None) == 2 and program("digits.py", steps=3) == 3
    assert "resuming from step 2 of ./checkpoints\n" in capsys.readouterr().err
    inside = Path(slurmddp.__file__).parent / "launchers" / "agent" / "__main__.py"
    assert program(str(inside), steps=4) == 4
    assert "program" not in manifest.load_manifest(tmp_path / "checkpoints" / manifest.folder_name(4)).meta


def test_secrets_among_the_arguments_are_not_kept(program: Run, tmp_path: Path) -> None:
    words = ["--api-key", "s1", "--wandb_token=s2", "logger.password=s3", "--tokens", "--lr", "1", "s4"]
    program("digits.py", *words)
    meta = manifest.load_manifest(tmp_path / "checkpoints" / manifest.folder_name(2)).meta
    kept = meta["program"]["command"].replace("'(not shown)'", "X").replace("(not shown)", "X")
    assert not any(secret in kept for secret in ("s1", "s2", "s3")) and kept.endswith("--tokens --lr 1 s4")


def test_a_stop_or_an_error_before_the_first_step_leaves_something_to_train(
    program: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program("digits.py")
    for error in (StoppedAtCheckpoint, ValueError):
        with pytest.raises(error), Distributon() as d:
            d.launch()
            model = d.setup_model(nn.Linear(2, 1))
            d.load(model=model, optimizer=d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
            raise error("before the first step")
        assert "nothing was left" not in capsys.readouterr().err
