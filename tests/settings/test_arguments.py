"""The arguments of a script arrive as typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurmddp.cli.main import main
from slurmddp.config.composition.compose import compose
from slurmddp.control.jobs import settings_of_program
from slurmddp.errors import EXIT_CONFIG, ConfigError
from slurmddp.runs.folder.create import prepare
from slurmddp.settings.arguments import as_typed, spelled
from slurmddp.settings.spec import CONTROLLER
from support.runs.projects import job_of


@pytest.fixture
def project(project: Path) -> Path:
    (project / "train.py").write_text("")
    return project


def arguments(project: Path, typed: str) -> object:
    return compose(["program.script=train.py", f"program.args={typed}"], project)["program"]["args"]


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


@pytest.mark.parametrize(
    "value",
    [
        *(
            "a100x8",
            "package.module.Class",
            "",
            "a b",
            "01:00:00",
            "true",
            "Null",
            "nan",
            "7",
            "it's",
            'say "x"\\',
        ),
        *(3, -0.5, 1e-7, True, None, [], ["a,b", 1, [None]], {"x": 1, "y": ["true"]}),
    ],
)
def test_a_value_of_python_is_spelled_so_that_hydra_reads_the_same_value(value: object) -> None:
    (read,) = OverridesParser.create().parse_overrides([f"key={spelled(value)}"])
    assert read.value() == value and type(read.value()) is type(value)


@pytest.mark.parametrize("typed", ["[--lr, 3", "['a]", "--name 'a", "[a]]", "[a],[b]"])
def test_arguments_without_an_end_are_refused(project: Path, typed: str) -> None:
    with pytest.raises(ConfigError, match=r"program\.args") as caught:
        arguments(project, typed)
    hinted = shlex.split(caught.value.hint.partition(": ")[2])[0]
    assert arguments(project, hinted.removeprefix("program.args=")) == ["--epochs", "20"]


def name_of(project: Path, *typed: str) -> str:
    return job_of(project, "program.script=train.py", *typed).run_name


def test_the_run_of_a_script_is_named_after_it(project: Path) -> None:
    assert name_of(project).startswith("train-")
    (project / "my model (2).py").write_text("")
    assert compose(["program.script='my model (2).py'"], project)["name"] == "my-model-2"
    assert name_of(project, "name=mine").startswith("mine-")


def test_what_a_script_never_sees_changes_no_name(project: Path) -> None:
    name = name_of(project)
    for typed in ("model.width=3", "train.steps=7", "optimizer.lr=1", "loss=null", "+strategy.bucket_mb=3"):
        assert name_of(project, typed) == name, typed
    for typed in ("program.args=--x", "seed=3", "nodes=2", "ranks_per_node=1"):
        assert name_of(project, typed) != name


def test_a_script_is_shown_without_what_only_the_trainer_reads(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    assert main(["train", "--cfg", "program.script=train.py"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert not {"model", "data", "loss", "optimizer", "scheduler", "strategy", "train"} & set(shown)
    assert shown["program"]["script"] == "train.py" and shown["nodes"] == 1
    assert main(["train", "--cfg"]) == 0
    assert "model" in yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "reaches"),
    [
        ("[--lr, 0.5, 3, true, null, 'x y']", ["--lr", "0.5", "3", "true", "null", "x y"]),
        ("--lr 1e-3 --flag", ["--lr", "1e-3", "--flag"]),
    ],
)
def test_arguments_of_a_file_are_texts(project: Path, text: str, reaches: list[str]) -> None:
    (project / "conf" / "slurmddp.yaml").write_text(f"program:\n  script: train.py\n  args: {text}\n")
    assert compose([], project)["program"]["args"] == reaches
    assert compose(["program.args=[1e3]"], project)["program"]["args"] == ["1e3"]


def test_the_own_function_of_a_person_gets_its_keys_in_their_types(project: Path) -> None:
    (project / "mine.py").write_text("def train(distributon, config, folder):\n    pass\n")
    composed = compose(["program._target_=mine.train", "program.args=[1, true]"], project)
    assert composed["program"]["args"] == [1, True]


PIECES = [
    "\\",
    '"',
    "'",
    "$",
    "${",
    "${oc.env:HOME}",
    "}",
    "[",
    "]",
    ",",
    "=",
    "-",
    "\n",
    "\r",
    "\x85",
    "\u2028",
    "x" * 300,
]
WORDS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0")
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(words=[*PIECES, "\\${x}", "\\\\${x}", "a\\\n", '"\\'])
@given(words=st.lists(WORDS.filter(lambda word: word != "???"), max_size=40))
def test_words_after_the_program_are_the_same_in_the_run_folder(project: Path, words: list[str]) -> None:
    typed = settings_of_program(["train.py", *words])
    folder = prepare(job_of(project, *typed), None)
    assert folder.config()["program"]["args"] == words
    assert folder.typed() == typed
    assert as_typed(typed) == ["train.py", *words]


def test_arguments_that_refer_to_other_values_are_shown_as_a_setting() -> None:
    shown = as_typed(["program.script=fit.py", "program.args=[--width,${model.width}]"])
    assert shown == ["program.args=[--width,${model.width}]", "fit.py"]


def test_the_workers_of_a_controller_are_no_part_of_its_command() -> None:
    typed = ["nodes=2", f'program.script="{CONTROLLER}"', 'program.args=["control.py","--lr","0.1"]']
    assert as_typed(typed) == ["nodes=2", "control.py", "--lr", "0.1"]


@pytest.mark.parametrize("words", [["???"], ["\udc80"], ["-x", "a\ud800"]])
def test_words_that_no_run_folder_can_hold_are_refused(
    project: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert main(["run", "train.py", *words]) == EXIT_CONFIG
    assert not (project / "runs").exists()
