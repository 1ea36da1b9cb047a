"""Lines of records survive a disk that was full for a while: one torn line costs itself and nothing else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurmddp.errors import SlurmddpError
from slurmddp.runs.folder import append_line, read_lines


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, {"event": "started"})
    with path.open("a") as stream:
        stream.write('{"event": "sav')
    append_line(path, {"event": "ended", "code": 1})
    assert list(read_lines(path)) == [{"event": "started"}, {"event": "ended", "code": 1}]


def test_a_line_glued_to_a_torn_one_is_read(tmp_path: Path) -> None:
    # The batch script appends without a look at what is there.
    path = tmp_path / "lines"
    path.write_text('{"event": "sav{"event": "ended", "code": 1}\n{"event": "started"}\n\n')
    assert list(read_lines(path)) == [{"event": "ended", "code": 1}, {"event": "started"}]


def test_what_no_writer_of_ours_left_is_still_told(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"event": "started"}\nsomebody was here\n')
    with pytest.raises(SlurmddpError, match="line 2 is not JSON"):
        list(read_lines(path))


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
