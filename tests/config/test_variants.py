"""Points that differ in numbers are derived from one composed job: the job that composition gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.config.composition import compose as composition
from slurmddp.control.jobs import jobs_of
from slurmddp.errors import ConfigError
from support.runs.projects import make_project

CODE = """
from dataclasses import dataclass
from inspect import signature
import omegaconf
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

@dataclass
class Net:
    _target_: str = "torch.nn.Identity"
    width: int = 4

# Hydra 1.4 warns when a name is stored again without `replace`, which Hydra 1.3 does not have.
options = {"replace": True} if "replace" in signature(ConfigStore.store).parameters else {}
ConfigStore.instance().store(group="model", name="typed_net", node=Net, **options)
# OmegaConf 2.4 has renamed it; in 2.3 the new name belongs to an older function.
is_renamed = not omegaconf.__version__.startswith("2.3.")
register = OmegaConf.register_resolver if is_renamed else OmegaConf.register_new_resolver
register("all_of_it", lambda *, _root_: str(_root_.seed), replace=True)
"""
DERIVED = (
    ["seed={}"],
    ["seed={}", "optimizer.lr=1e-0{}", "program.script=it.py"],
    ["model.width={}", "seed={}.0"],
    ["+cluster=big", "+model.own={}", "nodes=2", "name=x"],
    ["optimizer.lr={}.5", "+model.x='${oc.env:HOME}'"],
    ["program.script=it.py", 'program.args=["-m","a b","[{}, \\"x, y\\"]","","{run_dir}"]'],
    ["seed={}", "program.script=it.py", 'program.args=["1e-{}","é[("]'],
    ["seed=1", "program.script=it.py", "program.args=[{}]"],
    ["program.script=it.py", "program.args='--lr 1e-{}'"],
)
COMPOSED = (
    ["train.steps={}"],
    ["+data.context={}"],
    ["nodes={}", "+cluster=big"],
    ["seed={}", "name='n${seed}'"],
    ["optimizer.lr={}", "+model.x='${optimizer}'"],
    ["optimizer.lr={}", "+model.x='${${model.y}.lr}'", "+model.y=optimizer"],
    ["seed={}", "+model.x='${all_of_it:}'"],
    ["seed={}", "elastic=true", "+cluster=big"],
    ["model=typed_net", "model.width={}"],
    ["program._target_=it.train", "program.args=[{}]"],
    ["program.script=it.py", 'program.args=["{}"]', "+model.x='${program.args[0]}'"],
    ["program.script=it.py", 'program.args=["${seed}","{}"]'],
    ["program.script=it.py", 'program.args=["\\\\${seed}","{}"]'],
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_project(tmp_path / "p")
    (made / "it.py").write_text("def train(distributon, config, folder):\n    pass\n")
    (made / "conf").mkdir(exist_ok=True)
    (made / "conf" / "slurmddp.py").write_text(CODE)
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize("words", [*DERIVED, *COMPOSED], ids=" ".join)
def test_a_point_is_the_job_that_its_settings_alone_give(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    really, composed = composition.compose, []

    def compose(*args: Any, **options: Any) -> Any:
        composed.append(args[0])
        return really(*args, **options)

    points = [[word.replace("{}", str(number)) for word in words] for number in (1, 2, 3)]
    alone = [jobs_of([point])[0] for point in points]
    monkeypatch.setattr(composition, "compose", compose)
    found = jobs_of(points)
    assert found == alone and repr(found) == repr(alone)
    assert len(composed) == (1 if words in DERIVED else 3)
    assert len({id(job.program.config["policy"]) for job in found}) == len(composed)


def test_a_number_that_hydra_refuses_is_refused_in_every_point(project: Path) -> None:
    with pytest.raises(ConfigError, match="width"):
        jobs_of([["model=typed_net", "model.width=1"], ["model=typed_net", "model.width=1.5"]])
    with pytest.raises(ConfigError, match=r"`seed` is 1\.5"):
        jobs_of([["seed=1"], ["seed=1.5"]])
