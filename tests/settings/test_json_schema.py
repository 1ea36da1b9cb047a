"""The JSON Schemas accept the values that the checks accept, and refuse the values that the checks refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from slurmddp.cli.commands.cluster import drafts
from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.errors import ConfigError
from slurmddp.settings import loggers
from slurmddp.settings.check_values import check_special_keys, check_value
from slurmddp.settings.json_schema import MAIN, schemas
from slurmddp.settings.keys import GROUPS, TOP, Key, every_key, keys
from slurmddp.settings.schema import NamedTargetNodes, TargetNode
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits.queries import describe
from slurmddp.slurm.units import parse_duration_s
from support import ROOT
from support.slurm import sites
from support.slurm.slurm_jobs import FakePrograms

SCHEMAS = schemas()
VALIDATORS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
VALUES: list[Any] = [
    *(None, True, False, "on", "off", 0, 1, -1, 2, 1.5, 0.9999999, -0.5, 10**20),
    *("", " ", "text", "a\nb", "\x07", "auto", "32", 32, "local", "bf16", "gres", "none"),
    *("12:00:00", "1-12:00", "90m", "1D12H", " 2h ", "tomorrow", "1:99", "-5"),
    *([], ["a"], [1], [["a"]], [None], ["a\0"]),
    *({}, {"a": 1}, {"a": "b"}, {"1x": "b"}, {"a": True}, {"a": None}, {"a": ""}, {"a": 1.5}, {"a": [1]}),
    *({"a": "b\n"}, {"a": {}}, {"a": {"b": 1}}, {"1x": {}}),
    *({"_target_": "a.B"}, {"_target_": "a.B", "x": [1]}, {"_target_": "a.B", "_x_": 1}),
    *({"_target_": "a.B", "_partial_": 1}, {"_target_": "a.B", "_partial_": True}),
    *(
        {"_target_": "a.B", "_args_": 1},
        {"_target_": "a.B", "_args_": [1]},
        {"_target_": "a", "_convert_": 1},
    ),
    *({"_target_": "a.B", "x": {"_target_": "a.C", "_partial_": 3}}, {"m": {"_target_": "a.B", "_y_": 1}}),
    *({"name": "ddp"}, {"name": "ddp", "every": 3}, {"name": "diloco", "every": 3}, {"name": "nope"}),
    *("csv", "wandb", ["csv", "wandb"], ["csv", "nope"], {"name": "wandb", "project": "a"}),
    *({"name": "wandb", "projekt": "a"}, {"name": "csv", "x": 1}, [{"name": "csv"}, {"_target_": "a.B"}]),
]


def schema_of(key: Key) -> Draft202012Validator:
    """Return a validator for the value of a key, as in conf/slurmddp.yaml."""
    node = SCHEMAS[MAIN]
    for name in key.name.split("."):
        nodes = [node, *node.get("anyOf", ())]
        node = next(part["properties"][name] for part in nodes if name in part.get("properties", ()))
    return Draft202012Validator({**node, "$defs": SCHEMAS[MAIN]["$defs"]})


def refuse(key: Key, value: Any) -> None:
    """Raise ConfigError if one of the checks of slurmddp refuses the value of a key."""
    checked = check_value(value, key)
    if checked is None:
        return
    if key.name == "loggers":
        loggers.targets(value, same_python=False)
    if key.types == (int, str):
        parse_duration_s(checked, key.name)
    for place, node in nodes_of(key, checked):
        check_special_keys(place, node)


def nodes_of(key: Key, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects that Hydra would build from the value of a key, at any depth."""
    if not ({TargetNode, NamedTargetNodes} & {*key.types} or key.is_open or key.name == "loggers"):
        return
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending += item.values()
            if "_target_" in item:
                yield key.name, item
        elif isinstance(item, list):
            pending += item


def is_accepted(key: Key, value: Any) -> bool:
    """Return whether a file of the project may give a key the value, by the checks of slurmddp."""
    # In a cluster file null means the default, and the file of a strategy is merged with a shipped one.
    if (value is None and key.name.startswith("cluster.")) or (value == {} and key.name == "strategy"):
        return True
    try:
        refuse(key, value)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", every_key())
def test_a_key_accepts_the_values_that_the_checks_accept(name: str) -> None:
    validator = schema_of(every_key()[name])
    for value in VALUES:
        assert validator.is_valid(value) == is_accepted(every_key()[name], value), value


@pytest.mark.parametrize("section", TOP["strategy"].sections, ids=lambda section: section.__name__)
def test_a_strategy_accepts_the_values_that_the_checks_accept(section: type) -> None:
    validator = schema_of(TOP["strategy"])
    known = keys(section)
    values = [value for value in VALUES if not isinstance(value, dict)]
    for key in every_key():
        name = key.removeprefix("strategy.")
        for value in values if name in known and name != "name" else values[:1]:
            given = {"name": known["name"].default, name: value}
            assert validator.is_valid(given) == is_accepted(TOP["strategy"], given), given


