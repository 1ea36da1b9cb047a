"""Whatever moment a saving process is killed at, the newest checkpoint can be read and is right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("saves_killed.py")


def outcomes(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        check=False,
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
def test_killed_at_random_moments(tmp_path):
    lines = outcomes(str(tmp_path / "root"), "random", "7", "25")
    assert all(line["right"] for line in lines)
    found = [line["found"] for line in lines]
    assert found == sorted(found), "an older checkpoint became the newest"
    assert all(line["found"] == line["saving"] for line in lines if line["ended"])
    assert any(line["killed"] for line in lines)
