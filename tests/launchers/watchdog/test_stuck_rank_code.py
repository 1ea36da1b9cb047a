"""Where a rank that holds others up is said to stand: in the person's code, wherever slurmddp lies."""

from __future__ import annotations

from pathlib import Path

import pytest

import slurmddp
from slurmddp.launchers.watchdog.stuck_rank import RankReport, place

PACKAGE = Path(slurmddp.__file__).parent
PERSONS = "/home/me/loop.py:90 in train"


@pytest.mark.parametrize("module", ["training/distributon.py", "launchers/watchdog/stuck_rank.py", "spec.py"])
def test_no_line_of_slurmddps_own_stands_for_the_persons(module: str) -> None:
    own = f"{PACKAGE / module}:336 in barrier"
    one = RankReport(rank=1, host="n1", phase="step", step=3, seconds=5, limit_s=4, stack=(own, PERSONS))
    assert place(one) == "loop.py:90 in train"
