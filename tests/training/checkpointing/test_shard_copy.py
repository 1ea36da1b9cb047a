"""Checkpoints of sharded trainings: a file per rank, verified, and loaded on any number of ranks."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.export import export_weights
from slurmddp.checkpoint.files.manifest import shard_file, verify
from support.distributed import fsdp_jobs
from support.distributed.checkpoint_files import hidden_in, steps_in
from support.distributed.ranks import node_environments, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    """A training of two ranks with checkpoints of steps 1 and 2, its last state, and the state at step 4."""
    root = tmp_path_factory.mktemp("saved")
    first = run_ranks(fsdp_jobs.save_at, 2, str(root), [1, 2])[0]
    return root, first, run_ranks(fsdp_jobs.train, 2, "fsdp", {}, 4)[0]["state"]


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_resume_on_as_many_ranks_reads_its_own_shard_and_keeps_every_bit(
    saved: tuple[Path, State, State],
) -> None:
    root, state, end = saved
    manifest = verify(root / "step-0000000002")
    assert {shard_file(0), shard_file(1)} < manifest.files.keys()
    for found in run_ranks(fsdp_jobs.load_and_train, 2, str(root), 4):
        assert found["step"] == 2
        assert found["files"] == [shard_file(found["rank"]), "state.safetensors"]
        assert_equal(found["loaded"], state)
        assert_equal(found["last"], end)


@pytest.mark.parametrize(("ranks", "strategy"), [(3, "fsdp"), (1, "fsdp"), (1, "single"), (2, "ddp")])
def test_other_ranks_and_strategies_load_the_same_state(
    ranks: int, strategy: str, saved: tuple[Path, State, State]
) -> None:
    root, state, end = saved
    found = run_ranks(fsdp_jobs.load_and_train, ranks, str(root), 4, strategy)[0]
    assert_equal(found["loaded"], state)
    for name, value in end.items():
        torch.testing.assert_close(found["last"][name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_fsdp_loads_a_checkpoint_of_replicas_and_saves_with_wait(tmp_path: Path) -> None:
    state = run_ranks(fsdp_jobs.save_at, 2, str(tmp_path / "ddp"), [1], "ddp")[0]
    for found in run_ranks(fsdp_jobs.load_and_train, 3, str(tmp_path / "ddp"), 1):
        assert_equal(found["loaded"], state)
    waited = run_ranks(fsdp_jobs.save_and_wait, 2, str(tmp_path / "waited"))[0]
    assert_equal(objects(tmp_path / "waited" / "step-0000000001"), waited)


def test_tensors_that_are_not_split_by_rows_are_saved_whole(tmp_path: Path) -> None:
    assert run_ranks(fsdp_jobs.save_other_placements, 2, str(tmp_path)) == [True, True]
    saved = checkpoint.read(tmp_path / "step-0000000001").state["objects"]["model"]
    values = torch.arange(24.0).reshape(4, 6)
    assert_equal(saved, {"columns": values, "copies": values})


def objects(folder: Path) -> State:
    """Return the whole model and optimizer state in a checkpoint, named as by `whole_state`."""
    saved: dict[str, Any] = checkpoint.read(folder).state["objects"]
    moments = saved["optimizer"]["state"]
    return {
        **saved["model"],
        **{f"{number}/{name}": value for number, one in moments.items() for name, value in one.items()},
    }


def test_one_process_reads_and_exports_whole_tensors(
    saved: tuple[Path, State, State], tmp_path: Path
) -> None:
    root, state, _ = saved
    assert_equal(objects(root / "step-0000000002"), state)
    output = tmp_path / "weights.safetensors"
    _, names = export_weights(root / "step-0000000002", output, model=None, force=False)
    exported = load_file(output)
    assert sorted(exported) == sorted(names)
    assert_equal(exported, {name: state[name] for name in names})


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_bad_shard_is_found_and_the_checkpoint_before_it_loaded(
    damage: str, saved: tuple[Path, State, State], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = shutil.copytree(saved[0], tmp_path / "copy")
    shard = root / "step-0000000002" / shard_file(1)
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        newest = checkpoint.latest(root)
    assert newest == root / "step-0000000001"
    assert shard_file(1) in caplog.text
    assert (root / "bad-step-0000000002").is_dir()
    found = run_ranks(fsdp_jobs.load_and_train, 2, str(root), 4)[0]
    assert found["step"] == 1
    assert_equal(found["last"], saved[2])


@pytest.mark.parametrize(("each", "wait"), [(1, False), (2, True)])
def test_each_node_writes_its_own_shards_and_no_rank_gathers_them(
    each: int, wait: bool, tmp_path: Path
) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    run.mkdir()
    nodes = node_environments(2, each, run)
    found = run_ranks(fsdp_jobs.save_on_nodes, 2 * each, str(root), wait, environments=nodes)
    newest = root / "step-0000000002"
    assert verify(newest).files.keys() > {shard_file(rank) for rank in range(2 * each)}
    for one in found:
        assert one["gathered"] == 0
        assert one["received"] < one["shards"], "only facts are exchanged"
        assert len(one["held"]) == (0 if wait else 2)
        assert all(size < 4 * one["shards"] for size in one["held"]), "parameters and two moments of one rank"
    assert_equal(objects(newest), found[0]["state"])
    assert hidden_in(root) == []
    output = tmp_path / "weights.safetensors"
    export_weights(newest, output, model=None, force=False)
    weights = load_file(output)
    assert_equal(weights, {name: found[0]["state"][name] for name in weights})
    for ranks in (2, 1):
        loaded = run_ranks(fsdp_jobs.load_wide, ranks, str(root))
        assert_equal(loaded[0], found[0]["state"])
    nodes = node_environments(2, 1, run)
    assert_equal(run_ranks(fsdp_jobs.load_wide, 2, str(root), environments=nodes)[0], found[0]["state"])


def test_a_killed_writer_of_one_node_costs_one_checkpoint_and_a_node_without_memory_none(
    tmp_path: Path,
) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    run.mkdir()
    nodes = node_environments(2, 1, run)
    for error in run_ranks(fsdp_jobs.save_while_a_writer_is_killed, 2, str(root), environments=nodes):
        assert "The writer process ended before the checkpoint of step 2 was complete" in error
    assert steps_in(root) == [5, 4, 3]
    assert len({tuple(verify(root / f"step-000000000{step}").files.items()) for step in (3, 4, 5)}) == 1
    assert hidden_in(root) == []
