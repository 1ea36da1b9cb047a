"""Checkpoints of several writers: each writes a part, one waits for all parts and publishes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.checkpoint.files import parts as module
from slurmddp.checkpoint.files import publish as publishing
from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import write_hashed
from slurmddp.checkpoint.files.manifest import Manifest, folder_name, shard_file, verify
from slurmddp.checkpoint.files.parts import Parts
from slurmddp.checkpoint.files.publish import Fill, publish
from slurmddp.errors import CheckpointError
from support.distributed.checkpoint_files import hidden_in, steps_in


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    monkeypatch.setattr("slurmddp.checkpoint.files.retry.WAITS_S", (0.01,))


def filling(*ranks: int) -> Fill:
    """Return a function that writes the files of these ranks."""

    def fill(folder: Path) -> dict[str, FileRecord]:
        names = map(shard_file, ranks)
        return {name: write_hashed(folder / name, [memoryview(name.encode())]) for name in names}

    return fill


def save(parts: Parts, step: int = 1) -> Path:
    """Publish with the part of rank 0, and wait for the other ones."""

    def fill(folder: Path) -> dict[str, FileRecord]:
        own = dict(filling(0)(folder))
        return own | parts.collect(parts.files - own.keys(), folder)

    return publish(parts.root, step, fill, meta={}, keep_last=3)


def parts_of(root: Path, stamp: int = 1, step: int = 1) -> Parts:
    return Parts(root, folder_name(step), stamp, 4)


def without_links(source: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("link", [os.link, without_links])
def test_the_parts_of_all_writers_are_published_together(
    tmp_path: Path, link: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", link)
    parts = parts_of(tmp_path)
    parts.write(1, filling(1))
    parts.write(2, filling(2, 3))
    manifest = verify(save(parts))
    assert set(manifest.files) == {shard_file(rank) for rank in range(4)}
    later = parts_of(tmp_path, 3)
    later.write(1, filling(1))
    parts_of(tmp_path, 2).sweep()
    assert hidden_in(tmp_path) == [later.folder.name], "a later save still needs its parts"


def test_a_part_that_does_not_come_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.write(2, filling(2, 3))
    with pytest.raises(
        CheckpointError, match=r"shard-00001.safetensors of step-0000000001 was not completed"
    ):
        save(parts)
    assert steps_in(tmp_path) == []
    assert hidden_in(tmp_path) == [parts.folder.name]


def test_an_error_of_a_writer_reaches_the_publisher_and_a_second_try_begins_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> dict[str, FileRecord]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "PATIENCE_S", 300.0)
    parts = parts_of(tmp_path)
    parts.write(1, filling(1))
    with pytest.raises(CheckpointError, match="A part of step-0000000001 could not be written"):
        parts.write(2, full)
    with pytest.raises(CheckpointError, match=r"Another node did not write its part.*No space left"):
        save(parts)
    parts.write(2, filling(2, 3))
    assert set(verify(save(parts)).files) == parts.files


def test_a_part_whose_size_is_wrong_is_not_published(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.write(1, filling(1, 2, 3))
    (parts.folder / "rank-00001" / shard_file(2)).write_text("short")
    with pytest.raises(CheckpointError, match=r"shard-00002\.safetensors has 5 bytes instead of"):
        save(parts)
    assert steps_in(tmp_path) == []


def test_transient_errors_of_the_writer_and_of_the_publisher_are_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, failures = publishing.complete, ["part", "manifest"]

    def fails_once(what: str) -> None:
        if what in failures:
            failures.remove(what)
            raise OSError(errno.EIO, "Input/output error")

    def flaky(folder: Path) -> dict[str, FileRecord]:
        records = dict(filling(1, 2, 3)(folder))
        fails_once("part")
        return records

    def complete_later(folder: Path, manifest: Manifest) -> None:
        fails_once("manifest")
        complete(folder, manifest)

    monkeypatch.setattr(publishing, "complete", complete_later)
    parts = parts_of(tmp_path)
    parts.write(1, flaky)
    assert set(verify(save(parts)).files) == parts.files
    assert failures == []
