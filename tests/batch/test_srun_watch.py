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

from slurmddp.batch.srun_watch import SrunWatch, _children, _descendants, _kill
from slurmddp.runs.failures.read import read_failure
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

    def poll(
        self,
        until: int,
        at: dict[int, Callable[[], None]] | None = None,
        words: str = "this script ends srun",
    ) -> bool:
        """Poll `until` times at most; return whether srun was ended, for which the log has `words`."""

        def has_ended() -> bool:
            self.polls += 1
            (at or {}).get(self.polls, lambda: None)()
            return self.polls > until

        self.watch = SrunWatch(self.run.attempt_of(self.run.job()), kill_wait_s=30, hosts=["c07", "c08"])
        self.watch.run(self.srun.pid, has_ended)
        return words in self.run.log()


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


def test_the_child_of_srun_does_not_outlive_it_to_cancel_the_step(tmp_path: Path) -> None:
    """srun's child waits for the death of srun; the step that it then cancels may be a later attempt's."""
    mark = tmp_path / "step cancelled"
    program = 'exec 3> >(read -r; : >"$0"); exec sleep 600'
    with subprocess.Popen(["bash", "-c", f"bash -c '{program}' '{mark}'; true"]) as shell:
        wait_until(lambda: len(_descendants(shell.pid)) == 2, "srun has its child")
        child, srun = _descendants(shell.pid)
        _kill(shell.pid)
    for process in (srun, child):
        wait_until(lambda process=process: not runs(process), "srun and its child have ended")
    assert not mark.exists()


def test_srun_of_a_superseded_attempt_is_ended_at_once(watched: Watched) -> None:
    def begin_later_attempt() -> None:
        watched.run.folder.claim_attempt()

    assert watched.poll(until=99, at={7: begin_later_attempt}, words="A later attempt has begun")
    assert watched.polls == 7
    assert watched.srun.wait(120) == -9


@pytest.mark.parametrize(
    "report",
    [
        "srun: error: task 1 launch failed: Slurmd could not connect IO",
        "srun: error: Task launch for StepId=41.0 failed on node c08: Communication connection failure",
    ],
)
def test_srun_is_asked_to_end_when_slurm_could_not_start_an_agent(watched: Watched, report: str) -> None:
    """srun goes on, and the other agents would wait for minutes."""
    watched.leave("node-0.log")
    (watched.log / "batch.log").write_text(f"{report}\n")
    (child,) = _children(watched.srun.pid)
    assert watched.poll(until=1, words="SLURM could not start the agent of node 1 (c08)")
    wait_until(lambda: not runs(child), "srun has ended")
    failure = read_failure(watched.run.folder, 0)
    assert failure is not None
    why = report.rpartition(": ")[2]
    assert failure.sentence == f"the agent of node 1 on c08 was not started by SLURM: {why}"
    (event,) = watched.run.events("rank_failed")
    assert (event["node_rank"], event["host"]) == (1, "c08")


def test_a_report_about_a_step_of_the_setup_lines_ends_nothing(watched: Watched) -> None:
    watched.leave("node-0.log", "node-1.log")
    (watched.log / "batch.log").write_text("srun: error: task 1 launch failed: Slurmd could not connect IO\n")
    assert not watched.poll(until=9, words="this script ends srun")
    assert read_failure(watched.run.folder, 0) is None


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
