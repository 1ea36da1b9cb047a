"""The lines of a benchmark's pictures."""

from __future__ import annotations

from slurmddp.bench import figures
from slurmddp.collectives import ALGORITHMS


def test_every_algorithm_has_a_line_of_its_own() -> None:
    looks = [str(figures._line(name)) for name in (*ALGORITHMS, "torch")]
    assert len(set(looks)) == len(ALGORITHMS) + 1
