"""A power cut on a sandbox's node: nothing on it lives to see, or to tell, that something else died."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from slurmddp.sandbox import processes
from support.runs.agent_runs import children_of, wait_until


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_all_are_stopped_before_the_first_is_killed(
    sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, kill = [], os.kill
    late = sleepers[-1].pid

    def note(pid: int, number: int) -> None:
        sent.append((pid, signal.Signals(number)))
        kill(pid, number)

    def find() -> set[int]:
        # One that appears only while the others are stopped, as a fork does.
        known = {process.pid for process in sleepers} - (set() if sent else {late})
        return {pid for pid in known if processes.start_time(pid) is not None}

    monkeypatch.setattr(os, "kill", note)
    processes.cut_power(find)
    signals = [number for _, number in sent]
    assert {pid for pid, number in sent if number == signal.SIGSTOP} == {one.pid for one in sleepers}
    assert signal.SIGSTOP not in signals[signals.index(signal.SIGKILL) :]
    assert [process.wait(120) for process in sleepers] == [-signal.SIGKILL] * 4


def test_a_parent_does_not_report_the_death_of_its_child(tmp_path) -> None:
    told = tmp_path / "told"
    shells = [
        subprocess.Popen(["sh", "-c", f"sleep 600; echo told >> {told}"], start_new_session=True)
        for _ in range(20)
    ]
    wait_until(lambda: all(children_of(shell.pid) for shell in shells), "each shell has its sleep")
    pids = [pid for shell in shells for pid in (shell.pid, *(child.pid for child in children_of(shell.pid)))]
    everyone = sorted(pids, reverse=True)
    processes.cut_power(lambda: {pid for pid in everyone if processes.start_time(pid) is not None})
    for shell in shells:
        shell.wait(120)
    assert not told.exists()
