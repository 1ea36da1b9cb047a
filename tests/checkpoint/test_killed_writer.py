"""After a kill at any moment of a save, the newest checkpoint reads and is right."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import TESTS

PROGRAM = TESTS / "support/distributed/saves_killed.py"


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


@pytest.mark.distributed
def test_killed_before_each_file_operation_in_turn(tmp_path):
    lines = outcomes(str(tmp_path / "root"), "steps")
    assert all(line["right"] for line in lines)
    assert all(2 <= line["found"] <= line["saving"] for line in lines), "step 2 was there from the start"
    assert all(line["found"] == line["saving"] for line in lines if line["ended"])
    assert sum(line["killed"] for line in lines) > 30


@pytest.mark.distributed
def test_a_writer_of_a_part_or_the_publisher_is_killed_before_each_file_operation(tmp_path):
    lines = outcomes(str(tmp_path / "root"), "parts")
    assert all(line["right"] and line["found"] in (2, 3) for line in lines)
    assert [line["found"] for line in lines if line["ended"]] == [3, 3]
    assert {line["found"] for line in lines if line["killed"]} == {2, 3}
    assert sum(line["killed"] for line in lines) > 20


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("where", "times"),
    [
        ("TMPDIR elsewhere", 25),
        pytest.param("TMPDIR elsewhere", 200, marks=pytest.mark.slow),
        pytest.param("target elsewhere", 200, marks=pytest.mark.slow),
        pytest.param("one file system", 200, marks=pytest.mark.slow),
    ],
)
def test_t8_killed_at_random_moments(tmp_path, in_memory, where, times):
    """The newest checkpoint is right after each kill, and never an older one than before."""
    assert in_memory.stat().st_dev != tmp_path.stat().st_dev, "these are meant to be two file systems"
    root = (in_memory if where == "target elsewhere" else tmp_path) / "root"
    temporary = (in_memory if where == "TMPDIR elsewhere" else tmp_path) / "tmp"
    temporary.mkdir()
    lines = outcomes(str(root), "random", "7", str(times), temporary=temporary)
    assert sum(line["killed"] for line in lines) == times
    assert all(line["right"] for line in lines)
    found = [line["found"] for line in lines]
    assert found == sorted(found), "an older checkpoint became the newest"
    assert all(line["found"] == line["saving"] for line in lines if line["ended"]), "a save that ended counts"
    published = {line["found"] == line["saving"] for line in lines}
    assert published == {True, False}, "saves are to be killed before and after they are published"
    assert not list(temporary.iterdir()), "a file went by way of the temporary folder"
