"""Sharded trainings that are killed or stopped end with the bits of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmddp.checkpoint.files.manifest import checkpoint_folders, shard_file, verify
from slurmddp.errors import EXIT_FAILED, EXIT_STOPPED
from slurmddp.runs.folder.layout import RunFolder
from support.distributed.checkpoint_files import hidden_in
from support.distributed.trainer_runs import assert_same, curve, final_state, trainer_config
from support.runs.agent_runs import events, make_run
from support.runs.torch_agents import agents_of, codes_of, logs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]


def make(path: Path, nodes: int, policy: dict[str, int] | None = None, **train: int) -> RunFolder:
    """Make the folder of a sharded run of 12 steps on two ranks."""
    settings = {
        "steps": 12,
        "batch_size": 2,
        "log_every": 1,
        "eval_every": 4,
        "eval_batches": 5,
        "clip_norm": 1.0,
    }
    config = trainer_config(
        data={"_target_": "support.distributed.exact_jobs.Blurred", "size": 21, "heldout": 10},
        train={**settings, **train},
        model={"_target_": "support.distributed.faulty_jobs.Falling"},
        strategy={"name": "fsdp"},
        policy=policy or {},
    )
    return make_run(path, "", nodes=nodes, ranks_per_node=2 // nodes, **config)


def attempt(
    folder: RunFolder, nodes: int, falls: dict[int, tuple[int, int]], code: int = 0, **options: object
) -> None:
    with agents_of(folder, nodes, FALLS=json.dumps(falls), **options) as agents:
        assert codes_of(agents) == [code] * nodes, logs(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = make(tmp_path_factory.mktemp("undisturbed"), 1, save_every=0, memory_save_every=0)
    attempt(folder, 1, {})
    return folder


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_resume_from_memory_after_a_kill(tmp_path: Path, undisturbed: RunFolder, nodes: int) -> None:
    folder = make(tmp_path, nodes, save_every=0, memory_save_every=1)
    attempt(folder, nodes, {0: (1, 5)})
    assert [(one["from"], one["step"]) for one in events(folder, "resumed")] == [("memory", 4)]
    assert curve(folder) == curve(undisturbed)
    assert_same(final_state(folder), final_state(undisturbed))
    newest = verify(checkpoint_folders(folder.checkpoints_dir)[0])
    assert shard_file(1) in newest.files


def test_both_nodes_write_their_parts_when_an_attempt_ends_without_a_save(
    tmp_path: Path, undisturbed: RunFolder
) -> None:
    folder = make(tmp_path, 2, {"max_restarts_in_place": 0}, save_every=0, memory_save_every=1)
    attempt(folder, 2, {0: (1, 8)}, EXIT_FAILED)
    assert [(one["step"], "copied" in one) for one in events(folder, "saved")] == [(7, True)]
    (saved,) = checkpoint_folders(folder.checkpoints_dir)
    assert {shard_file(0), shard_file(1)} < verify(saved).files.keys()
    attempt(folder, 2, {}, attempt=1)
    assert [(one["from"], one["step"]) for one in events(folder, "resumed")] == [("disk", 7)]
    assert curve(folder) == curve(undisturbed)
    assert_same(final_state(folder), final_state(undisturbed))
    assert hidden_in(folder.checkpoints_dir) == []


def test_ranks_resume_from_the_disk_after_a_stop(tmp_path: Path, undisturbed: RunFolder) -> None:
    folder = make(tmp_path, 1, save_every=3, memory_save_every=0)
    attempt(folder, 1, {0: (1, 8)}, EXIT_STOPPED, FALL="term")
    (stopped, *_) = checkpoint_folders(folder.checkpoints_dir)
    assert shard_file(1) in verify(stopped).files
    attempt(folder, 1, {}, attempt=1)
    assert [(one["from"], one["step"]) for one in events(folder, "resumed")] == [
        ("disk", verify(stopped).step)
    ]
    assert curve(folder) == curve(undisturbed)
    assert_same(final_state(folder), final_state(undisturbed))
