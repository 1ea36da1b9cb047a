"""Checkpoint folders: their files, digests, retention, and the leftovers of killed writers."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
import xxhash

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import durable
from slurmddp.checkpoint.files.digest import record_of
from slurmddp.checkpoint.files.publish import publish
from slurmddp.errors import CheckpointError, ConfigError
from support.distributed.checkpoint_files import flip_bit, hidden_in, save, steps_in


def test_t7_folder_layout_and_manifest(tmp_path):
    path = save(tmp_path / "deep" / "root", 1200, {"w": torch.ones(3)}, world_size=4, note=["x", None])
    assert path == tmp_path / "deep" / "root" / "step-0000001200"
    assert (path.parent / "latest").read_text() == "step-0000001200\n"
    assert {file.name for file in path.iterdir()} == {"manifest.json", "state.json", "state.safetensors"}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 1200
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["digest"] == "xxh3_128"
    loaded = checkpoint.read(path)
    assert (loaded.step, loaded.meta) == (1200, {"world_size": 4, "note": ["x", None]})


@pytest.mark.parametrize("in_memory", [True, False])
def test_large_and_small_parts_are_hashed_in_their_order(tmp_path, in_memory):
    sizes = [9 << 20, 10, 3, 1 << 18, 7, 20 << 20, 1]
    data = [bytes([index]) * size for index, size in enumerate(sizes)]
    record = durable.write_hashed(tmp_path / "file", [memoryview(part) for part in data], in_memory=in_memory)
    assert record == record_of(tmp_path / "file")
    assert record.digest == xxhash.xxh3_128_hexdigest(b"".join(data))


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_flush_that_fails_fails_the_write(tmp_path, monkeypatch, in_memory):
    def refuse(descriptor):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no"):
        durable.write_hashed(tmp_path / "file", [memoryview(b"x")], in_memory=in_memory)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [(torch.ones(4), True), (torch.ones(4, 5).t(), False), (torch.ones(3, dtype=torch.cfloat).conj(), False)],
)
def test_only_tensors_in_memory_are_hashed_during_the_flush(tmp_path, monkeypatch, tensor, expected):
    real, asked = durable.write_hashed, {}

    def spy(path, parts, **options):
        asked[path.name] = options.get("in_memory", False)
        return real(path, parts, **options)

    monkeypatch.setattr("slurmddp.checkpoint.state.writer.write_hashed", spy)
    save(tmp_path, 1, {"plain": torch.ones(2), "tensor": tensor})
    assert asked == {"state.safetensors": expected, "state.json": False}


@pytest.mark.parametrize(
    ("steps", "keep_last", "kept"),
    [(range(1, 8), 3, [7, 6, 5]), (range(1, 5), 1, [4, 3]), ([10, 20, 1, 2, 3, 4], 2, [20, 10, 4, 3])],
    ids=["the last", "always two", "later steps"],
)
def test_t8_retention_keeps_the_last_checkpoints_and_those_of_later_steps(tmp_path, steps, keep_last, kept):
    for step in steps:
        newest = save(tmp_path, step, keep_last=keep_last)
        assert newest.is_dir()
    assert steps_in(tmp_path) == kept
    assert hidden_in(tmp_path) == []


def test_the_same_step_again(tmp_path):
    first = save(tmp_path, 1, {"w": torch.ones(2)})
    inode = first.stat().st_ino
    assert save(tmp_path, 1, {"w": torch.ones(2)}) == first
    assert first.stat().st_ino == inode, "an equal checkpoint is not replaced"
    save(tmp_path, 1, {"w": torch.zeros(2)})
    assert torch.equal(checkpoint.read(first).state["w"], torch.zeros(2))
    flip_bit(first / "state.json")
    save(tmp_path, 1, {"w": torch.zeros(2)})
    assert torch.equal(checkpoint.read(checkpoint.latest(tmp_path)).state["w"], torch.zeros(2))
    assert hidden_in(tmp_path) == []


def published(root, monkeypatch):
    """Publish step 7; return its flushes and renames in their order, with generated names cut to a dot."""
    calls = []

    def fill(folder):
        return {"part": durable.write_hashed(folder / "part", [memoryview(b"x")])}

    def name_of(path):
        return "." if path.name.startswith(".") else path.name

    def traced(kind, real, path_of):
        def call(*words):
            calls.append((kind, name_of(path_of(*words))))
            return real(*words)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", traced("flush", os.fsync, lambda fd: Path(f"/proc/self/fd/{fd}").readlink())
        )
        patch.setattr(Path, "rename", traced("rename", Path.rename, lambda path, target: target))
        publish(root, 7, fill, meta={}, durable=lambda: calls.append(("durable", "")), keep_last=3)
    return calls


def test_t8_all_is_flushed_before_and_after_the_rename_that_publishes(tmp_path, monkeypatch):
    """A power cut at any moment then leaves a whole checkpoint: this one, or the one before."""
    root = tmp_path / "root"
    pointer = [("flush", "."), ("flush", "root")]
    assert published(root, monkeypatch) == [
        ("flush", "part"),
        ("flush", "manifest.json"),
        ("flush", "."),  # the hidden folder
        ("rename", "step-0000000007"),
        ("flush", "root"),
        *pointer,
        ("durable", ""),
    ]
    again = published(root, monkeypatch)
    assert again[3:] == [("flush", "root"), *pointer, ("durable", "")], "the first flush may have failed"


def test_older_checkpoints_are_deleted_after_the_new_one_is_durable(tmp_path, monkeypatch):
    root = tmp_path / "root"
    for step in (1, 2, 3):
        save(root, step)
    calls = published(root, monkeypatch)
    assert steps_in(root) == [7, 3, 2]
    assert calls.index(("durable", "")) < calls.index(("rename", ".")), "a deletion begins with a rename"


def test_a_save_deletes_the_leftovers_of_a_killed_writer(tmp_path):
    save(tmp_path, 1)
    for name in (".writing-step-0000000002-77", ".deleting-step-0000000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    (tmp_path / ".writing-latest-77").write_text("step")
    assert checkpoint.latest(tmp_path).name == "step-0000000001"
    save(tmp_path, 2)
    assert hidden_in(tmp_path) == []
    assert steps_in(tmp_path) == [2, 1]


def test_a_checkpoint_that_a_killed_writer_was_replacing_is_restored(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / ".replaced-step-0000000001")
    assert checkpoint.latest(tmp_path) == path


@pytest.mark.parametrize(
    ("keep_last", "step", "meta"), [(0, 1, {}), (3, -1, {}), (3, 1, {"a": (1,)}), (3, 1, {"x": math.nan})]
)
def test_impossible_arguments(tmp_path, keep_last, step, meta):
    with pytest.raises((CheckpointError, ConfigError)):
        checkpoint.write(tmp_path / "root", step, {}, meta=meta, keep_last=keep_last)
    assert not (tmp_path / "root").exists()


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("mine")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "root", 1)
    assert (tmp_path / "root").read_text() == "mine"


def test_read_refuses_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.read(tmp_path / "nowhere")
