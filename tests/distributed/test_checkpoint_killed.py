"""Whatever moment a saving process is killed at, the newest checkpoint can be read and is right."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("saves_killed.py")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder on another file system than that of the other tests' files."""
    folder = Path(tempfile.mkdtemp(prefix="slurmddp-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def outcomes(*arguments, temporary=None):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **({"TMPDIR": str(temporary)} if temporary else {})},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kill_at_random(root, times, temporary):
    """Kill that many saves; the newest checkpoint is right after each, and never an older one than before."""
    lines = outcomes(str(root), "random", "7", str(times), temporary=temporary)
    assert sum(line["killed"] for line in lines) == times
    assert all(line["right"] for line in lines)
    found = [line["found"] for line in lines]
    assert found == sorted(found), "an older checkpoint became the newest"
    assert all(line["found"] == line["saving"] for line in lines if line["ended"])
    assert any(line["found"] == line["saving"] for line in lines)
    assert not list(temporary.iterdir()), "a file went by way of the temporary folder"


@pytest.mark.distributed
def test_killed_before_each_file_operation_in_turn(tmp_path):
    lines = outcomes(str(tmp_path / "root"), "steps")
    assert all(line["right"] for line in lines)
    assert all(2 <= line["found"] <= line["saving"] for line in lines), "step 2 was there from the start"
    assert all(line["found"] == line["saving"] for line in lines if line["ended"])
    assert sum(line["killed"] for line in lines) > 30


@pytest.mark.distributed
def test_killed_at_random_moments(tmp_path, in_memory):
    kill_at_random(tmp_path / "root", 25, in_memory)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("where", ["one file system", "TMPDIR elsewhere", "target elsewhere"])
def test_killed_at_two_hundred_random_moments(tmp_path, in_memory, where):
    (tmp_path / "tmp").mkdir()
    assert in_memory.stat().st_dev != tmp_path.stat().st_dev, "these are meant to be two file systems"
    root = (in_memory if where == "target elsewhere" else tmp_path) / "root"
    temporary = tmp_path / "tmp"
    if where == "TMPDIR elsewhere":
        temporary = in_memory / "tmp"
        temporary.mkdir()
    kill_at_random(root, 200, temporary)
