"""Stacks of processes that can't be asked in Python: their rank's page receives them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slurmddp.environments.names import HEARTBEAT_VARIABLE
from slurmddp.host.heartbeat_page import HeartbeatPage, arm_stacks
from slurmddp.launchers.watchdog import stacks
from slurmddp.launchers.watchdog.stacks import RankStacks, StackRequest, main_thread
from support.runs.agent_runs import runs, wait_until


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    page = HeartbeatPage.create()
    yield page
    page.close()


@pytest.fixture
def rank(page: HeartbeatPage) -> Iterator[Callable[[Callable[[], None]], int]]:
    """Start a process that leads a group, is armed as a rank is, and then does something."""
    started: list[int] = []

    def start(act: Callable[[], None]) -> int:
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                arm_stacks({HEARTBEAT_VARIABLE: str(page.descriptor)})
                os.write(tell, b"1")
                act()
            finally:
                os._exit(1)
        started.append(pid)
        assert os.read(ready, 1) == b"1"
        os.close(ready)
        os.close(tell)
        return pid

    yield start
    for pid in started:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ask(pid: int, page: HeartbeatPage) -> RankStacks:
    request = StackRequest({3: (pid, page)})
    while not request.poll():
        time.sleep(0.01)
    return request.stacks()[3]


def ask_until(pid: int, page: HeartbeatPage, there: Callable[[RankStacks], bool]) -> RankStacks:
    """Ask again until the process has come to where it stays."""
    deadline = time.monotonic() + 120
    while not there(found := ask(pid, page)) and time.monotonic() < deadline:
        pass
    return found


def hang_in_python() -> None:
    time.sleep(1000)


def hang_with_the_interpreter_locked() -> None:
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the lock, so no Python code of this process can run


@pytest.mark.parametrize("act", [hang_in_python, hang_with_the_interpreter_locked])
def test_a_process_that_hangs_shows_where(rank, page: HeartbeatPage, act: Callable[[], None]) -> None:
    pid = rank(act)
    found = ask_until(pid, page, lambda found: act.__name__ in str(found.stack[:1]))
    assert found.stack[0].startswith(__file__)
    assert found.stack[0].endswith(f" in {act.__name__}")
    assert found.state in ("S", "R")
    assert found.worker == ()


def test_asked_twice_it_answers_twice(rank, page: HeartbeatPage) -> None:
    pid = rank(hang_in_python)
    first = ask_until(pid, page, lambda found: "hang_in_python" in str(found.stack[:1]))
    second = ask(pid, page)
    assert second.stack == first.stack
    assert second.text.count("most recent call first") == 1


def fork_a_worker_and_hang() -> None:
    if os.fork() == 0:
        fetch = compile("time.sleep(1000)", "/x/torch/utils/data/_utils/fetch.py", "exec")
        exec(fetch, {"time": time})
    hang_in_python()


def test_the_worker_that_fetches_data_is_shown_beside_its_rank(rank, page: HeartbeatPage) -> None:
    pid = rank(fork_a_worker_and_hang)
    found = ask_until(
        pid, page, lambda found: bool(found.worker) and "hang_in_python" in str(found.stack[:1])
    )
    assert found.worker[0] == "/x/torch/utils/data/_utils/fetch.py:1 in <module>"
    assert "hang_in_python" in found.stack[0]
    assert found.text.count("most recent call first") == 2


PROGRAM = ["-c", "import time; time.sleep(1000)"]


def start_a_program_and_hang() -> None:
    subprocess.Popen([sys.executable, *PROGRAM])
    hang_in_python()


def test_programs_that_a_rank_has_started_are_left_alone(rank, page: HeartbeatPage) -> None:
    pid = rank(start_a_program_and_hang)

    def programs() -> list[psutil.Process]:
        return [one for one in psutil.Process(pid).children() if one.cmdline()[1:] == PROGRAM]

    wait_until(programs, "the program runs")
    (program,) = programs()
    assert program.pid in stacks._groups({pid})[pid]
    ask_until(pid, page, lambda found: "hang_in_python" in str(found.stack[:1]))
    assert runs(program), "the signal would end a program that does not know it"


def test_a_stopped_process_is_named_and_not_waited_for(rank, page: HeartbeatPage) -> None:
    pid = rank(hang_in_python)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    request = StackRequest({3: (pid, page)})
    assert request.poll(), "there is nothing to wait for"
    assert request.stacks() == {3: RankStacks(state="T")}


def test_a_process_that_is_gone_is_no_error(page: HeartbeatPage) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert ask(gone.pid, page) == RankStacks()


def test_a_descriptor_that_is_something_else_now_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "something").open("w") as other:
        environ = {HEARTBEAT_VARIABLE: str(other.fileno())}
        arm_stacks(environ)
        HeartbeatPage.attach(environ).enter("step")
        arm_stacks({HEARTBEAT_VARIABLE: "987654"})
        assert not stacks._read_status(os.getpid()).answers
    assert (tmp_path / "something").read_bytes() == b""


def test_the_main_thread_is_the_one_named_last() -> None:
    text = """Thread 0x00007f (most recent call first):
  File "/a/watch.py", line 5 in wait
Current thread 0x00008f (most recent call first):
  File "/a/b c/data.py", line 41 in __getitem__
  File "<string>", line 1 in <module>
"""
    assert main_thread(text) == ("/a/b c/data.py:41 in __getitem__", "<string>:1 in <module>")
    assert main_thread("") == ()


def test_stacks_are_added_to_a_file_of_the_rank(tmp_path: Path) -> None:
    one = RankStacks(state="S", text="rank, pid 7\n  File ...")
    stacks.write(tmp_path, {3: one}, restart_count=0)
    stacks.write(tmp_path, {3: RankStacks()}, restart_count=1)
    text = (tmp_path / "stacks-rank-3.txt").read_text()
    assert "== restart count 0, rank 3, state S\nrank, pid 7\n" in text
    assert "== restart count 1, rank 3, state unknown\nIt did not answer.\n" in text
    stacks.write(tmp_path / "not there", {3: one}, restart_count=0)
