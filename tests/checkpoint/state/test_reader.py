"""Damage to a checkpoint is detected, and the one before it is used; nothing is unpickled."""

import json
import os
import random
import shutil

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import manifest
from slurmddp.errors import CheckpointError
from support.distributed.checkpoint_files import flip_bit, save, steps_in


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json"])
def test_each_flipped_bit_is_detected(tmp_path, file):
    chance = random.Random(file)
    size = (save(tmp_path / "x", 2, {"w": torch.randn(20)}) / file).stat().st_size
    for position in [0, size - 2, *(chance.randrange(size) for _ in range(20))]:
        root = tmp_path / str(position)
        first = save(root, 1, {"w": torch.randn(20)})
        path = save(root, 2, {"w": torch.randn(20)})
        flip_bit(path / file, min(position, (path / file).stat().st_size - 2))
        with pytest.raises(CheckpointError):
            checkpoint.read(path)
        assert checkpoint.latest(root) == first
        assert steps_in(root) == [1]
        assert (root / "bad-step-0000000002").is_dir()
        assert (root / "latest").read_text() == "step-0000000001\n"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, lengthen, os.unlink, lambda path: path.write_bytes(b"")])
def test_files_of_another_length_and_missing_files_are_detected(tmp_path, caplog, file, damage):
    first = save(tmp_path, 1)
    path = save(tmp_path, 2, {"w": torch.ones(9)})
    damage(path / file)
    if file == "manifest.json" and damage is cut:
        damage(path / file)  # the last byte is a line break, which JSON does not need
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert checkpoint.latest(tmp_path) == first
    assert "damaged" in caplog.text and "step-0000000002" in caplog.text


def test_without_a_good_checkpoint_latest_returns_none(tmp_path, caplog):
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2):
        (save(tmp_path, step) / "state.json").unlink()
    assert checkpoint.latest(tmp_path) is None
    assert caplog.text.count("damaged") == 2


@pytest.mark.parametrize("pointer", [None, "step-0000000001\n", "step-0000009999\n", "", "\0garbage"])
def test_a_missing_or_stale_pointer_does_not_matter(tmp_path, pointer):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert checkpoint.latest(tmp_path) == newest


def test_two_bad_checkpoints_of_one_step_get_two_names(tmp_path):
    for _ in range(2):
        (save(tmp_path, 1) / "state.json").unlink()
        assert checkpoint.latest(tmp_path) is None
    assert (tmp_path / "bad-step-0000000001").is_dir()
    assert (tmp_path / "bad-step-0000000001-2").is_dir()


def rewrite_manifest(path, **changes):
    """Write a manifest as another version would: with other content and its digest."""
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    (path / "manifest.json").write_text(json.dumps({**content, "sha256": manifest._digest(content)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3, "digest": "blake9"}, "has format 3; this slurmddp reads format 2"),
        ({"format": 1, "digest": None}, "has format 1; this slurmddp reads format 2"),
        ({"digest": "blake9"}, "its files are hashed by 'blake9'; this slurmddp supports xxh3_128"),
        ({"digest": ["x"]}, "hashed by \\['x'\\]"),
    ],
    ids=["later", "earlier", "unknown digest", "strange digest"],
)
def test_a_checkpoint_of_another_version_is_refused_and_not_quarantined(tmp_path, changes, words):
    save(tmp_path, 1)
    other = save(tmp_path, 2)
    rewrite_manifest(other, **changes)
    for act in (lambda: checkpoint.latest(tmp_path), lambda: checkpoint.read(other)):
        with pytest.raises(CheckpointError, match=words) as caught:
            act()
        assert "slurmddp that wrote it" in caught.value.hint
    assert steps_in(tmp_path) == [2, 1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda first, second: shutil.copy(first / "manifest.json", second),
        lambda first, second: second.rename(second.with_name("step-0000000009")),
        lambda first, second: rewrite_manifest(second, digest=None),
    ],
    ids=["of another checkpoint", "under the name of another step", "without a digest"],
)
def test_a_manifest_that_does_not_fit_is_damage(tmp_path, damage):
    first, second = save(tmp_path, 1, {"w": torch.ones(2)}), save(tmp_path, 2, {"w": torch.zeros(2)})
    damage(first, second)
    assert checkpoint.latest(tmp_path) == first


def test_nothing_in_a_checkpoint_is_ever_unpickled(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    path = save(tmp_path / "root", 1, {"w": torch.ones(2)})
    for file in ("state.safetensors", "state.json", "manifest.json"):
        (path / file).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert checkpoint.latest(tmp_path / "root") is None
    assert not (tmp_path / "exploded").exists()


def test_retention_does_not_count_a_damaged_checkpoint(tmp_path):
    for step in (1, 2, 3):
        path = save(tmp_path, step)
    flip_bit(path / "state.json")
    save(tmp_path, 4, keep_last=2)
    assert steps_in(tmp_path) == [4, 3, 2]
    assert checkpoint.latest(tmp_path).name.endswith("4")


def test_retention_keeps_the_best_checkpoint_that_verifies(tmp_path):
    for step, loss in ((1, 0.2), (2, 0.1), (3, 0.5), (4, 0.5)):
        save(tmp_path, step, keep_last=9, metrics={"loss": loss})
    flip_bit(tmp_path / "step-0000000002" / "state.json")
    checkpoint.write(tmp_path, 5, {}, meta={}, keep_last=2, keep_best=("loss", "min"))
    assert steps_in(tmp_path) == [5, 4, 1]


def test_only_the_newest_checkpoint_is_quarantined_and_only_if_an_older_one_verifies(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert checkpoint.quarantine_newest(tmp_path, 2) is None
    assert steps_in(tmp_path) == [3, 2, 1]
    assert checkpoint.quarantine_newest(tmp_path, 3) == ("bad-step-0000000003", 2)
    assert checkpoint.latest(tmp_path).name == "step-0000000002"


@pytest.mark.parametrize(
    ("every", "before", "chosen", "left"),
    [
        (3, 8, 6, [3, 6]),
        (3, 6, 3, [3]),
        (4, 8, 7, [3, 6, 7]),
        (0, 8, 7, [3, 6, 7]),
        (3, 3, None, [3, 6, 7, 9]),
    ],
)
def test_going_back_abandons_later_checkpoints(tmp_path, every, before, chosen, left):
    """A checkpoint of a regular step comes first: those of stops depend on the interruptions."""
    for step in (3, 6, 7, 9):
        save(tmp_path, step, {"w": torch.zeros(1)}, keep_last=9)
    assert checkpoint.go_back(tmp_path, every, before=before) == chosen
    assert sorted(steps_in(tmp_path)) == left
    assert len(list(tmp_path.glob("abandoned-*"))) == 4 - len(left)
    assert (tmp_path / "latest").read_text() == f"step-{chosen or 9:010}\n"
