"""The arguments of a person's script reach it as they were typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from projects import make_project

from slurmddp import config
from slurmddp.errors import ConfigError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = make_project(tmp_path / "p")
    (folder / "train.py").write_text("")
    return folder


def arguments(project: Path, typed: str) -> object:
    return config.compose(["program.script=train.py", f"program.args={typed}"], project)["program"]["args"]


@pytest.mark.parametrize(
    ("typed", "reaches"),
    [
        ("[--lr=1e-3,6,1]", ["--lr=1e-3", "6", "1"]),
        ("[--lr, 1e-3, 1e5, 1_000, 007, 12:30, 0x10, .5]",
         ["--lr", "1e-3", "1e5", "1_000", "007", "12:30", "0x10", ".5"]),
        ("[true, True, null, None, off, nan]", ["true", "True", "null", "None", "off", "nan"]),
        ("['two words', \"it's\", \"say \\\"hi\\\"\", ';']", ["two words", "it's", 'say "hi"', ";"]),
        ("[--name=a b, {a: 1, b: 2}, [3, 4], x\\,y]", ["--name=a b", "{a: 1, b: 2}", "[3, 4]", "x,y"]),
        ("[--out={run_dir}/x, 50%, a&b, c;d, #e, *.py]",
         ["--out={run_dir}/x", "50%", "a&b", "c;d", "#e", "*.py"]),
        ("[--width, ${model.width}]", ["--width", "64"]),
        ("['', a]", ["", "a"]),
        ("[]", []),
        ("[ ]", []),
        ("null", []),
        ("", []),
        ("--epochs", ["--epochs"]),
        ("--lr 1e-3 --flag 'two words' --x=true", ["--lr", "1e-3", "--flag", "two words", "--x=true"]),
        ("'--lr 1e-3'", ["--lr", "1e-3"]),
        ('"[--lr=1e-3,6,1]"', ["--lr=1e-3", "6", "1"]),
        ("a,b", ["a,b"]),
        ("C:\\temp", ["C:temp"]),
    ],
)  # fmt: skip
def test_arguments_reach_the_script_as_typed(project: Path, typed: str, reaches: list[str]) -> None:
    assert arguments(project, typed) == reaches


@pytest.mark.parametrize("typed", ["[--lr, 3", "['a]", "--name 'a", "[a]]", "[a],[b]"])
def test_arguments_without_an_end_are_refused(project: Path, typed: str) -> None:
    with pytest.raises(ConfigError, match=r"program\.args") as caught:
        arguments(project, typed)
    hinted = shlex.split(caught.value.hint.partition(": ")[2])[0]
    assert arguments(project, hinted.removeprefix("program.args=")) == ["--epochs", "20"]


def test_arguments_without_a_script_are_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"`program.args`.*no script") as caught:
        config.compose(["program.args=--epochs 3"], project)
    assert "program.script=" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "reaches"),
    [
        ("[--lr, 0.5, 3, true, null, 'x y']", ["--lr", "0.5", "3", "true", "null", "x y"]),
        ("--lr 1e-3 --flag", ["--lr", "1e-3", "--flag"]),
    ],
)
def test_arguments_of_a_file_are_texts(project: Path, text: str, reaches: list[str]) -> None:
    (project / "conf" / "slurmddp.yaml").write_text(f"program:\n  script: train.py\n  args: {text}\n")
    assert config.compose([], project)["program"]["args"] == reaches
    assert config.compose(["program.args=[1e3]"], project)["program"]["args"] == ["1e3"]


def test_the_own_function_of_a_person_gets_its_keys_in_their_types(project: Path) -> None:
    (project / "mine.py").write_text("def train(distributon, config, folder):\n    pass\n")
    composed = config.compose(["program._target_=mine.train", "program.args=[1, true]"], project)
    assert composed["program"]["args"] == [1, True]
