"""Tab completion: what can stand next on a command line, and the shells that ask for it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.cli.completion import (
    SHELLS,
    active_runs,
    benchmarks,
    clusters,
    parser,
    runs,
    runs_and_sweeps,
    script,
    settings,
    settings_and_scripts,
    sweep_names,
)
from slurmddp.cli.main import COMMANDS, _module, main
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.layout import RunFolder
from support.runs.cli_runs import end, start

BASH = """
slurmddp() { "$PYTHON" -m slurmddp "$@"; }
eval "$(slurmddp completion bash)"
for line; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete slurmddp
    echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        ("mod", {"model="}),
        ("train.st", {"train.steps="}),
        ("+clu", {"+cluster="}),
        ("clu", {"cluster="}),
        ("model=", {"model=gpt_small"}),
        ("+cluster=b", {"+cluster=big"}),
        ("train.compile=", {"train.compile=true", "train.compile=false"}),
        ("train.precision=b", {"train.precision=bf16"}),
        ("hydra/sw", {"hydra/sweeper=optuna"}),
        ("hydra/sweeper=", {"hydra/sweeper=optuna"}),
        ("hydra.sweeper.n", {"hydra.sweeper.n_trials=", "hydra.sweeper.n_jobs="}),
        ("train.steps=", set()),
        ("nothing", set()),
        ("nothing=", set()),
    ],
)
def test_settings_and_choices_of_the_project_are_completed(project: Path, typed: str, some: set[str]) -> None:
    found = settings(typed)
    assert (some <= set(found)) if some else found == []
    assert all(one.startswith(typed) for one in found)


def test_the_arguments_of_the_chosen_class_are_completed(project: Path) -> None:
    assert settings("model.w") == ["model.width="]
    assert {"model.vocab_size=", "model.layers=", "model._target_="} <= set(settings("model."))
    (project / "conf" / "slurmddp.yaml").write_text("seed: [\n")
    assert settings("model.w") == [], "a broken file is no reason for a traceback"


def test_a_script_is_completed_before_the_keys_that_begin_so(project: Path) -> None:
    for name in ("train.py", "training.txt", "tools/fit.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).touch()
    found = settings_and_scripts("tr")
    assert found[0] == "train.py" and "train.steps=" in found and "training.txt" not in found
    assert settings_and_scripts("tools/f") == ["tools/fit.py"] and "tools/" in settings_and_scripts("to")
    assert benchmarks("s") == ["strategies", "scaling", "show"]


def test_stop_and_cancel_complete_runs_that_may_live(make_run) -> None:
    for name in ("gpt-00000001", "gpt-00000002"):
        start(make_run(name))
    end(RunFolder(index.find("gpt-00000002").path), "finished")
    assert active_runs("gp") == ["gpt-00000001"]
    chosen = parser(COMMANDS, _module, "stop")._actions[-1].choices
    assert chosen is not None
    assert any(getattr(one, "completer", None) is active_runs for one in chosen["stop"]._actions)  # type: ignore[call-overload]


def test_sweeps_are_completed_where_they_are_taken(make_run) -> None:
    folders = [make_run("fit-00000001"), make_run("fit-00000002")]
    for name, folder in zip(("fit-sweep-1a", "fit-sweep-2b"), folders, strict=True):
        sweeps.write(folder.path.parent, name, [(folder.name, ["seed=1"])])
        start(folder)
    end(folders[0], "finished")
    assert sweep_names("fi") == ["fit-sweep-1a", "fit-sweep-2b"]
    assert set(runs_and_sweeps("fit")) == {"fit-00000001", "fit-00000002", "fit-sweep-1a", "fit-sweep-2b"}
    assert active_runs("fit-s") == ["fit-sweep-2b"]
    for command, completer in {"list": sweep_names, "status": runs_and_sweeps, "cancel": active_runs}.items():
        chosen = parser(COMMANDS, _module, command)._actions[-1].choices
        assert any(getattr(one, "completer", None) is completer for one in chosen[command]._actions), command


def test_runs_and_clusters_are_completed(make_run, project: Path) -> None:
    make_run("gpt-0a1b2c3d")
    make_run("other-0a1b2c3d")
    assert runs("gp") == ["gpt-0a1b2c3d"] and set(runs("")) == {"gpt-0a1b2c3d", "other-0a1b2c3d"}
    assert clusters("b") == ["big"]


@pytest.mark.parametrize("command", [*COMMANDS])
def test_every_run_and_setting_of_a_command_has_a_completer(command: str) -> None:
    (actions,) = [one.choices for one in parser(COMMANDS, _module, command)._actions if one.choices]
    arguments = actions[command]._actions
    named = {one.dest: one for one in arguments if "RUN" in str(one.metavar) or "=" in str(one.metavar)}
    assert {name for name, one in named.items() if not hasattr(one, "completer")} == set()
    others = [one for name, one in actions.items() if name != command]
    assert all(len(one._actions) == 1 for one in others if isinstance(one, argparse.ArgumentParser))


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_its_lines(shell: str, capsys) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell) and "slurmddp" in printed


def test_bash_completes_commands_flags_runs_and_choices(make_run, project: Path) -> None:
    make_run("gpt-0a1b2c3d")
    lines = {
        "slurmddp st": "status stop",
        "slurmddp status gp": "gpt-0a1b2c3d",
        "slurmddp train --dry": "--dry-run",
        "slurmddp train +cluster=": "big small",
        "slurmddp cluster check bi": "big",
        "slurmddp run seed=1 -n 1 --dry": "--dry-run",
        "slurmddp run seed=1 -n 1 show.py --dry": "",
        "slurmddp run -n 1 show.py tr": "",
        "slurmddp exec -n 1 show.py -": "",
    }
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *lines],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = [set(line.split()) for line in done.stdout.splitlines()]
    expected = [set(words.split()) for words in lines.values()]
    assert [one & words if words else one for one, words in zip(found, expected, strict=True)] == expected
