"""The rank that the others wait for in every step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmddp.host.heartbeat_page import HeartbeatPage
from slurmddp.launchers.watchdog.stragglers import Pace, pace_line, per_step, straggler

BEGIN = Pace(host="n0", step=100, steps=100, step_s=60.0, wait_s=2.0, forward_s=20.0)


def after(
    rank: int, *, steps: int = 100, step: float = 1.6, wait: float = 0.01, forward: float = 0.5
) -> Pace:
    """Return how far a rank is some steps later, each of which took it so many seconds."""
    return Pace(
        host=f"n{rank // 2}",
        step=BEGIN.step + steps,
        steps=BEGIN.steps + steps,
        step_s=BEGIN.step_s + steps * step,
        wait_s=BEGIN.wait_s + steps * wait,
        forward_s=BEGIN.forward_s + steps * forward,
    )


def told(*paces: Pace) -> str | None:
    found = straggler(per_step(dict(enumerate(paces)), dict.fromkeys(range(len(paces)), BEGIN)))
    return None if found is None else found.line


COMPUTES = (
    "slowest: rank 1 on n0, 1.01 s a step until its backward pass (10.0 ms of it waiting for data); "
    "median 0.51 s, a step takes 1.60 s"
)


@pytest.mark.parametrize(
    ("paces", "line"),
    [
        (
            [after(0), after(1), after(2), after(3, wait=0.9, forward=0.52)],
            "slowest: rank 3 on n1, 1.42 s a step until its backward pass (0.90 s of it waiting for data); "
            "median 0.51 s, a step takes 1.60 s",
        ),
        ([after(0), after(1, forward=1.0), after(2), after(3)], COMPUTES),
        (
            # The buffers of their models come from the rank that is late: their forward passes take as long.
            [*(after(rank, forward=1.39) for rank in range(3)), after(3, wait=0.9)],
            "slowest: rank 3 on n1, 0.90 s a step waiting for data; median 10.0 ms, a step takes 1.60 s",
        ),
        ([after(0), after(1, forward=1.0)], COMPUTES),
    ],
    ids=["data", "computation", "forward waits for others", "two ranks"],
)
def test_a_rank_that_the_others_wait_for_is_told_with_figures(paces: list[Pace], line: str) -> None:
    assert told(*paces) == line


@pytest.mark.parametrize(
    "paces",
    [
        [after(0), after(1)],
        [after(rank) for rank in range(4)],
        [after(0), after(1), after(2, forward=0.55)],
        [after(rank, step=3.0, wait=2.2 if rank == 1 else 2.0) for rank in range(4)],
        # Twice as long as the others, and yet next to nothing of the step.
        [after(0, forward=0.02), after(1, forward=0.02), after(2, forward=0.04)],
        [after(0, wait=1.0)],
        [after(0, steps=2), after(1, steps=2, wait=1.0)],
        [after(0, steps=2), after(1, wait=1.0), after(2)],
    ],
)
def test_even_ranks_small_differences_and_few_steps_are_not_told(paces: list[Pace]) -> None:
    assert told(*paces) is None


def test_ranks_that_began_anew_count_from_there() -> None:
    new = Pace(host="n0", step=110, steps=10, step_s=16.0, wait_s=0.1, forward_s=5.0)
    slow = replace(new, wait_s=9.1)
    found = straggler(per_step({0: new, 1: new, 2: slow}, dict.fromkeys(range(3), BEGIN)))
    assert found is not None
    assert (found.rank, found.host) == (2, "n0")
    assert "0.91 s of it waiting for data" in found.line


def test_the_pace_is_told_of_all() -> None:
    paces = {0: after(0), 1: after(1, wait=0.05), 2: after(2)}
    assert pace_line(per_step(paces, dict.fromkeys(range(3), BEGIN))) == (
        "step 200: 1.60 s a step, 10.0 ms of it waiting for data (the most: rank 1 on n0, 50.0 ms)"
    )
    assert pace_line(per_step({0: BEGIN}, {0: BEGIN})) is None


def test_a_pace_is_taken_from_a_heartbeat() -> None:
    page = HeartbeatPage.create()
    page.completed(7, 2.0, 0.25, 0.5)
    pace = Pace.of(page.read(), "n1")
    page.close()
    assert pace == Pace(host="n1", step=7, steps=1, step_s=2.0, wait_s=0.25, forward_s=0.5)
