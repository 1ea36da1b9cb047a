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


def test_one_that_waits_for_data_holds_up_those_that_wait_for_gradients() -> None:
    loading = ("/venv/lib/python3.11/selectors.py:415 in select", "/home/me/loop.py:87 in train")
    found = [
        report(0),
        report(1),
        report(2),
        report(
            3, phase="data", seconds=94.0, limit_s=60.0, stack=loading, worker=("/d/dataset.py:41 in get",)
        ),
    ]
    first = first_stopped(found)
    assert first is found[3]
    assert why(found, first) == (
        "stalled: waiting for data for 94 s (step 121), while ranks 0-2 wait at loop.py:41 in step; "
        "its loader worker stands at dataset.py:41 in get"
    )


def test_one_that_hangs_in_python_holds_up_the_others_of_the_same_step() -> None:
    found = [report(0), report(1, stack=SLEEPS), report(2)]
    first = first_stopped(found)
    assert first is found[1]
    assert why(found, first) == (
        "stalled: in its step for 400 s (step 121), while ranks 0, 2 wait at loop.py:41 in step; "
        "it stands at model.py:12 in forward"
    )


def test_one_in_a_collective_that_nobody_else_joins() -> None:
    found = [report(0), report(1), report(2, stack=BARRIER), report(3)]
    first = first_stopped(found)
    assert first is found[2]
    assert why(found, first) == (
        "stalled: in a collective that not all have joined, at loop.py:88 in train, for 400 s (step 121), "
        "while ranks 0-1, 3 wait at loop.py:41 in step"
    )


def test_of_two_places_the_one_with_fewer_ranks_is_the_odd_one() -> None:
    late = (*BARRIER[:2], "/home/me/loop.py:95 in train", BARRIER[3])
    assert named(report(0), report(1), report(2, stack=late), report(3)) == 2


def test_who_waits_for_others_is_not_named_while_one_does_something_else() -> None:
    assert named(report(0, phase="data", stack=BARRIER), report(1, stack=SLEEPS)) == 1


def test_of_two_in_different_collectives_the_one_behind_is_named() -> None:
    assert named(report(0, stack=BARRIER), report(1)) == 0
    assert named(report(0), report(1, stack=BARRIER)) == 1


def test_of_ranks_whose_stacks_tell_nothing_the_one_behind_is_named() -> None:
    syncing = ("/home/me/loop.py:60 in train",)  # loss.item() of a GPU, where NCCL is waited for
    behind = report(2, step=119, stack=syncing)
    assert named(report(0, stack=syncing), report(1, stack=syncing), behind) == 2
    assert named(report(0, stack=syncing), report(1, stack=syncing, phase="data")) == 1


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


def test_a_rank_that_was_stopped_by_a_signal_is_the_one() -> None:
    stopped = report(1, state="T", stack=())
    found = [report(0, phase="data", stack=SLEEPS), stopped]
    assert first_stopped(found) is stopped
    assert why(found, stopped).startswith(
        "stalled: stopped by a signal (SIGSTOP) for 400 s (step 121), while"
    )


def test_one_that_the_kernel_holds_is_told() -> None:
    found = [report(0), report(1, state="D", stack=(), phase="data")]
    assert first_stopped(found) is found[1]
    assert "did not answer" in why(found, found[1])
    assert "the kernel holds it (state D)" in why(found, found[1])


def test_nobody_has_stopped_while_the_one_they_wait_for_gets_on() -> None:
    at_work = report(0, phase="evaluating", seconds=0.4, limit_s=900.0, stack=SLEEPS)
    assert named(at_work, report(1), report(2)) is None


def test_nobody_has_stopped_while_any_rank_shows_life() -> None:
    assert named(report(0, stack=SLEEPS), report(1, seconds=100.0)) is None
    assert named(report(0, stack=SLEEPS), report(1, seconds=200.0)) == 0


def test_nobody_is_named_for_what_can_not_be_judged() -> None:
    assert named(report(0), report(1, stack=SLEEPS, limit_s=None)) is None
    assert named(report(0, stack=SLEEPS), report(1, limit_s=None)) is None
    assert named() is None


def test_a_rank_in_a_debugger_holds_everybody_up_in_peace() -> None:
    assert named(report(0), report(1, stack=SLEEPS, state="t")) is None


def test_one_rank_alone() -> None:
    found = [report(0, stack=SLEEPS)]
    assert why(found, found[0]) == (
        "stalled: in its step for 400 s (step 121); it stands at model.py:12 in forward"
    )


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
