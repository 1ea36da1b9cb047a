"""The process of a local run is recognised by facts that no clock changes, and never guessed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmddp.host import process
from slurmddp.runs.folder.history import RecordedAttempt, read_history
from slurmddp.runs.status.alive import is_alive
from support.runs.local_runs import local_run

HOUR_S = 3600.0


def attempt(pid: int, **facts: object) -> RecordedAttempt:
    return RecordedAttempt(**({"number": 0, "pid": pid, "started": time.time()} | facts))


@pytest.fixture
def process_start() -> str:
    """The start of this process."""
    start = process.start_time(os.getpid())
    assert start is not None
    return start


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_was_set_changes_nothing(process_start: str, set_by_s: float) -> None:
    """The kernel moves `btime` with the clock; the time of the record stays the same."""
    assert is_alive(attempt(os.getpid(), started=time.time() - set_by_s, process_start=process_start)) is True


def test_a_stranger_with_the_number_of_the_run_or_from_before_a_reboot_is_not_it(process_start: str) -> None:
    boot, tick = process_start.split()
    for start in (f"{boot} {int(tick) - 1}", f"00000000-0000-4000-8000-000000000000 {tick}"):
        assert is_alive(attempt(os.getpid(), process_start=start)) is False


def test_a_record_of_before_is_judged_by_its_time() -> None:
    assert is_alive(attempt(os.getpid())) is True
    assert is_alive(attempt(os.getpid(), started=1_000_000_000.0)) is False


def test_a_zombie_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as ended:
        known = attempt(ended.pid, process_start=process.start_time(ended.pid))
        assert is_alive(known) is True
        ended.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(known) is False


@pytest.mark.parametrize("recorded", [True, False])
def test_a_process_that_proc_hides_is_not_called_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: bool
) -> None:
    """With `hidepid`, /proc does not show processes of other accounts; some systems have no /proc."""
    with subprocess.Popen(["true"]) as ended:
        pass
    process_start = process.start_time(os.getpid()) if recorded else None
    monkeypatch.setattr(process, "PROC", tmp_path)
    assert is_alive(attempt(os.getpid(), process_start=process_start)) is None
    assert is_alive(attempt(ended.pid, process_start=process_start)) is False


@pytest.mark.parametrize("facts", [{"host": "some-other-host"}, {"started": None}, {"pid": None}], ids=str)
def test_a_process_elsewhere_or_unknown_is_not_judged(facts: dict[str, object]) -> None:
    assert is_alive(attempt(**({"pid": os.getpid()} | facts))) is None


def test_a_local_run_records_by_what_its_process_is_known(tmp_path: Path) -> None:
    run = local_run(tmp_path, "def main(run_dir): return 0", ranks_per_node=1)
    run.start()
    assert run.wait() == 0
    newest = read_history(run.folder).newest
    assert newest is not None
    assert newest.process_start == process.start_time(os.getpid())
    assert is_alive(newest) is True
