"""Sharded files get the verification of all checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as sharded

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import write_hashed
from slurmddp.checkpoint.files.manifest import verify
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_FAILED, CheckpointError
from support.distributed import sharded_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_files_are_verified_and_quarantined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    saved = run_ranks(sharded_jobs.write_sharded, 2, str(root), [10, 20], timeout_s=250)
    first, second = (Path(path) for path in saved[1])
    assert set(verify(second).files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert checkpoint.latest(root) == second
    assert main(["checkpoints", str(root), "--verify", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["state"] for row in rows] == ["verified", "verified"]

    damaged = second / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert checkpoint.latest(root) == first
    assert (root / "bad-step-0000000020").is_dir()
    (first / "__1_0.distcp").rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        verify(first)
    (tmp_path / "kept").rename(first / "__1_0.distcp")

    # One process reads what two have written.
    found = {"w": torch.zeros(100, 10)}
    sharded.load(found, checkpoint_id=checkpoint.latest(root), no_dist=True)
    assert torch.equal(found["w"], sharded_jobs.whole(10))


def test_readers_of_whole_states_refuse_a_sharded_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.publish(tmp_path / "root", 1, lambda folder: {}, meta={}, keep_last=3)
    with pytest.raises(CheckpointError, match=r"the manifest does not list state\.safetensors"):
        checkpoint.read(path)
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(tmp_path / "root")]) == EXIT_FAILED
    assert "the manifest does not list state.safetensors" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_a_file_without_a_record_is_refused(tmp_path: Path) -> None:
    def fill(folder: Path) -> dict[str, FileRecord]:
        (folder / "deep").mkdir()
        (folder / "deep" / "forgotten").write_text("it")
        return {"state.json": write_hashed(folder / "state.json", [memoryview(b"{}")])}

    with pytest.raises(CheckpointError, match=r"fill\(\) wrote deep/forgotten, but returned no record"):
        checkpoint.publish(tmp_path, 1, fill, meta={}, keep_last=3)
    with pytest.raises(CheckpointError, match=r"fill\(\) returned a record of x, but wrote no such file"):
        checkpoint.publish(tmp_path, 1, lambda folder: {"x": FileRecord(0, "0")}, meta={}, keep_last=3)
    assert not list(tmp_path.iterdir())
