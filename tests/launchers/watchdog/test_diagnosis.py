"""Agents report what their ranks do; the coordinator finds the stuck rank and stragglers."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurmddp.host.heartbeat_page import RankHeartbeat
from slurmddp.launchers.agent import node_watch
from slurmddp.launchers.agent.node_watch import NodeWatch
from slurmddp.launchers.coordinator.messages import HangSuspected, PaceReported, Report, StacksReported
from slurmddp.launchers.watchdog.diagnosis import PaceComparison, StallDiagnosis
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.launchers.watchdog.stragglers import Pace
from slurmddp.launchers.watchdog.stuck_rank import RankReport

STEP = RankHeartbeat("step", 100.0, 7, 0, 7, 100.0, 7.0, 0.0, watched=True)


def report(rank: int, **changes: Any) -> list[RankReport]:
    usual = {"rank": rank, "host": "n0", "phase": "step", "step": 7, "seconds": 400.0, "limit_s": 300.0}
    return [RankReport(**(usual | changes))]


def watch_over(folder: Path, monkeypatch: pytest.MonkeyPatch, beats: dict[int, RankHeartbeat]) -> NodeWatch:
    """Return a watch over ranks with these heartbeats, which answer a request for their stacks at once."""
    answered = SimpleNamespace(poll=lambda: True, stacks=dict)
    monkeypatch.setattr(node_watch, "StackRequest", lambda processes: answered)
    pages = {rank: (4711, SimpleNamespace(read=lambda rank=rank: beats[rank])) for rank in beats}
    return NodeWatch(2.0, folder, "n1", processes=lambda: cast(Any, pages))


def test_a_watch_reports_a_hang_and_then_stacks_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_over(tmp_path, monkeypatch, {4: STEP})
    told: list[Report] = []
    for now in range(100, 103):
        told += watch.poll(float(now), 0)
    assert told == [PaceReported(paces={4: Pace.of(STEP, "n1")}), HangSuspected()]
    monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=lambda: 102.0))
    assert watch.deadline == 103.0
    watch.request_stacks(restart_count=0)
    assert watch.deadline < 102.1, "stacks take hundredths of a second"
    (answer,) = watch.poll(102.1, 0)
    assert isinstance(answer, StacksReported)
    assert answer.reports[0].seconds >= 2.0
    assert watch.poll(102.2, 0) == []


def test_a_watch_drops_a_request_for_the_stacks_of_an_earlier_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_over(tmp_path, monkeypatch, {})
    watch.request_stacks(restart_count=0)
    assert watch.poll(100.0, 1) == []


def test_a_rank_that_has_moved_on_since_the_last_poll_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that asks for stacks may itself end a call that hung."""
    beats = {0: STEP, 1: STEP}
    watch = watch_over(tmp_path, monkeypatch, beats)
    told = [message for now in range(100, 103) for message in watch.poll(float(now), 0)]
    assert told[-1] == HangSuspected()
    diagnosis = StallDiagnosis((0,), 102.0)
    watch.request_stacks(restart_count=0)
    beats[1] = replace(STEP, since=102.05, step=8, steps=8)
    (answer,) = watch.poll(102.1, 0)
    assert isinstance(answer, StacksReported)
    diagnosis.take(0, answer.reports)
    assert [one.seconds for one in answer.reports] == [2.0, 0.0]
    assert diagnosis.is_complete(102.1)
    assert diagnosis.verdict() is None


def test_the_stuck_rank_follows_from_the_reports_of_all_agents() -> None:
    diagnosis = StallDiagnosis((0, 1, 2), 100.0)
    diagnosis.take(0, report(0))
    diagnosis.take(0, report(0, phase="loading"))  # Only the first one counts.
    diagnosis.take(2, report(2, phase="data"))
    assert not diagnosis.is_complete(101.0)
    diagnosis.take(1, report(1))
    assert diagnosis.is_complete(101.0)
    verdict = diagnosis.verdict()
    assert verdict is not None
    assert verdict.report.rank == 2
    assert verdict.cause.reason.startswith("stalled: waiting for data for 400 s")


def test_an_agent_that_does_not_report_is_not_waited_for_for_ever() -> None:
    diagnosis = StallDiagnosis((0, 1), 100.0)
    diagnosis.take(0, report(0))
    assert diagnosis.is_complete(diagnosis.deadline)
    verdict = diagnosis.verdict()
    assert verdict is not None
    assert verdict.report.rank == 0


