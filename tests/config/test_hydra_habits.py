"""Each row of docs/guides/hydra.md: a habit works, or is refused with the way to say the same."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_FINISHED, EXIT_USAGE
from support import ROOT
from support.runs.projects import make_project

PAGE = ROOT / "docs" / "guides" / "hydra.md"
NET = """\
from dataclasses import dataclass
from inspect import signature
import omegaconf
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
import sizes

@dataclass
class Net:
    _target_: str = "torch.nn.Linear"
    width: int = sizes.WIDTH
    must: int = MISSING

# OmegaConf 2.4 has renamed it; in 2.3 the new name belongs to an older function.
is_renamed = not omegaconf.__version__.startswith("2.3.")
register = OmegaConf.register_resolver if is_renamed else OmegaConf.register_new_resolver
register("twice", lambda x: 2 * x, replace=True)
# Hydra 1.4 warns when a name is stored again without `replace`, which Hydra 1.3 does not have.
options = {"replace": True} if "replace" in signature(ConfigStore.store).parameters else {}
ConfigStore.instance().store(group="model", name="net", node=Net, **options)
ConfigStore.instance().store(
    group="place", name="far", node={"seed": 8}, package="_global_", **options
)
"""


@dataclass
class Case:
    """A command line in a project, and the values of its configuration or the words of its refusal."""

    words: str
    values: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    files: dict[str, str] = field(default_factory=dict)


HABITS = {
    "choose a file of a group": [Case("loss=bce", {"loss._target_": "torch.nn.BCELoss"})],
    "own groups": [
        Case("experiment=long", {"seed": 5}),
        *(
            Case(words, {"seed": seed, "train.steps": 9})
            for words, seed in (
                ("+experiment=[long,late]", 8),
                ("experiment=[late,long]", 5),
                ("experiment=[long]", 5),
            )
        ),
        *(
            Case(
                words, {"seed": seed}, files={"conf/slurmddp.yaml": f"defaults: [{{experiment: {chosen}}}]\n"}
            )
            for chosen in ("late", "[late]")
            for words, seed in (("experiment=[late,long]", 5), ("experiment=[long,late]", 8))
        ),
        Case("~experiment=[long]", {"seed": 0}, files={"conf/slurmddp.yaml": "{}\n"}),
        Case("experiment=[long,lost]", refused="There is no experiment 'lost'"),
        *(
            Case(
                words,
                {"seed": seed},
                files={
                    "conf/experiment/short.yaml": "# @package _global_\nseed: 2\n",
                    "conf/slurmddp.yaml": "defaults: [{experiment: short}]\n",
                },
            )
            for words, seed in (("", 2), ("experiment=long", 5), ("~experiment", 0))
        ),
    ],
    "`@package` in a file": [Case("+experiment=long", {"train.steps": 9})],
    "defaults in the primary file": [
        Case(
            "",
            {"seed": 6, "train.steps": 9, "train.save_every": 4, "model.inner._target_": "torch.nn.BCELoss"},
            files={
                "conf/base.yaml": "seed: 3\ntrain: {steps: 9}\n",
                "conf/slurmddp.yaml": "defaults: [base, {loss@model.inner: bce}, {optional x: y}, _self_]\n"
                "seed: 6\ntrain: {save_every: 4}\n",
            },
        ),
        Case("", refused="no file 'bse'.*slurmddp", files={"conf/slurmddp.yaml": "defaults: [bse]\n"}),
        Case(
            "",
            refused=r"override hydra/launcher: joblib in conf/slurmddp.yaml.*\+cluster=NAME submits",
            files={"conf/slurmddp.yaml": "defaults: [{override hydra/launcher: joblib}]\n"},
        ),
    ],
    "`--config-name`, `-cn`": [
        Case("--config-name config", {"seed": 4}),
        Case("-cn config.yaml", {"seed": 4}),
        Case("-cn cnofig", refused="no file .*conf/cnofig.yaml.*Did you mean config"),
    ],
    "`--config-path`, `-cp`": [
        Case("--config-path other", {"seed": 11}),
        Case("-cp oter", refused="no folder .*oter"),
    ],
    "`--config-dir`, `-cd`": [
        Case("-cd ../shared +cluster=far", {"cluster.partition": "x"}),
        Case("-cd ../shared +cluster=small", {"cluster.cpus_per_node": 8}),
        Case("-cd ../shraed", refused="no folder .*shraed"),
    ],
    "`hydra.searchpath`": [
        Case("hydra.searchpath=[file://../shared] +cluster=far", {"cluster.partition": "x"}),
        Case("hydra.searchpath=[../shared] cluster=far", {"cluster.partition": "x"}),
        Case("hydra.searchpath=[pkg://mine.conf] +cluster=near", {"cluster.partition": "y"}),
        Case(
            "+cluster=far",
            {"cluster.partition": "x"},
            files={"conf/slurmddp.yaml": "hydra: {searchpath: [file://../shared]}\n"},
        ),
        Case("hydra.searchpath=[pkg://mien.conf]", refused="no package mien.conf"),
        Case("hydra.searchpath=[s3://x]", refused="file://FOLDER or pkg://PACKAGE"),
        Case("hydra.searchpath=x", refused="not a list of folders"),
        Case("hydra.searchpath=[x", refused="[Nn]ever closed|can.t be read"),
    ],
    "own top-level keys": [
        Case("width=32", {"model.width": 32}, files={"conf/slurmddp.yaml": "model: {width: '${width}'}\n"}),
        Case("+model.x=${oc.select:own.x,1}", {"model.x": 7}, files={"conf/slurmddp.yaml": "own: {x: 7}\n"}),
        Case("wdith=3", refused="`wdith` is not a key.*if another value refers to it"),
        Case("+widt=3 +model.x=${model.width}", refused="`widt` is not a key"),
        Case(r"+widt=3 +model.x=\${widt}", refused="`widt` is not a key"),
    ],
    "package overrides": [
        Case("+optimizer@model.inner=adamw", {"model.inner._target_": "torch.optim.AdamW"})
    ],
    "add, force, remove": [Case("+model.x=1 ++model.y=2 ~model.width", {"model.x": 1, "model.y": 2})],
    "interpolation": [
        Case(
            "+model.a=${seed} +model.b=${oc.env:FROM_ENV} +model.c=${now:%m}", {"model.a": 0, "model.b": "e"}
        ),
        Case(
            "+model.b=${oc.env:NOT_SET}",
            refused="`model.b` is taken from the environment variable NOT_SET, .*{oc.env:NOT_SET,VALUE}",
        ),
    ],
    "`${hydra:...}`": [
        Case("name=of-${hydra:runtime.choices.model}", {"name": "of-gpt_small"}),
        Case("name=${hydra:job.num}", refused="hydra:job.num.*has no value"),
    ],
    "own resolvers": [
        Case("+model.x=${twice:4}", {"model.x": 8}, files={"conf/slurmddp.py": NET}),
        Case("+model.x=${thrice:4}", refused="`model.x` uses .*thrice"),
        Case("-cn config", refused="config.py can't be run: ZeroDivis", files={"conf/config.py": "1 / 0\n"}),
    ],
    "structured configs": [
        Case(
            "model=net model.must=2",
            {"model._target_": "torch.nn.Linear", "model.width": 12},
            files={"conf/slurmddp.py": NET},
        ),
        Case("place=far", {"seed": 8}, files={"conf/slurmddp.py": NET}),
        Case("model=net model.must=x", refused="model.must|Integer", files={"conf/slurmddp.py": NET}),
    ],
    "a structured config as primary file": [Case("-cn stored", refused="no file .*conf/stored.yaml")],
    "missing values, `???`": [
        Case("model=net", refused="`model.must` must be given", files={"conf/slurmddp.py": NET}),
        Case("model=net model.must=2", {"model.must": 2}, files={"conf/slurmddp.py": NET}),
    ],
    "`_target_`, `_args_`, `_partial_`, `_recursive_`, `_convert_`": [
        Case(
            "+model._args_=[1] +model._partial_=true +model._recursive_=false +model._convert_=all",
            {"model._convert_": "all", "model._args_": [1]},
        ),
        Case("+model._convert_=every", refused="`model._convert_` is 'every'"),
        Case("+model._recursiv_=true", refused="Did you mean _recursive_"),
    ],
    "`--cfg job`, `--cfg hydra`, `--cfg all`, `-c`": [
        Case("--cfg hydra", {"hydra.job.name": "slurmddp", "hydra.runtime.choices.model": "gpt_small"}),
        Case("-c all seed=3", {"hydra.job.name": "slurmddp", "seed": 3}),
        Case("--cfg seed=3", {"seed": 3}),
        Case("--cfg jbo", refused="--cfg has no value 'jbo'.*job"),
    ],
    "`--resolve`": [Case("--resolve", {"model.vocab_size": 99})],
    "`--package`, `-p`": [
        Case("-p optimizer", {"lr": 1e-3}),
        Case("--package optimizer.rl", refused="no 'optimizer.rl'.*lr"),
    ],
    "`--info`": [],
    "`--shell-completion`, `-sc`": [Case("-sc install=bash", refused="'-sc'.*slurmddp completion bash")],
    "`--hydra-help`": [Case("--hydra-help", refused="slurmddp train --help")],
    "`--experimental-rerun`": [Case("--experimental-rerun x", refused="slurmddp resume RUN")],
    "`--multirun`, `-m`": [Case("-m seed=4,5", {"seed": 4}), Case("-m", {"seed": 0})],
    "`choice`, `range`, `glob`": [
        Case("-m seed=choice(2,3)", {"seed": 2}),
        Case("-m seed=range(7,9)", {"seed": 7}),
        Case("-m loss=glob(b*)", {"loss._target_": "torch.nn.BCELoss"}),
        Case("seed=4,5", refused="a value for each of several runs.*-m"),
    ],
    "`interval`": [
        Case("-m hydra/sweeper=optuna optimizer.lr=interval(0.5,0.50000001)", {"seed": 0}),
        Case("-m seed=interval(1,2)", refused="Only a search tries intervals.*hydra/sweeper=optuna"),
    ],
    "`hydra/sweeper`": [
        Case("-m seed=4,4 hydra/sweeper=optuna", {"seed": 4}),
        Case("-m seed=4 hydra/sweeper=basic", {"seed": 4}),
        Case("-m seed=4,4 +hydra/sweeper=optuna", {"seed": 4}),
        Case("-m seed=4 +hydra/sweeper=basic", {"seed": 4}),
        Case("-m seed=1,2 hydra/sweeper=ax", refused="other sweepers are not supported"),
        Case("-m hydra.sweeper.params.seed=1,2", refused="basic sweeper"),
    ],
    "`hydra/launcher`": [Case("-m seed=1,2 hydra/launcher=joblib", refused=r"\+cluster=NAME submits")],
    "`hydra.mode`": [Case("hydra.mode=MULTIRUN", refused="`-m` sweeps")],
    "`hydra.sweep.dir`, `hydra.sweep.subdir`": [
        Case("-m seed=1,2 hydra.sweep.dir=x", refused="runs_dir=FOLDER"),
        Case("-m seed=1,2 hydra.sweep.subdir=x", refused="runs_dir=FOLDER"),
    ],
    "`hydra.run.dir`": [
        Case("hydra.run.dir=x", refused="runs_dir=FOLDER"),
        Case("", refused="hydra.run.dir.*runs_dir", files={"conf/slurmddp.yaml": "hydra: {run: {dir: x}}\n"}),
        Case("", refused="hydra.run .*runs_dir", files={"conf/slurmddp.yaml": "hydra: {run: {}}\n"}),
    ],
    "`hydra.output_subdir`": [Case("hydra.output_subdir=null", refused="overrides.txt")],
    "`hydra.job.name`": [Case("hydra.job.name=x", refused="name=NAME")],
    "`hydra.job.chdir`": [Case("hydra.job.chdir=true", refused="{run_dir}")],
    "`hydra.job.env_set`": [Case("+hydra.job.env_set.A=1", refused=r"\+cluster.env.NAME=VALUE")],
    "`hydra/job_logging`, `hydra/hydra_logging`, `hydra.verbose`": [
        Case("hydra/job_logging=none", refused="slurmddp logs RUN"),
        Case("hydra/hydra_logging=none", refused="slurmddp --debug"),
        Case("hydra.verbose=true", refused="slurmddp --debug"),
    ],
    "`hydra.callbacks`": [Case("+hydra.callbacks.x._target_=y.Z", refused="callbacks.NAME._target_")],
}
"""The rows of the page by their first cells. `--info` has a test of its own."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = make_project(
        tmp_path / "project",
        loss__bce="_target_: torch.nn.BCELoss\n",
        experiment__long="# @package _global_\nseed: 5\ntrain: {steps: 9}\n",
        experiment__late="# @package _global_\nseed: 8\n",
        config="seed: 4\n",
    )
    make_project(
        project.parent / "shared", cluster__far="partition: x\n", cluster__small="cpus_per_node: 1\n"
    )
    for file, text in {
        "other/slurmddp.yaml": "seed: 11\n",
        "mine/__init__.py": "",
        "mine/conf/cluster/near.yaml": "partition: y\n",
        "sizes.py": "WIDTH = 12\n",
    }.items():
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text(text)
    (project.parent / "shared" / "conf" / "cluster").rename(project.parent / "shared" / "cluster")
    monkeypatch.chdir(project)
    monkeypatch.setenv("FROM_ENV", "e")
    return project


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_of_hydra_works_or_is_refused(
    habit: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sizes", raising=False)
    for case in HABITS[habit]:
        for file, text in case.files.items():
            (project / file).write_text(text)
        words = case.words.split()
        shown = [] if {"--cfg", "-c"} & set(words) else ["--cfg"]
        code = main(["train", *words, *shown])
        out, err = capsys.readouterr()
        for file in case.files:
            (project / file).unlink()
        if case.refused:
            assert re.search(case.refused, err) and code != EXIT_FINISHED, case.words
        else:
            assert code == EXIT_FINISHED, err
            found = next(yaml.safe_load_all(out))  # of a sweep the first point
            assert {key: at(found, key) for key in case.values} == case.values, case.words
    assert not (project / "runs").exists()


def test_the_page_has_a_row_for_each_habit() -> None:
    rows = re.findall(r"^\| (.*?) \| (works|refused: .*?) \| .*\|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(HABITS)
    for name, standing in rows:
        tested = {bool(case.refused) for case in HABITS[name]}
        assert (False not in tested) == (standing != "works") or not tested, name


def test_info_shows_how_hydra_composes(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurmddp", "train", "--info", "defaults-tree", "loss=bce"],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "loss: bce" in done.stdout and "model: gpt_small" in done.stdout


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--resolve -m seed=1,2", "--resolve changes what --cfg prints"),
        ("-p optimizer", "--package changes what --cfg prints"),
        ("--info -m seed=1,2", "--info shows how one .*Omit --multirun"),
    ],
)
def test_a_flag_that_has_no_meaning_here_starts_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], flags: str, refused: str
) -> None:
    assert main(["train", "train.steps=1", *flags.split()]) == EXIT_USAGE
    assert re.search(refused, capsys.readouterr().err)
    assert not (project / "runs").exists()


def test_flags_of_hydra_stand_before_the_program(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "job").write_text("")
    (project / "fit.py").write_text("")
    assert main(["run", "--cfg", "job", "-p", "program", "-cn", "config", "fit.py", "--cfg", "all"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["script"], shown["args"]) == ("fit.py", ["--cfg", "all"])
