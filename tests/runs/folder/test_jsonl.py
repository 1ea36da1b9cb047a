"""Records survive a disk that was full for a while: a torn line is lost, and no other line."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder.jsonl import append_line, read_lines


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, {"event": "started"})
    with path.open("a") as stream:
        stream.write('{"event": "sav')
    append_line(path, {"event": "ended", "code": 1})
    assert list(read_lines(path)) == [{"event": "started"}, {"event": "ended", "code": 1}]


@pytest.mark.parametrize("torn", ['{"event": "sav', "\0" * 512])
def test_a_line_glued_to_a_torn_one_or_to_a_hole_of_zeros_is_read(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines"
    path.write_text(torn + '{"event": "ended", "code": 1}\n{"event": "started"}\n\n')
    assert list(read_lines(path)) == [{"event": "ended", "code": 1}, {"event": "started"}]


@pytest.mark.parametrize("broken", ["somebody was here\n", "\0" * 4096 + "\n", "[1, 2]\n", "7\n"])
def test_a_broken_line_costs_only_itself_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    path = tmp_path / "lines"
    path.write_text('{"event": "started"}\n' + broken + '{"event": "ended"}\n')
    for _ in range(2):
        assert list(read_lines(path)) == [{"event": "started"}, {"event": "ended"}]
    assert caplog.text.count("line 2") == 1 and "is skipped" in caplog.text


def test_a_file_without_any_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("somebody was here\n7\n")
    with pytest.raises(SlurmddpError, match="line 1 is not JSON"):
        list(read_lines(path))


def test_two_writers_that_see_a_torn_line_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "lines", os.write
    held: list[bool] = []

    def write(descriptor: int, data: bytes) -> int:
        with path.open("a") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        return whole(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    append_line(path, {"event": "started"})
    assert held == [True]


@pytest.mark.parametrize("trouble", [errno.ENOLCK, errno.EWOULDBLOCK])
def test_a_lock_that_can_not_be_had_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(trouble, os.strerror(trouble))

    monkeypatch.setattr(fcntl, "flock", refuse)
    append_line(tmp_path / "lines", {"event": "started"})
    assert list(read_lines(tmp_path / "lines")) == [{"event": "started"}]


def test_a_line_that_is_cut_short_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = tmp_path / "lines", os.write
    room = [7]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = whole(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, {"event": "started"})
    room[0] = 1000
    append_line(path, {"event": "ended"})
    assert list(read_lines(path)) == [{"event": "ended"}]
