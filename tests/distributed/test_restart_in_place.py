"""A training whose ranks are killed goes on in place and ends with the numbers of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from torch_agents import agents_of, codes_of, logs
from trainer_runs import assert_same, final_state, trainer_config

from slurmddp.runs.folder import RunFolder, read_lines

pytestmark = pytest.mark.distributed
STEPS = 12


def train(
    path: Path, nodes: int, falls: dict[int, tuple[int, int]], in_memory: int, save_every: int
) -> RunFolder:
    """Train on two ranks with the real agents; `falls`: which rank of a generation dies in its which step."""
    settings = {"steps": STEPS, "batch_size": 2, "log_every": 1, "eval_every": 4, "eval_batches": 5}
    config = trainer_config(
        data={"_target_": "exact_jobs.Blurred", "size": 21, "heldout": 10},
        train={**settings, "save_every": save_every, "memory_save_every": in_memory},
        model={"_target_": "falling_jobs.Falling"},
    )
    folder = RunFolder(path / "runs" / "test-00000000")
    folder.path.mkdir(parents=True)
    (path / "project").mkdir()
    size = {"nodes": nodes, "ranks_per_node": 2 // nodes, "project_dir": str(path / "project")}
    folder.config_file.write_text(yaml.safe_dump({**config, **size}))
    own = {"PYTHONPATH": str(Path(__file__).parent), "FALLS": json.dumps(falls), "OMP_NUM_THREADS": "1"}
    with agents_of(folder, nodes, **own) as agents:
        assert codes_of(agents) == [0] * nodes, logs(folder)
    return folder


def steps_of(folder: RunFolder, event: str) -> list[int]:
    return [one["step"] for one in folder.events() if one["event"] == event]


def losses(folder: RunFolder) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(folder.metrics_file) if "loss" in line}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(tmp_path_factory.mktemp("undisturbed"), nodes=1, falls={}, in_memory=0, save_every=0)


@pytest.mark.parametrize(
    ("nodes", "in_memory", "save_every", "resumed"),
    [(1, 0, 3, [6, 9]), (2, 1, 0, [7, 9])],
    ids=["from-the-disk", "from-memory-on-two-nodes"],
)
def test_killed_ranks_cost_the_steps_since_the_newest_state_and_nothing_else(
    tmp_path: Path, undisturbed: RunFolder, nodes: int, in_memory: int, save_every: int, resumed: list[int]
) -> None:
    # In step 8 and, by the ranks that went on from step 6 or 7, in step 10.
    falls = {0: (1, 8), 1: (0, 10 - resumed[0])}
    folder = train(tmp_path, nodes, falls, in_memory, save_every)
    assert steps_of(folder, "resumed") == resumed
    assert steps_of(folder, "restarted") == [7, 9]
    assert folder.attempts() == [0]
    assert not folder.failure_file(0).exists()
    assert losses(folder) == losses(undisturbed)
    assert_same(final_state(folder), final_state(undisturbed))
