"""The points of a sweep, from Hydra's own syntax."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmddp.config.composition.sources import DEFAULT
from slurmddp.config.composition.sweep import points
from slurmddp.errors import ConfigError
from support.runs.projects import make_project

POINTS = {
    "seed=1,2 nodes=3": ["seed=1 nodes=3", "seed=2 nodes=3"],
    "seed=1,2 optimizer.lr=1e-3,1e-4": [
        "seed=1 optimizer.lr=0.001",
        "seed=1 optimizer.lr=0.0001",
        "seed=2 optimizer.lr=0.001",
        "seed=2 optimizer.lr=0.0001",
    ],
    "seed=range(1,4)": ["seed=1", "seed=2", "seed=3"],
    "seed=range(4,0,-2)": ["seed=4", "seed=2"],
    "+model.x=choice(a,'b,c',[1,2])": ["+model.x=a", r"+model.x=b\,c", "+model.x=[1,2]"],
    "optimizer.lr=sort(3,1,2)": ["optimizer.lr=1", "optimizer.lr=2", "optimizer.lr=3"],
    "model=glob(gpt*)": ["model=gpt_small", "model=gpt_tiny"],
    "model=glob(*,exclude=*tiny)": ["model=gpt_small"],
    "+model.x=[1,2] name=a": ["+model.x=[1,2] name=a"],
    "program.script=fit.py program.args=[--lr,1e-3]": ["program.script=fit.py program.args=[--lr,1e-3]"],
    "program.args=a,b hydra.searchpath=[a,b]": ["program.args=a,b hydra.searchpath=[a,b]"],
    r'program.args=choice([--lr,"1,\"2"],["("],"a)",--x)': [
        r'program.args=[--lr,"1,\"2"]',
        'program.args=["("]',
        'program.args="a)"',
        "program.args=--x",
    ],
    "seed=1,2 hydra/sweeper=basic": ["seed=1", "seed=2"],
    "~model.width seed=1,2": ["~model.width seed=1", "~model.width seed=2"],
    "": [""],
}
REFUSED = {
    "seed=interval(0,1)": "Only a search tries intervals.*range.*hydra/sweeper=optuna",
    "model=glob(x*)": "has no values",
    "program.args=choice()": "has no values",
    "program.args=choice([a],[b)": "not closed",
    "seed=1,2 hydra/sweeper=ax": "basic sweeper.*hydra/sweeper=optuna",
    "hydra.sweeper.params.seed=1,2": "basic sweeper",
    "hydra.sweep.dir=x": "Each point of a sweep has a run folder",
    "hydra.mode=MULTIRUN": "`-m` sweeps",
    "hydra/launcher=joblib": r"\+cluster=NAME submits",
}


@pytest.mark.parametrize("words", POINTS)
def test_a_sweep_has_the_points_of_hydras_basic_sweeper(tmp_path: Path, words: str) -> None:
    project = make_project(tmp_path, model__gpt_tiny="_target_: torch.nn.Identity\n")
    found = points(words.split(), project, DEFAULT)
    assert [" ".join(point) for point in found] == POINTS[words]


@pytest.mark.parametrize("words", REFUSED)
def test_a_sweep_that_has_no_points_is_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        points(words.split(), make_project(tmp_path), DEFAULT)
    assert re.search(REFUSED[words], str(caught.value))
