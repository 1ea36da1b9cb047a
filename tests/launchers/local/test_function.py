"""A function as every rank: result, errors, functions without a module; no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.launchers.local.function import call_on_ranks
from slurmddp.launchers.local.launcher import LocalLauncher
from support.runs.agent_runs import wait_until

TYPED = """
from slurmddp.launchers.local.function import call_on_ranks
from slurmddp.launchers.local.launcher import LocalLauncher
unit = 10
def place():
    import os
    return [unit, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]]

print(call_on_ranks(place, 3, LocalLauncher()))
"""
WAITS = """
import os, sys, time
from pathlib import Path
from slurmddp.launchers.local.function import call_on_ranks
from slurmddp.launchers.local.launcher import LocalLauncher

def wait():
    Path(f"ready-{os.environ['RANK']}").touch()
    time.sleep(600)

for number in range(2):
    try:
        call_on_ranks(wait, 2, LocalLauncher())
    except Exception as error:
        print("goes on after", error)
"""


def test_the_result_is_that_of_rank_zero(capfd: pytest.CaptureFixture[str]) -> None:
    unit = [3]

    def place() -> tuple[int, list[int]]:
        print("here")
        return int(os.environ["RANK"]), unit * int(os.environ["WORLD_SIZE"])

    assert call_on_ranks(place, 2, LocalLauncher()) == (0, [3, 3])
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 1] here", "here"]


def test_a_function_that_was_typed_into_an_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=TYPED, capture_output=True, text=True, timeout=120
    )
    assert "[10, '0', '3', '0']" in done.stdout, done.stderr


def test_the_first_error_of_a_rank_is_raised_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "0":
            time.sleep(60)
        raise ValueError("broken")

    with pytest.raises(SlurmddpError, match="Rank 1 failed: ValueError: broken") as caught:
        call_on_ranks(fail, 2, LocalLauncher())
    assert "in fail" in caught.value.hint
    assert "/slurmddp/" not in caught.value.hint
    assert "Rank 1 on" in capfd.readouterr().err


def test_a_rank_that_leaves_without_an_error() -> None:
    with pytest.raises(SlurmddpError, match="exit code 7"):
        call_on_ranks(lambda: os._exit(7), 2, LocalLauncher())


def test_a_stop_at_a_checkpoint_is_raised_as_such() -> None:
    def stop() -> None:
        raise StoppedAtCheckpoint("stopped")

    with pytest.raises(StoppedAtCheckpoint):
        call_on_ranks(stop, 2, LocalLauncher())


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_that_ends_the_ranks_ends_the_program(tmp_path: Path, sent: signal.Signals) -> None:
    """Also a program that goes on after an error, such as a search over learning rates."""
    program = subprocess.Popen([sys.executable, "-c", WAITS], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2, "both ranks run")
        program.send_signal(sent)
        output, _ = program.communicate(timeout=120)
    finally:
        program.kill()
    assert (program.returncode, output) == (128 + sent, "")


def test_a_value_that_can_not_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"can't be pickled to send it to the ranks: TypeError.*lock"):
        call_on_ranks(lambda: lock, 2, LocalLauncher())
