"""A file replaces another file at once, under a name that nobody can guess, and follows no link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.host import atomic_file as module
from slurmddp.host.atomic_file import replacing


def test_the_old_content_stays_until_the_end(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with replacing(file) as stream:
        stream.write(b"new")
        stream.flush()
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(RuntimeError), replacing(file) as stream:
        stream.write(b"new")
        raise RuntimeError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.secrets, "token_hex", lambda size: "guessed")
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / ".file.guessed").symlink_to(mine)
    with pytest.raises(FileExistsError), replacing(folder / "file") as stream:
        stream.write(b"new")
    assert mine.read_text() == "mine"


def test_two_writers_do_not_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with replacing(file) as first, replacing(file) as second:
        first.write(b"first first")
        second.write(b"second")
    assert file.read_text() == "first first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_the_owner_may_write_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with replacing(tmp_path / "file"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
