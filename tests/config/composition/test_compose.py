"""Composing: search order, the project's defaults, groups, import paths, interpolations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmddp.cli.main import main
from slurmddp.config.composition import compose as module
from slurmddp.config.composition.compose import compose, login_node, unread
from slurmddp.config.composition.overrides import options
from slurmddp.config.resume_changes import job_of_run
from slurmddp.control.jobs import settings_of_program
from slurmddp.errors import ConfigError
from slurmddp.runs.folder import config_secrets, create
from slurmddp.settings.keys import TOP, keys
from support import ROOT
from support.runs.projects import job_of, make_project

CONF = ROOT / "slurmddp" / "conf"


@pytest.mark.parametrize("spelling", ["{}=big", "+{}=big", "++{}=big", "{}='big'"])
def test_a_choice_needs_no_plus(tmp_path: Path, spelling: str) -> None:
    project = make_project(tmp_path / "p", loss__big="_target_: torch.nn.BCELoss\n")
    assert job_of(project, spelling.format("cluster")).cluster.name == "big"
    loss = job_of(project, spelling.format("loss"), "+loss.reduction=sum").program.config["loss"]
    assert loss == {"_target_": "torch.nn.BCELoss", "reduction": "sum"}


def test_the_projects_files_are_found_before_the_shipped_ones(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", cluster__cpu="partition: mine\nranks_per_node: 3\n")
    assert job_of(project, "+cluster=cpu").cluster.partition == "mine"
    assert job_of(project, "+cluster=h100x8").cluster.name == "h100x8"


def test_hydra_composes_once_for_the_login_node_and_the_job_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, words, composed = (
        make_project(tmp_path / "p", cluster__mine="partition: a\n"),
        ["+cluster=mine"],
        [],
    )
    with_hydra = module.hydra_compose
    monkeypatch.setattr(module, "hydra_compose", lambda *a, **k: composed.append(a) or with_hydra(*a, **k))
    for partition in ("a", "b"):
        (project / "conf" / "cluster" / "mine.yaml").write_text(f"partition: {partition}\n")
        assert login_node(words, project) is None
        assert compose(words, project)["cluster"]["partition"] == partition
        assert compose(words, project)["cluster"]["partition"] == partition
    assert len(composed) == 4, "two for each change: one that login_node left, and one of the second call"


def test_the_shipped_configuration_works_without_a_project(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.program.target == "slurmddp.training.trainer.train"
    assert job.resources.world_size == 2
    for name in ("a100x8", "h100x8", "cpu", "sandbox"):
        assert job_of(tmp_path, f"+cluster={name}").cluster.name == name


def test_a_configuration_of_another_program_is_not_read(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", config="lr: 3\ndefaults: [nonsense]\n")
    assert job_of(project).run_name == job_of(make_project(tmp_path / "q")).run_name


def test_a_configuration_that_is_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = make_project(tmp_path / "p", config="lr: 3\n")
    (project / "train.py").write_text("")
    monkeypatch.chdir(project)

    def notes(*arguments: str) -> str:
        assert main(["train", "--cfg", *arguments]) == 0
        return capsys.readouterr().err

    assert "conf/config.yaml is not read" in notes() and "conf/slurmddp.yaml" in notes()
    assert notes("program.script=train.py") == ""  # the script may read it
    (project / "conf" / "slurmddp.yaml").write_text("nodes: 1\n")
    assert notes() == ""


def test_memory_that_no_job_asks_for_is_named(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")

    def notes(*arguments: str) -> list[str]:
        return unread(compose(arguments, project), project)

    assert "mem_gb=7 has no effect" in notes("+cluster=sandbox", "mem_gb=7")[0]
    assert notes("+cluster=sandbox") == notes("+cluster=cpu", "mem_gb=7") == notes("mem_gb=7") == []


def test_settings_that_stand_after_the_script_are_named(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    (project / "fit.py").write_text("")

    def notes(*words: str) -> list[str]:
        config = compose([*settings_of_program(["fit.py", *words]), "+cluster=cpu"], project)
        return unread(config, project)

    assert notes("--lr", "1", "nodes=2", "+cluster=a100x8", "--dry-run") == [
        "fit.py gets nodes=2 +cluster=a100x8 --dry-run as arguments. Settings and flags of slurmddp "
        "are written before fit.py."
    ]
    assert notes("optimizer=adam", "seed=3", "--nodes=2", "nodes", "width=4") == []


def test_a_projects_defaults_lie_between_the_shipped_ones_and_the_command_line(tmp_path: Path) -> None:
    defaults = (
        "defaults:\n  - model: tiny\n  - cluster: big\nnodes: 2\ntrain: {steps: 7}\nmodel: {width: 5}\n"
    )
    project = make_project(
        tmp_path / "p",
        slurmddp=defaults,
        model__tiny="_target_: slurmddp.training.builtin.gpt.GPT\nwidth: 1\ndepth: 2\n",
    )
    job = job_of(project, "train.batch_size=3")
    assert job.cluster.name == "big" and job.resources.nodes == 2
    assert job.program.config["train"]["steps"] == 7 and job.program.config["train"]["batch_size"] == 3
    model = {"_target_": "slurmddp.training.builtin.gpt.GPT", "width": 5, "depth": 2}
    assert job.program.config["model"] == model
    other = job_of(project, "cluster=null", "model=gpt_small", "nodes=1")
    assert other.launcher == "local" and other.program.config["model"]["width"] == 5


def test_a_group_of_the_projects_own(tmp_path: Path) -> None:
    experiment = "# @package _global_\nseed: 5\ntrain: {steps: 9}\n"
    project = make_project(tmp_path / "p", experiment__long=experiment)
    for spelling in ("experiment=long", "+experiment=long"):
        chosen = job_of(project, spelling).program.config
        assert (chosen["seed"], chosen["train"]["steps"]) == (5, 9)
    with pytest.raises(ConfigError, match=r"no experiment 'lnog'.*Did you mean long"):
        job_of(project, "experiment=lnog")


def test_another_class_starts_without_the_keys_of_the_first(project: Path) -> None:
    (project / "net.py").write_text("def Net(depth=1, vocab_size=1, width=1): ...\n")
    job = job_of(project, "model._target_=net.Net", "model.depth=3", "optimizer._target_=torch.optim.SGD")
    assert job.program.config["model"] == {"_target_": "net.Net", "depth": 3}
    assert job.program.config["optimizer"] == {"_target_": "torch.optim.SGD"}
    assert job.name == "net"
    kept = job_of(project, "model=gpt_small", "model._target_=net.Net").program.config["model"]
    assert kept == {"_target_": "net.Net", "vocab_size": 99, "width": 64}
    (project / "conf" / "slurmddp.yaml").write_text("loss: {_target_: net.Net}\n")
    assert job_of(project).program.config["loss"] == {"_target_": "net.Net"}
    assert job_of(project, "loss=token_cross_entropy").program.config["loss"]["_partial_"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train: 3", "`train` in conf/slurmddp.yaml is 3, but must be a mapping"),
        ("policy: [1]", r"`policy` in conf/slurmddp.yaml is \[1\], but must be a mapping"),
        (
            "model: gpt_small",
            "`model` in conf/slurmddp.yaml is 'gpt_small'.*write `- model: gpt_small` below `defaults:`",
        ),
        ("model: 3", "`model` in conf/slurmddp.yaml is 3, but must be a mapping"),
    ],
)
def test_a_plain_value_in_place_of_a_section_names_the_file_and_the_key(
    project: Path, line: str, words: str
) -> None:
    (project / "conf" / "slurmddp.yaml").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=words):
        compose([], project)


PARTS = """
import dataclasses
import functools
from nets.deep import Deep as Imported
from torch import nn

