"""What agents tell of their ranks, and what node 0's agent makes of it."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.host.heartbeat_page import Beat, Pulse
from slurmddp.launchers.agent import node_watch
from slurmddp.launchers.agent.node_watch import Watch
from slurmddp.launchers.coordinator.messages import HangSuspected, PaceReported, Report, StacksReported
from slurmddp.launchers.watchdog.diagnosis import Comparison, Inquiry
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.launchers.watchdog.stragglers import Pace
from slurmddp.launchers.watchdog.stuck_rank import RankReport

STEP = Beat("step", 100.0, 7, 0, 7, 100.0, 7.0, 0.0, watched=True)
NO_PROCESSES: dict[int, tuple[int, Pulse]] = {}


def report(rank: int, **changes: Any) -> list[RankReport]:
    usual = {"rank": rank, "host": "n0", "phase": "step", "step": 7, "seconds": 400.0, "limit_s": 300.0}
    return [RankReport(**(usual | changes))]


def test_a_watch_tells_of_a_standstill_and_reports_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(2.0, tmp_path, "n1", beats=lambda: {4: STEP}, processes=lambda: NO_PROCESSES)
    told: list[Report] = []
    for now in range(100, 103):
        told += watch.look(float(now))
    assert told == [PaceReported(paces={4: Pace.of(STEP, "n1")}), HangSuspected()]
    monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=lambda: 102.0))
    assert watch.next_look() == 103.0
    watch.ask(generation=0)
    assert 102.0 < watch.next_look() < 102.1, "stacks take hundredths of a second"
    (answer,) = watch.look(102.1)
    assert isinstance(answer, StacksReported)
    assert answer.reports[0].seconds >= 2.0
    assert watch.look(102.2) == []


def test_a_watch_that_is_told_to_forget_says_nothing(tmp_path: Path) -> None:
    watch = Watch(2.0, tmp_path, "n1", beats=dict, processes=lambda: NO_PROCESSES)
    watch.ask(generation=0)
    watch.forget()
    assert watch.look(100.0) == []


def test_who_has_stopped_follows_from_the_reports_of_all() -> None:
    inquiry = Inquiry((0, 1, 2))
    assert inquiry.begin(100.0)
    assert not inquiry.begin(100.5), "they are asked once"
    inquiry.take(0, report(0))
    inquiry.take(0, report(0, phase="loading"))  # Only the first one counts.
    inquiry.take(2, report(2, phase="data"))
    assert inquiry.verdict(101.0) is None
    inquiry.take(1, report(1))
    verdict = inquiry.verdict(101.0)
    assert verdict is not None
    assert verdict.report.rank == 2
    assert verdict.reason.startswith("stalled: waiting for data for 400 s")
    assert inquiry.verdict(102.0) is None
    assert inquiry.next_look is None


def test_an_agent_that_does_not_report_is_not_waited_for_for_ever() -> None:
    inquiry = Inquiry((0, 1))
    inquiry.begin(100.0)
    inquiry.take(0, report(0))
    assert inquiry.next_look is not None
    verdict = inquiry.verdict(inquiry.next_look)
    assert verdict is not None
    assert verdict.report.rank == 0


def test_nothing_comes_of_it_while_another_node_is_at_work() -> None:
    inquiry = Inquiry((0, 1))
    inquiry.begin(100.0)
    inquiry.take(0, report(0))
    inquiry.take(1, report(1, phase="evaluating", seconds=0.2, limit_s=900.0))
    assert inquiry.verdict(100.1) is None
    assert inquiry.next_look is None
    assert inquiry.begin(170.0), "it may be asked again"


def paces(first: int, *waits: float, steps: int) -> dict[int, Pace]:
    """Return what an agent sends of ranks from `first` on that wait so long for data in each step."""
    sent = {}
    for rank, wait in enumerate(waits, first):
        pace = Pace(
            host=f"n{first}",
            step=steps,
            steps=steps,
            step_s=steps * 1.0,
            wait_s=steps * wait,
            forward_s=steps * 0.1,
        )
        sent[rank] = pace
    return sent


def test_a_straggler_is_told_once_it_was_slowest_twice_and_then_rarely() -> None:
    comparison = Comparison(4)
    lines: list[tuple[str | None, Any]] = []
    for number in range(1, 26):
        assert comparison.take(paces(0, 0.0, 0.0, steps=20 * number), 30.0 * number) == (None, None)
        lines.append(comparison.take(paces(2, 0.0, 0.5, steps=20 * number), 30.0 * number))
    told = [(number, line, found) for number, (line, found) in enumerate(lines, 1) if line]
    assert [number for number, line, _ in told if line.startswith("slowest: rank 3 on n2")] == [2, 22]
    assert [found.rank for _, _, found in told if found] == [3]


def test_ranks_that_are_slow_by_turns_are_each_told_once_and_then_rarely() -> None:
    comparison, waited, told = Comparison(2), [0.0, 0.0], []
    for number in range(1, 21):  # Each is the slowest for a minute.
        waited[number // 2 % 2] += 10.0
        message = paces(0, *(one / (20 * number) for one in waited), steps=20 * number)
        line, found = comparison.take(message, 30.0 * number)
        told += [(line, found)] if line and line.startswith("slowest") else []
    assert [line.split(" on ")[0] for line, _ in told] == ["slowest: rank 1", "slowest: rank 0"]
    assert [found.rank for _, found in told if found] == [1, 0]


def test_slow_steps_are_compared_over_a_longer_time() -> None:
    comparison = Comparison(2)
    told = []
    for number in range(1, 13):
        line, _ = comparison.take(paces(0, 0.0, 0.5, steps=2 * number), 30.0 * number)
        told += [number] if line and line.startswith("slowest: rank 1") else []
    assert told == [7]


def test_ranks_that_keep_pace_have_it_told_every_ten_minutes() -> None:
    comparison = Comparison(2)
    told = []
    for number in range(1, 45):
        line, found = comparison.take(paces(0, 0.1, 0.1, steps=20 * number), 30.0 * number)
        assert found is None
        told += [number] if line else []
    assert told == [1, 21, 41]


def test_one_slow_moment_makes_no_straggler() -> None:
    comparison = Comparison(2)
    comparison.take(paces(0, 0.1, 0.1, steps=20), 30.0)
    slow = paces(0, 0.1, 0.1, steps=40)
    slow[1] = replace(slow[1], wait_s=slow[1].wait_s + 15.0)
    assert comparison.take(slow, 60.0) == (None, None)
    after = paces(0, 0.1, 0.1, steps=60)
    after[1] = replace(after[1], wait_s=after[1].wait_s + 15.0)
    assert comparison.take(after, 90.0) == (None, None)


@pytest.mark.parametrize(
    ("version", "old"), [("2.4.1", True), ("2.9.0+cu128", True), ("git", True), ("2.13.0+cpu", False)]
)
def test_the_recorder_sets_old_names_for_old_versions_of_torch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, old: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    recorder = FlightRecorder(tmp_path)
    environ = recorder.environment({})
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in environ) is old
    assert ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in environ) is old
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    assert not {"TORCH_FR_BUFFER_SIZE", *own} & recorder.environment(own).keys()
    recorder.close()


def test_the_recorder_keeps_what_a_person_has_set_and_asks_by_the_pipes(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    environ = recorder.environment({"TORCH_FR_BUFFER_SIZE": "0"})
    assert "TORCH_FR_BUFFER_SIZE" not in environ
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "nccl-trace-rank-")
    pipes = Path(environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"])
    os.mkfifo(pipes / "3.pipe")
    reader = os.open(pipes / "3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.mkfifo(pipes / "4.pipe")  # Nobody reads it.
    recorder.request([3, 4, 5])
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)
    recorder.close()
    assert not pipes.exists()
