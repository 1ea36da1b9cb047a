"""An srun that waits for agents which have left: the batch step ends srun after a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurmddp.batch.srun_watch import SrunWatch, _children
from support.runs.agent_runs import runs, wait_until
from support.slurm.batch_run import Run

SILENT_S = 1200.0


@pytest.fixture
def srun() -> Iterator[subprocess.Popen[bytes]]:
    """An srun in a shell function: the shell that is watched has it as its child."""
    with subprocess.Popen(["bash", "-c", "sleep 600; true"], start_new_session=True) as process:
        while not _children(process.pid):
            time.sleep(0.01)
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # The shell alone would leave its child behind.


class Watched:
    """A watch over srun, whose polls take no time."""

    def __init__(self, tmp_path: Path, srun: subprocess.Popen[bytes]) -> None:
        self.run = Run(tmp_path)
        self.srun = srun
        self.polls = 0
        self.run.attempt = 0
        self.run.log_dir.mkdir(parents=True)
        self.log = self.run.log_dir

    def leave(self, *names: str) -> None:
        for name in names:
            (self.log / name).write_text("0\n")

    def poll(self, until: int, at: dict[int, Callable[[], None]] | None = None) -> bool:
        """Poll `until` times at most; return whether srun was ended."""

        def has_ended() -> bool:
            self.polls += 1
            (at or {}).get(self.polls, lambda: None)()
            return self.polls > until

        self.watch = SrunWatch(self.run.attempt_of(self.run.job()), kill_wait_s=30)
        self.watch.run(self.srun.pid, has_ended)
        return "this script ends srun" in self.run.log()


@pytest.fixture
def watched(tmp_path: Path, srun: subprocess.Popen[bytes]) -> Watched:
    return Watched(tmp_path, srun)


def test_srun_is_ended_after_a_minute_without_agents(watched: Watched) -> None:
    (child,) = _children(watched.srun.pid)
    watched.leave("exit-node-0", "exit-node-1")
    assert watched.poll(until=99)
    assert watched.srun.wait(120) == -9
    assert watched.polls == 30, "of two seconds each"
    wait_until(lambda: not runs(child), "the child of srun has ended")


def test_a_node_without_which_the_ranks_continued_is_not_waited_for(watched: Watched) -> None:
    watched.leave("exit-node-0")
    watched.run.folder.add_event("continued", attempt=0, without=[1])
    assert watched.poll(until=31)


def test_an_agent_that_has_left_no_code_is_waited_for_within_a_bound(watched: Watched) -> None:
    watched.leave("exit-node-0")
    assert watched.poll(until=700)
    assert watched.polls == SILENT_S / 2


def test_nothing_is_counted_before_the_first_agent_has_left(watched: Watched) -> None:
    watched.leave("exit-node-1")
    assert not watched.poll(until=628, at={600: lambda: watched.leave("exit-node-0")})


def test_a_watch_ends_with_its_srun(watched: Watched) -> None:
    watched.leave("exit-node-0", "exit-node-1")
    watched.srun.kill()
    watched.srun.wait()
    assert not watched.poll(until=99)
    assert watched.polls == 1


def test_srun_is_ended_soon_when_slurm_ends_the_job(watched: Watched) -> None:
    """SLURM starts the job again a second after the kill wait, when the batch script must be gone."""
    watched.leave("exit-node-0")
    assert watched.poll(until=99, at={20: lambda: watched.watch.note_end(15, None)})
    assert watched.polls == 20


def test_srun_has_a_third_of_the_kill_wait(watched: Watched) -> None:
    ends = {1: lambda: watched.watch.note_end(15, None), 4: lambda: watched.leave("exit-node-0")}
    assert watched.poll(until=99, at=ends)
    assert watched.polls == 8, "ten seconds after the first agent had left"