@pytest.mark.parametrize("name", every_key())
def test_a_key_has_its_meaning_its_default_and_may_be_a_reference(name: str) -> None:
    key = every_key()[name]
    validator = schema_of(key)
    assert validator.schema["description"] == key.doc
    if not key.sections and not key.is_group:
        assert validator.schema["default"] == key.default
    assert all(map(validator.is_valid, ("${seed}", "${oc.env:HOME}/x", "???")))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_schema_is_a_schema(schema: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[schema])


def files() -> list[Path]:
    folders = (ROOT / "conf", ROOT / "templates/project/conf", ROOT / "examples")
    return sorted(path for folder in folders for path in folder.rglob("*.yaml"))


def name_of(path: Path) -> str:
    """Return the name of the schema of a file: its group, or the main schema."""
    is_global = re.search(r"^# @package _global_", path.read_text(), flags=re.MULTILINE)
    return path.parent.name if path.parent.name in GROUPS and not is_global else MAIN


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_file_of_slurmddp_fits_its_schema(path: Path) -> None:
    assert [
        error.message for error in VALIDATORS[name_of(path)].iter_errors(yaml.safe_load(path.read_text()))
    ] == []


@pytest.mark.parametrize("partition", ["cpu", "gpu"])
def test_a_drafted_cluster_file_fits_its_schema(programs: FakePrograms, partition: str) -> None:
    for name, text in (("partitions", sites.PARTITIONS), ("nodes-of-partitions", sites.NODES)):
        programs.write(name, text)
    programs.write("config", sites.CONFIG)
    (text,) = drafts(describe(SlurmClient()), [partition]).values()
    assert VALIDATORS["cluster"].is_valid(yaml.safe_load(text))


PROJECTS = {
    "train: {steps: 3}": True,
    "train: {stepz: 3}": False,
    "tran: {steps: 3}": False,
    "train: 3": False,
    "policy: {grace: 3}": False,
    "optimizer: {lr: 0.5}": True,
    "optimizer: {_target_: torch.optim.SGD, lr: 0.5, _partial_: 1}": False,
    "optimizer: adamw": False,
    "model: null": False,
    "scheduler: null": True,
    "strategy: {bucket_mb: 3}": True,
    "strategy: {name: ddp, bucket: 3}": False,
    "metrics: {top5: {_target_: slurmddp.training.trainer.accuracy}}": True,
    "metrics: {top5: 3}": False,
    "metrics: {5top: {_target_: slurmddp.training.trainer.accuracy}}": False,
    "defaults: [model: gpt_tiny, _self_]": True,
    "defaults: [model: gpt_tiny, override optimizer: sgd, optional experiment: mine]": True,
    "defaults: [scheduler: null]": True,
    "hydra: {searchpath: [pkg://slurmddp.conf]}": True,
    "hydra: {run: {dir: x}}": False,
    "launcher: locl": False,
    "seed: -1": False,
    "time_limit: soon": False,
    "train: {compile: yes}": True,
    "nodes: ${gpus}": True,
    "after: [1]": False,
    "loggers: [csv, {name: wandb, projekt: a}]": False,
}
"""Contents of conf/slurmddp.yaml, and whether slurmddp takes them."""


@pytest.mark.parametrize("text", PROJECTS)
def test_a_project_file_fits_its_schema_if_slurmddp_takes_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/slurmddp.yaml").write_text(text)
    try:
        build_job(compose([], tmp_path), project_dir=tmp_path)
        is_taken = True
    except ConfigError:
        is_taken = False
    assert is_taken == PROJECTS[text]
    assert VALIDATORS[MAIN].is_valid(yaml.safe_load(text)) == is_taken


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cluster", "partitoin: gpu"),
        ("cluster", "defaults: {cpu: null}"),
        ("cluster", "gpus_per_node: many"),
        ("cluster", "sbatch: {exclusive: []}"),
        ("model", "_target_: 3.5"),
        ("model", "_tarket_: a.B"),
        ("model", "layers: {_target_: a.B, _convert_: most}"),
        ("strategy", "name: ddpp"),
        ("strategy", "{name: fsdp, bucket_mb: 3}"),
        ("callbacks", "my-name: {_target_: a.B}"),
    ],
)
def test_a_wrong_file_of_a_group_does_not_fit(name: str, text: str) -> None:
    assert not VALIDATORS[name].is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cluster", "{defaults: [a100x8, _self_], partition: null, env: {A: 1}, sbatch: {exclusive: true}}"),
        ("model", "{defaults: [base], _target_: a.B, any: {1: [x]}, width: '${data.classes}'}"),
        ("strategy", "{_target_: own.Strategy, period: 3}"),
        ("callbacks", "{defaults: [base], first: {_target_: a.B}}"),
        ("loss", "{_target_: a.b, _partial_: true}"),
    ],
)
def test_a_right_file_of_a_group_fits(name: str, text: str) -> None:
    assert [error.message for error in VALIDATORS[name].iter_errors(yaml.safe_load(text))] == []
