"""A training whose ranks are killed restarts in place and ends with the numbers of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.folder.layout import RunFolder
from support.distributed.trainer_runs import assert_same, curve, final_state, trainer_config
from support.runs.agent_runs import events, make_run, wait_until
from support.runs.torch_agents import agents_of, codes_of, logs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]
STEPS = 12


def make(path: Path, nodes: int, in_memory: int, save_every: int, **changes: Any) -> RunFolder:
    """Make the folder of a run on two ranks."""
    settings = {"steps": STEPS, "batch_size": 2, "log_every": 1, "eval_every": 4, "eval_batches": 5}
    config = trainer_config(
        data={"_target_": "support.distributed.exact_jobs.Blurred", "size": 21, "heldout": 10},
        train={**settings, "save_every": save_every, "memory_save_every": in_memory},
        model={"_target_": "support.distributed.faulty_jobs.Falling"},
        **changes,
    )
    return make_run(path, "", nodes=nodes, ranks_per_node=2 // nodes, **config)


def attempt(folder: RunFolder, nodes: int, falls: dict[int, tuple[int, int]], number: int = 0) -> list[int]:
    """Let the real agents train; `falls`: after each restart, the rank that dies and its step."""
    with agents_of(folder, nodes, attempt=number, FALLS=json.dumps(falls)) as agents:
        return codes_of(agents)


def train(
    path: Path, nodes: int, falls: dict[int, tuple[int, int]], in_memory: int, save_every: int
) -> RunFolder:
    folder = make(path, nodes, in_memory, save_every)
    assert attempt(folder, nodes, falls) == [0] * nodes, logs(folder)
    return folder


def steps_of(folder: RunFolder, event: str) -> list[int]:
    return [one["step"] for one in events(folder, event)]


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
    assert curve(folder) == curve(undisturbed)
    assert_same(final_state(folder), final_state(undisturbed))


def test_what_only_memory_holds_when_an_attempt_fails_is_on_the_disk_for_the_next(
    tmp_path: Path, undisturbed: RunFolder
) -> None:
    folder = make(tmp_path, 2, in_memory=1, save_every=0, policy={"max_restarts_in_place": 0})
    assert attempt(folder, 2, {0: (1, 8)}) == [1, 1], logs(folder)
    assert steps_of(folder, "saved") == [7]
    assert attempt(folder, 2, {}, number=1) == [0, 0], logs(folder)
    assert [(one["attempt"], one["step"]) for one in events(folder, "resumed")] == [(1, 7)]
    assert_same(final_state(folder), final_state(undisturbed))


def test_the_second_node_saves_what_memory_holds_when_the_first_is_lost(
    tmp_path: Path, undisturbed: RunFolder
) -> None:
    folder = make(tmp_path, 2, in_memory=1, save_every=0)
    with agents_of(folder, 2, FALLS=json.dumps({0: (1, 8)}), FALL="stop") as agents:
        log = folder.rank_log(0, 1)
        wait_until(
            lambda: log.exists() and "asleep" in log.read_text(), "rank 1, on node 1, sleeps in step 8"
        )
        agents[0].kill()
        assert agents[1].wait(timeout=400) == 1, logs(folder)
    assert steps_of(folder, "saved") == [7]
    assert attempt(folder, 2, {}, number=1) == [0, 0], logs(folder)
    assert_same(final_state(folder), final_state(undisturbed))
