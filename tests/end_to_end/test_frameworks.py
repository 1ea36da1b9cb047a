"""Scripts of other frameworks find their ranks in local runs, on one node and on two emulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.frameworks import FRAMEWORKS, places, write_scripts
from support.runs.train_runs import only_run, slurmddp

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]


SHORT = ("torch", "hydra")
"""The scripts that `make test` starts on one node too. The others take longer there: `pytest -m slow`."""


def on_one_node(name: str) -> Any:
    return pytest.param(name, 1, marks=() if name in SHORT else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "nodes"), [*map(on_one_node, FRAMEWORKS), *((name, 2) for name in FRAMEWORKS)]
)
def test_a_framework_finds_its_ranks_and_nothing_is_set_by_hand(
    tmp_path: Path, name: str, nodes: int
) -> None:
    framework = FRAMEWORKS[name]
    write_scripts(tmp_path)
    started = 1 if framework.starts_own_ranks > 1 else 2 // nodes
    slurmddp(tmp_path, "run", "launcher=local", f"nodes={nodes}", "-n", str(started), *framework.words)
    each = started * framework.starts_own_ranks
    expected = [[rank, rank % each, nodes * each, 0, 4] for rank in range(nodes * each)]
    assert places(only_run(tmp_path).path) == expected
