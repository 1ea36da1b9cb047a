"""The rank that is named when all ranks hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import slurmddp
from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.watchdog.hang import Watchdog
from slurmddp.launchers.watchdog.stacks import RankStacks
from slurmddp.launchers.watchdog.stuck_rank import RankReport, first_stopped, place, reports, waits, why
from slurmddp.runs.failures.kinds import Cause

TORCH = "/venv/lib/python3.11/site-packages/torch"
BACKWARD = (
    f"{TORCH}/autograd/graph.py:865 in _engine_run_backward",
    f"{TORCH}/_tensor.py:630 in backward",
    "/home/me/loop.py:41 in step",
    "/home/me/loop.py:90 in train",
    "/home/me/loop.py:101 in <module>",
)
BARRIER = (
    f"{TORCH}/distributed/distributed_c10d.py:4818 in barrier",
    f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
    "/home/me/loop.py:88 in train",
    "/home/me/loop.py:101 in <module>",
)
SLEEPS = (
    "/home/me/model.py:12 in forward",
    f"{TORCH}/nn/modules/module.py:1750 in _call_impl",
    "/home/me/loop.py:40 in step",
    "/home/me/loop.py:90 in train",
    "/home/me/loop.py:101 in <module>",
)


def report(rank: int, **changes: object) -> RankReport:
    usual = RankReport(
        rank=rank,
        host=f"n{rank // 2}",
        phase="step",
        step=120,
        seconds=400.0,
        limit_s=300.0,
        state="S",
        stack=BACKWARD,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def named(*found: RankReport) -> int | None:
    first = first_stopped(found)
    return None if first is None else first.rank


LOADING = ("/venv/lib/python3.11/selectors.py:415 in select", "/home/me/loop.py:87 in train")
FETCHING = {"phase": "data", "seconds": 94.0, "limit_s": 60.0, "worker": ("/d/dataset.py:41 in get",)}


@pytest.mark.parametrize(
    ("found", "stuck", "reason"),
    [
        (
            [report(0), report(1), report(2), report(3, stack=LOADING, **FETCHING)],
            3,
            "waiting for data for 94 s (step 121), while ranks 0-2 wait at loop.py:41 in step; "
            "its loader worker is at dataset.py:41 in get",
        ),
        (
            [report(0), report(1, stack=SLEEPS), report(2)],
            1,
            "in its step for 400 s (step 121), while ranks 0, 2 wait at loop.py:41 in step; "
            "it is at model.py:12 in forward",
        ),
        (
            [report(0), report(1), report(2, stack=BARRIER), report(3)],
            2,
            "in a collective that not all ranks have joined, at loop.py:88 in train, for 400 s (step 121), "
            "while ranks 0-1, 3 wait at loop.py:41 in step",
        ),
        (
            [report(0, phase="data", stack=SLEEPS), report(1, state="T", stack=())],
            1,
            "stopped by a signal (SIGSTOP) for 400 s (step 121), while rank 0 is waiting for data",
        ),
        (
            [report(0), report(1, state="D", stack=(), phase="data")],
            1,
            "waiting for data for 400 s (step 121), while rank 0 waits at loop.py:41 in step; it did not "
            "answer when it was asked for its stack; the kernel keeps it waiting (state D), usually for "
            "a file system that does not answer",
        ),
        (
            [report(0, stack=SLEEPS)],
            0,
            "in its step for 400 s (step 121); it is at model.py:12 in forward",
        ),
    ],
    ids=["data", "python", "another collective", "stopped", "kernel", "alone"],
)
def test_the_stuck_rank_and_the_reason(found: list[RankReport], stuck: int, reason: str) -> None:
    first = first_stopped(found)
    assert first is found[stuck]
    together = reason.startswith("in a collective")
    assert why(found, first) == Cause("stalled_together" if together else "stalled", f"stalled: {reason}")


LATE = (*BARRIER[:2], "/home/me/loop.py:95 in train", BARRIER[3])
SYNCING = ("/home/me/loop.py:60 in train",)  # loss.item() of a GPU, where NCCL is waited for


@pytest.mark.parametrize(
    ("found", "stuck"),
    [
        # Of two places, the one with fewer ranks.
        ([report(0), report(1), report(2, stack=LATE), report(3)], 2),
        # The one that does something else, not one that waits for others.
        ([report(0, phase="data", stack=BARRIER), report(1, stack=SLEEPS)], 1),
        # Of two in different collectives, the one behind.
        ([report(0, stack=BARRIER), report(1)], 0),
        ([report(0), report(1, stack=BARRIER)], 1),
        # Of ranks whose stacks tell nothing, the one behind.
        ([report(0, stack=SYNCING), report(1, stack=SYNCING), report(2, step=119, stack=SYNCING)], 2),
        ([report(0, stack=SYNCING), report(1, stack=SYNCING, phase="data")], 1),
        # The rank that the others wait for makes progress, or any rank does.
        ([report(0, phase="evaluating", seconds=0.4, limit_s=900.0, stack=SLEEPS), report(1)], None),
        ([report(0, stack=SLEEPS), report(1, seconds=100.0)], None),
        ([report(0, stack=SLEEPS), report(1, seconds=200.0)], 0),
        # A rank without a limit, or in a debugger, is not judged.
        ([report(0), report(1, stack=SLEEPS, limit_s=None)], None),
        ([report(0, stack=SLEEPS), report(1, limit_s=None)], None),
        ([report(0), report(1, stack=SLEEPS, state="t")], None),
        ([], None),
    ],
)
def test_the_rank_that_is_named(found: list[RankReport], stuck: int | None) -> None:
    assert named(*found) == stuck


@pytest.mark.parametrize(
    ("behind", "ahead"),
    [
        ("loading", "first_step"),
        ("evaluating", "data"),
        ("saving", "evaluating"),
        ("saving", "step"),
        ("data", "step"),
    ],
)
def test_phases_in_the_order_of_the_loop(behind: str, ahead: str) -> None:
    assert named(report(0, phase=ahead, stack=()), report(1, phase=behind, stack=())) == 1


def test_a_wait_for_others_is_known_by_where_it_is() -> None:
    assert waits(report(0))
    assert waits(report(0, stack=BARRIER))
    assert not waits(report(0, stack=SLEEPS))
    assert not waits(report(0, stack=()))
    stop = (
        "/lib/python3.11/threading.py:629 in wait",
        "/x/slurmddp/training/stopping/agreement.py:233 in _await_decision",
    )
    assert waits(report(0, stack=stop))


def test_the_frame_to_show_is_the_persons_own_code() -> None:
    assert place(report(0)) == "loop.py:41 in step"
    assert place(report(0, stack=BACKWARD[:2])) == "graph.py:865 in _engine_run_backward"
    assert place(report(0, stack=())) == ""


@pytest.mark.parametrize("module", ["training/distributon.py", "launchers/watchdog/stuck_rank.py", "spec.py"])
def test_the_frame_to_show_is_never_a_line_of_slurmddp(module: str) -> None:
    own = f"{Path(slurmddp.__file__).parent / module}:336 in barrier"
    assert place(report(1, stack=(own, "/home/me/loop.py:90 in train"))) == "loop.py:90 in train"


def test_a_node_reports_what_it_has_seen() -> None:
    watchdog = Watchdog(2.0)
    beat = RankHeartbeat("step", 100.0, 7, 0, 7, 100.0, 7.0, 0.0, watched=True)
    for now in (101.0, 102.0, 103.0, 104.0):
        watchdog.poll({4: beat, 5: beat}, now)
    one, other = reports(watchdog, {4: beat, 5: beat}, {4: RankStacks("S", SLEEPS, (), "text")}, "n2")
    assert (one.rank, one.host, one.step, one.limit_s, one.stack) == (4, "n2", 7, 2.0, SLEEPS)
    assert one.seconds >= 3.0
    assert (other.state, other.stack) == ("", ())
    assert first_stopped([one, other]) is not None
