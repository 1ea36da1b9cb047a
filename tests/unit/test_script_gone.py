"""A batch script that is gone while agents live: its host is set DOWN by hand, or it is killed alone."""

from __future__ import annotations

import socket

import pytest
from script_nodes import PUT_BACK, ask_hostless, first_is_lost, refusing, run, slurmd
from script_run import ENDING, RUNNING, Run

__all__ = ["refusing", "run", "slurmd"]

KILLED = ENDING.replace("Reason=None", "Reason=JobLaunchFailure")


def alive(run: Run, slurmd: socket.socket, job: str) -> Run:
    """Let the first node's slurmd answer, and SLURM say `job`."""
    slurmd.listen()
    run.programs.write("job", job)
    return first_is_lost(run, "ALLOCATED", port=slurmd.getsockname()[1])


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        (f"{RUNNING} NodeList=n[2-3] ", PUT_BACK),
        (f"{KILLED} NodeList=n2 ", ["sbatch"]),
        (KILLED.replace("JobLaunchFailure", "NonZeroExitCode") + " NodeList=n2 ", ["sbatch"]),
        (KILLED.replace("JobLaunchFailure", "RaisedSignal:9(Killed)") + " NodeList=n2 ", ["sbatch"]),
    ],
)
@pytest.mark.parametrize("words", ["srun: error: Node failure on n1\n", ""], ids=["srun has told", "not yet"])
def test_a_run_whose_live_first_node_was_set_down_goes_on_without_that_node(
    run: Run, slurmd: socket.socket, job: str, asked: list[str], words: str
) -> None:
    alive(run, slurmd, job)
    (run.folder.log_dir(0) / "batch.log").write_text(words)
    assert [one for one in ask_hostless(run) if one != "scancel"] == asked
    assert '"node": "n1"' in (run.folder.path / "excluded.jsonl").read_text()
    assert (run.folder.log_dir(0) / "lost-node-0").read_text() == "n1\n"


@pytest.mark.parametrize(
    "job",
    [
        f"{RUNNING} NodeList=n[1-3] ",
        ENDING,
        KILLED.replace("JobLaunchFailure", "TimeLimit"),
        KILLED.replace("Restarts=0", "Restarts=1"),
        KILLED.replace("COMPLETING", "CANCELLED"),
    ],
    ids=["only the agent ended", "cancelled", "time limit", "requeued", "cancelled before"],
)
def test_a_job_that_has_its_script_is_left_alone(run: Run, slurmd: socket.socket, job: str) -> None:
    assert ask_hostless(alive(run, slurmd, job)) == []


def test_a_script_that_has_told_of_its_end_is_not_gone(run: Run, slurmd: socket.socket) -> None:
    run.folder.add_event("ended", attempt=0, job_id="41", exit_code=75, outcome="failed", next="none")
    assert ask_hostless(alive(run, slurmd, KILLED)) == []


@pytest.mark.parametrize(
    ("code", "end", "asked"),
    [
        (75, ("stopped", "requeue"), ["requeue 41"]),
        (0, ("finished", "none"), []),
        (1, ("failed", "none"), []),
    ],
)
def test_a_script_that_was_killed_alone_is_put_back_and_no_host_is_blamed(
    run: Run, code: int, end: tuple[str, str], asked: list[str]
) -> None:
    run.environ["SLURM_NODEID"] = "0"
    run.programs.write("job", KILLED)
    log_dir = first_is_lost(run).folder.log_dir(0)
    (log_dir / "exit-node-0").write_text(f"{code}\n")
    assert [one for one in ask_hostless(run) if one != "scancel"] == asked
    assert run.end == end
    assert not (log_dir / "lost-node-0").exists()
    assert run.events("ended")[0]["exit_code"] == code


def test_what_slurm_has_not_seen_yet_is_waited_for(run: Run) -> None:
    run.environ["SLURM_NODEID"] = "0"
    run.programs.write("on-sleep", f'echo "{KILLED}" >"$FAKE_SLURM/job"')
    (first_is_lost(run).folder.log_dir(0) / "exit-node-0").write_text("75\n")
    assert ask_hostless(run) == ["requeue 41"]


def test_a_person_s_stop_is_kept(run: Run, slurmd: socket.socket) -> None:
    run.folder.stop_file.touch()
    assert "requeue 41" not in ask_hostless(alive(run, slurmd, KILLED))
