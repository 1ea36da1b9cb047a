"""Free space of file systems, with and without a count."""

import os

import pytest

from slurmddp.checkpoint.files import space


@pytest.fixture
def says_nothing(tmp_path, monkeypatch):
    """A folder on a ramfs (the root of many diskless nodes) or a tmpfs without a limit: all counts are 0."""
    counted = os.statvfs("/proc")
    assert (counted.f_blocks, counted.f_bavail) == (0, 0)
    monkeypatch.setattr(space.os, "statvfs", lambda folder: counted)
    return tmp_path


def test_a_file_system_without_a_count_is_not_full(says_nothing):
    assert space.free_bytes(says_nothing) > 10**15
    space.require(says_nothing, 10**12)


def test_a_file_system_with_a_count_can_be_full(tmp_path, monkeypatch):
    counted = os.statvfs(tmp_path)
    monkeypatch.setattr(space.os, "statvfs", lambda folder: counted)
    assert space.free_bytes(tmp_path) == counted.f_bavail * counted.f_frsize
    with pytest.raises(space.NoRoomError, match="are free"):
        space.require(tmp_path, counted.f_blocks * counted.f_frsize)