def test_no_rank_is_stuck_while_another_node_makes_progress() -> None:
    diagnosis = StallDiagnosis((0, 1), 100.0)
    diagnosis.take(0, report(0))
    diagnosis.take(1, report(1, phase="evaluating", seconds=0.2, limit_s=900.0))
    assert diagnosis.is_complete(100.1)
    assert diagnosis.verdict() is None


def paces(first: int, *waits: float, steps: int) -> dict[int, Pace]:
    """Return the paces of ranks from `first` on that wait `waits` seconds for data in each step."""
    times = {"step": steps, "steps": steps, "step_s": steps * 1.0, "forward_s": steps * 0.1}
    return {
        rank: Pace(host=f"n{first}", wait_s=steps * wait, **times)  # type: ignore[arg-type]
        for rank, wait in enumerate(waits, first)
    }


def test_a_straggler_is_told_once_it_was_slowest_twice_and_then_rarely() -> None:
    comparison = PaceComparison(4)
    lines: list[tuple[str | None, Any]] = []
    for number in range(1, 26):
        assert comparison.take(paces(0, 0.0, 0.0, steps=20 * number), 30.0 * number) == (None, None)
        lines.append(comparison.take(paces(2, 0.0, 0.5, steps=20 * number), 30.0 * number))
    told = [(number, line, found) for number, (line, found) in enumerate(lines, 1) if line]
    assert [number for number, line, _ in told if line.startswith("slowest: rank 3 on n2")] == [2, 22]
    assert [found.rank for _, _, found in told if found] == [3]


def test_ranks_that_are_slow_by_turns_are_each_told_once_and_then_rarely() -> None:
    comparison, waited, told = PaceComparison(2), [0.0, 0.0], []
    for number in range(1, 21):  # Each is the slowest for a minute.
        waited[number // 2 % 2] += 10.0
        message = paces(0, *(one / (20 * number) for one in waited), steps=20 * number)
        line, found = comparison.take(message, 30.0 * number)
        told += [(line, found)] if line and line.startswith("slowest") else []
    assert [line.split(" on ")[0] for line, _ in told] == ["slowest: rank 1", "slowest: rank 0"]
    assert [found.rank for _, found in told if found] == [1, 0]


@pytest.mark.parametrize(
    ("wait", "steps", "begin", "expected"),
    [(0.5, 2, "slowest: rank 1", [7, 28]), (0.1, 20, "step ", [1, 21, 41])],
    ids=["slow steps", "even ranks"],
)
def test_slow_steps_take_longer_to_compare_and_the_pace_is_told_every_ten_minutes(
    wait: float, steps: int, begin: str, expected: list[int]
) -> None:
    comparison, told = PaceComparison(2), []
    for number in range(1, 45):
        line, _ = comparison.take(paces(0, 0.1, wait, steps=steps * number), 30.0 * number)
        told += [number] if line and line.startswith(begin) else []
    assert told == expected


def test_one_slow_moment_makes_no_straggler() -> None:
    comparison = PaceComparison(2)
    comparison.take(paces(0, 0.1, 0.1, steps=20), 30.0)
    slow = paces(0, 0.1, 0.1, steps=40)
    slow[1] = replace(slow[1], wait_s=slow[1].wait_s + 15.0)
    assert comparison.take(slow, 60.0) == (None, None)
    after = paces(0, 0.1, 0.1, steps=60)
    after[1] = replace(after[1], wait_s=after[1].wait_s + 15.0)
    assert comparison.take(after, 90.0) == (None, None)


@pytest.mark.parametrize(
    ("version", "old", "old_switch"),
    [
        ("2.6.0+cu124", True, True),
        ("2.9.0+cu128", True, True),
        ("git", True, True),
        ("2.13.0+cpu", False, True),
        ("2.15.0", False, False),
    ],
)
def test_the_recorder_sets_old_names_for_old_versions_of_torch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, old: bool, old_switch: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    recorder = FlightRecorder(tmp_path)
    environ = recorder.environment({})
    assert environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in environ) is old
    assert ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in environ) is old
    assert environ["TORCH_FR_DUMP_ON_TIMEOUT"] == "1"
    assert ("TORCH_NCCL_DUMP_ON_TIMEOUT" in environ) is old_switch
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