class Base(nn.Module):
    def __init__(self, hidden, inputs=64):
        pass

class Net(Base):
    pass

class Any(nn.Linear):
    pass

class Free:
    def __init__(self, **options):
        pass

@dataclasses.dataclass
class Settings:
    hidden: int
    inputs: int = 3

@functools.cache
def decorated(x):
    pass

def loss(outputs, targets, smooth=0.1):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a project with classes of its own, and a configuration that chooses them."""
    project = make_project(
        tmp_path / "p",
        model__classifier="_target_: parts.Base\nhidden: 3\n",
        data__cloud="_target_: parts.Settings\nhidden: 5\n",
        optimizer__momentum="_target_: torch.optim.SGD\nlr: 1e-2\nnesterov: true\n",
        metrics__two="top: {_target_: parts.loss, smooth: 0.2}\nlow: {_target_: parts.loss}\n",
        slurmddp=(
            "defaults:\n  - model: classifier\n  - data: cloud\n  - optimizer: momentum\n  - metrics: two\n"
            "callbacks: {norm: {_target_: parts.Settings, hidden: 2, inputs: 1}}\n"
            "loggers: {_target_: parts.Settings, hidden: 1}\n"
            "loss: {_target_: parts.loss, smooth: 0.3}\n"
        ),
    )
    (project / "parts.py").write_text(PARTS)
    (project / "nets").mkdir()
    (project / "nets" / "deep.py").write_text("class Deep:\n    def __init__(self, *, depth): ...\n")
    return project


@pytest.mark.parametrize(
    ("node", "target", "more"),
    [
        ("model", "parts.Free", {"anything": 1}),
        ("model", "parts.Imported", {"depth": 3}),
        ("model", "parts.Any", {"in_features": 3, "out_features": 3}),
        ("data", "parts.decorated", {"x": 1}),
        ("optimizer", "torch.optim.Adagrad", {"lr": 0.5}),
        ("loss", "parts.Free", {}),
        ("scheduler", "parts.Free", {}),
        ("strategy", "parts.Free", {}),
        ("metrics.top", "parts.Free", {"k": 5}),
        ("callbacks.norm", "parts.Imported", {"depth": 1}),
        ("loggers", "parts.Free", {}),
    ],
)
def test_a_typed_class_has_only_typed_arguments(
    own: Path, node: str, target: str, more: dict[str, object]
) -> None:
    typed = [f"{node}._target_={target}", *(f"{node}.{key}={value}" for key, value in more.items())]
    for words in (typed, typed[::-1]):
        config = compose(words, own)
        for name in node.split("."):
            config = config[name]
        assert config == {"_target_": target, **more}
    before, after = compose([], own), compose(typed, own)
    outer = node.partition(".")[0]
    assert {**after, outer: None, "name": ""} == {**before, outer: None, "name": ""}, "nothing else changes"
    if outer == "metrics":
        assert after["metrics"]["low"] == before["metrics"]["low"]


def test_the_points_of_a_sweep_have_no_arguments_of_the_class_of_a_file(own: Path) -> None:
    cache: dict[str, Any] = {}
    for depth in (1, 2):
        words = ["model._target_=parts.Imported", f"model.depth={depth}"]
        assert compose(words, own, cache=cache)["model"] == {"_target_": "parts.Imported", "depth": depth}
    assert compose(["seed=3"], own, cache=cache)["model"] == {"_target_": "parts.Base", "hidden": 3}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("model.inputs=3", {"inputs": 3}),
        ("optimizer.momentum=0.9", {"momentum": 0.9}),
        ("data.inputs=4", {"inputs": 4}),
        ("loss.smooth=0.5", {"smooth": 0.5}),
        (
            "model.hiden=3",
            "parts.Base takes no argument 'hiden'. It takes hidden, inputs. Did you mean model.hidden?",
        ),
        ("+model.hiden=3", "parts.Base takes no argument 'hiden'.*Did you mean model.hidden?"),
        ("data.zzz=3", "parts.Settings takes no argument 'zzz'. It takes hidden, inputs."),
        ("optimizer.momentun=0.9", "SGD takes no argument 'momentun'. .*Did you mean optimizer.momentum?"),
        ("callbacks.norm.hiden=1", "takes no argument 'hiden'"),
        (
            "model=classifier model._target_=parts.Imported",
            "takes no argument 'hidden'.*write '~model.hidden'",
        ),
        ("model._target_=parts.Net", "parts.Net, which needs hidden. Use model.hidden=VALUE"),
        ("~model.hidden", "parts.Base, which needs hidden"),
    ],
)
def test_keys_of_a_class_are_known_from_its_signature(
    own: Path, typed: str, words: str | dict[str, object]
) -> None:
    if isinstance(words, dict):
        assert words.items() <= compose([typed], own)[typed.partition(".")[0]].items()
    else:
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            compose(typed.split(), own)


def test_a_whole_training_function_comes_in_by_its_import_path(project: Path) -> None:
    (project / "mine.py").write_text("def train(distributon, config, folder, extra): ...\n")
    job = job_of(project, "program._target_=mine.train", "program.extra=1")
    assert job.program.target == "mine.train" and job.program.config["program"]["extra"] == 1
    (project / "mine.py").write_text("def train(): ...\ndef free(*args): ...\ndef named(*, config): ...\n")
    assert job_of(project, "program._target_=mine.free").program.target == "mine.free"
    for name in ("train", "named"):
        with pytest.raises(ConfigError, match="takes 0 arguments by position") as caught:
            job_of(project, f"program._target_=mine.{name}")
        assert caught.value.hint == "The arguments by position are distributon, config, folder."


@pytest.mark.parametrize(
    "typed",
    [
        ("strategy=my_parts.Mean", "strategy.half=true"),
        ("strategy._target_=my_parts.Mean", "strategy.half=true"),
        ("+strategy='my_parts.Mean'", "+strategy.half=true"),
        ("strategy=mean",),
    ],
)
def test_d11_a_class_of_ones_own_is_the_strategy(tmp_path: Path, typed: tuple[str, ...]) -> None:
    mean = "_target_: my_parts.Mean\nhalf: true\n"
    project = make_project(tmp_path / "p", strategy__mean=mean, model__net="_target_: my_parts.Net\n")
    (project / "my_parts.py").write_text("def Mean(half): ...\ndef Net(width): ...\n")
    job = job_of(project, *typed)
    assert job.program.config["strategy"] == {"_target_": "my_parts.Mean", "half": True}
    assert job.resources.world_size == 2
    assert job.run_name != job_of(project).run_name, "it is another run"
    net = job_of(project, "model=my_parts.Net", "model.width=3")
    assert net.program.config["model"] == {"_target_": "my_parts.Net", "width": 3}
    by_file = make_project(tmp_path / "p", **{"model__my_parts.Net": "_target_: torch.nn.Identity\n"})
    assert job_of(by_file, "model=my_parts.Net").program.config["model"] == {"_target_": "torch.nn.Identity"}


def test_a_strategy_has_its_own_options_and_a_group_may_be_left_out(project: Path) -> None:
    chosen = job_of(project, "+strategy.bucket_mb=5").program.config["strategy"]
    assert chosen == {"name": "ddp", "bucket_mb": 5}
    alone = job_of(project, "strategy=single", "scheduler=null")
    assert alone.resources.world_size == 1 and alone.program.config["scheduler"] is None


def test_interpolations_are_resolved_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data; $x")
    resolved = compose(["+model.place=${oc.env:WHERE}", "+model.at=${now:%Y}"], project)["model"]
    assert resolved["vocab_size"] == 99 and resolved["place"] == "/data; $x" and resolved["at"].isdigit()


def test_values_of_the_environment_are_known_as_such(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    monkeypatch.setenv("WIDTH", "32")
    typed = [
        "+data.token=${oc.env:TOKEN}",
        "+data.url='https://x/${data.token}'",
        'model.width="${oc.decode:${oc.env:WIDTH}}"',
        "program.script=t.py",
        "program.args=[--token,'${oc.env:TOKEN}']",
        "+cluster=small",
    ]
    (project / "t.py").touch()
    job = job_of(project, *typed)
    config_, marks = job.program.config, {
        "data": {"token": "${oc.env:TOKEN}", "url": "https://x/${data.token}"},
        "model": {"width": "${oc.decode:${oc.env:WIDTH}}"},
        "program": {"args": {1: "${oc.env:TOKEN}"}},
    }  # fmt: skip
    assert config_["from_environment"] == marks
    assert (config_["data"]["token"], config_["model"]["width"]) == ("s3cret", 32)
    shown = config_secrets.without_environment(config_)
    assert shown["data"]["url"] == "https://x/${data.token}" and shown["program"]["args"][0] == "--token"
    assert "s3cret" not in yaml.safe_dump(shown) and "from_environment" not in shown
    folder = create.prepare(job, None)
    again = job_of_run(folder, ["nodes=1"])
    assert again.program.config["from_environment"] == marks
    assert (again.run_name, job_of(project, *typed).run_name) == (job.run_name, job.run_name)


def test_the_stored_configuration_is_plain_and_whole(project: Path) -> None:
    job = job_of(project, "+cluster=big", "nodes=2")
    stored = yaml.safe_load(yaml.safe_dump(dict(job.program.config), sort_keys=False))
    assert stored == job.program.config
    assert [*stored] == [*TOP, "project_dir"]
    assert (stored["nodes"], stored["ranks_per_node"], stored["gpus_per_node"]) == (2, 8, 8)
    assert (stored["launcher"], stored["project_dir"]) == ("slurm", str(project))


@pytest.mark.parametrize(("said", "meant"), [("on", True), ("true", True), ("off", False), ("false", False)])
def test_a_flag_is_on_or_off_in_a_file_and_on_the_command_line(
    tmp_path: Path, said: str, meant: bool
) -> None:
    plain = make_project(tmp_path / "plain")
    assert job_of(plain, f"preflight={said}").program.config["preflight"] is meant
    own = make_project(tmp_path / "own", slurmddp=f"preflight: {said}\nelastic: {said}\n")
    assert job_of(own).program.config["preflight"] is meant
    assert job_of(own).elastic is meant


def test_the_strategies_are_those_that_have_a_file() -> None:
    strategies = {str(keys(one)["name"].default) for one in TOP["strategy"].sections}
    assert set(options([CONF], "strategy")) == strategies


def test_a_sweep_reads_files_once_and_each_point_is_composed_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "48")
    project = make_project(
        tmp_path / "p", slurmddp="width: 32\nmodel: {width: '${width}'}\n", experiment__long="seed: 7\n"
    )
    points = [
        ("seed=1",), ("seed=2", "train.lr_decay=null"), ("+cluster=big", "nodes=2"),
        ("+cluster=big", "nodes=3"), ("model=gpt_tiny", "model.layers=2"), ("width=64",),
        ("width=${oc.env:WIDTH}",), ("~loss",), ("+experiment=long",), ("+experiment=long", "seed=3"),
        ("model={_target_: torch.nn.Linear, in_features: 1}",),
        ("program.script=it.py", "program.args=[a,'b c']"), ("loggers=[csv]",), ("name='${hydra:job.name}'",),
        ("model.no_such_key=1",), ("nodes=0",), ("optimizer.lr=1e-3",), ("optimizer.nosuch=1",),
    ]  # fmt: skip
    (project / "it.py").write_text("")

    def outcome(words: tuple[str, ...], **cache: Any) -> object:
        try:
            return compose(words, project, **cache)
        except ConfigError as error:
            return str(error)

    cache: dict[str, Any] = {}
    found = [outcome(words, cache=cache) for words in points]
    assert found == [outcome(words) for words in points]
    assert sum(isinstance(one, dict) for one in found) >= 10
    made = len(cache)
    assert 1 < made < len(points) and outcome(("seed=9",), cache=cache) == outcome(("seed=9",))
    assert len(cache) == made, "the files were read again"


def test_tuples_of_structured_configs_become_lists(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    (project / "conf" / "slurmddp.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Any\n"
        "from hydra.core.config_store import ConfigStore\n"
        "@dataclass\n"
        "class Adam:\n"
        "    _target_: str = 'torch.optim.Adam'\n"
        "    betas: tuple[Any, float] = ('${half}', 0.9)\n"
        "ConfigStore.instance().store(group='optimizer', name='of_tuples', node=Adam)\n"
    )
    composed = compose(["optimizer=of_tuples", "+half=0.5"], project)
    assert composed["optimizer"]["betas"] == [0.5, 0.9]
    assert "half" not in composed, "a key of the project, to which the tuple refers"
