"""Leftovers of killed writers are deleted; files of live writers stay."""

from __future__ import annotations

from pathlib import Path

from slurmddp.checkpoint.files import retention
from slurmddp.host.atomic_file import replacing


def test_a_temporary_pointer_is_deleted_only_after_its_writer_has_ended(tmp_path: Path) -> None:
    pointer, left, other = (
        tmp_path / "latest",
        tmp_path / ".latest.0123456789abcdef",
        tmp_path / ".latest.mine",
    )
    for path in (left, other):
        path.write_text("step-0000000003\n")
    with replacing(pointer) as stream:
        stream.write(b"step-0000000004\n")
        retention.clear_leftovers(tmp_path)
        assert not left.exists()
    assert pointer.read_text() == "step-0000000004\n"
    assert sorted(tmp_path.iterdir()) == sorted([pointer, other])


def test_a_folder_that_a_live_writer_fills_is_not_deleted(tmp_path: Path) -> None:
    held, dead = tmp_path / ".writing-step-0000000003-1", tmp_path / ".writing-step-0000000003-2"
    held.mkdir()
    dead.mkdir()
    with retention.locked(held):
        retention.clear_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [held.name]
    retention.clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
