"""A run gets one job: concurrent commands, jobs that the folder does not name, filesystems without locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_RUN_STATE, EXIT_SLURM, RunNotFoundError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from support.runs.cli_runs import end, start, submit
from support.runs.projects import make_project
from support.runs.taken_names import refusing_open
from support.runs.train_runs import only_run

COMMAND = ("train", "+cluster=big", "nodes=1", "name=first", "snapshot=false")
HOLDS = """
import sys, time
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
if "--no-locks" in sys.argv:
    import errno, fcntl
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = refuse
assert RunLock(RunFolder(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return make_project(tmp_path / "project")


def one(project: Path, command: tuple[str, ...]) -> tuple[int, str]:
    """Run one command in this process; return its exit code and output."""
    said, before = io.StringIO(), Path.cwd()
    os.chdir(project)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(list(command))
        return code, said.getvalue()
    finally:
        os.chdir(before)


def at_once(project: Path, python: str, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Run commands in processes of their own, all at the same time; return exit codes and outputs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begun = [
        subprocess.Popen([python, "-m", "slurmddp", *command], cwd=project, **pipes) for command in commands
    ]
    outputs = [process.communicate(timeout=120)[0] for process in begun]
    return [(process.returncode, output) for process, output in zip(begun, outputs, strict=True)]


@pytest.fixture
def run(project, programs):
    """A run whose job 1 is in the queue."""
    assert one(project, COMMAND)[0] == 0
    return only_run(project)


def submitted(folder: RunFolder) -> list[str]:
    return [event["job_id"] for event in folder.events() if event["event"] == "submitted"]


@pytest.mark.parametrize("folder_exists", [False, True])
def test_the_same_command_four_times_at_once_gives_one_job(project, programs, forked_python, folder_exists):
    if folder_exists:
        assert one(project, COMMAND)[0] == 0
        assert one(project, ("cancel", str(only_run(project).path)))[0] == 0
    before = programs.calls("sbatch")
    ends = at_once(project, forked_python, *[COMMAND] * 4)
    assert [code for code, _ in ends] == [0] * 4, ends
    assert programs.calls("sbatch") == before + 1
    job_id = submitted(only_run(project))[-1]
    assert sum(f"job     {job_id}\n" in output for _, output in ends) == 1
    assert sum(f"is queued already: job {job_id}" in output for _, output in ends) == 3


def test_three_resumes_at_once_give_one_job(project, run, programs, forked_python):
    start(run, job_id="1")
    end(run, "stopped", code=75, job_id="1")
    programs.write("jobs/1", "COMPLETED|||\n")
    ends = at_once(project, forked_python, *[("resume", "first")] * 3)
    assert [code for code, _ in ends] == [0] * 3, ends
    assert programs.calls("sbatch") == 2 and submitted(run) == ["1", "2"]


def test_a_job_whose_submission_was_not_recorded_is_taken_over(project, run, programs):
    run.attempts_file.unlink()
    code, output = one(project, COMMAND)
    assert code == 0 and "SLURM already has job 1 of" in output and "follow  slurmddp status first" in output
    assert programs.calls("sbatch") == 1 and submitted(run) == ["1"]


def test_a_job_that_slurm_requeued_after_a_stop_leaves_the_queue_before_the_next_is_submitted(
    project, run, programs
):
    start(run, job_id="1")
    end(run, "stopped", code=75, job_id="1")
    code, output = one(project, ("resume", "first"))
    assert code == 0 and "Job 1 of an earlier attempt was still in the queue" in output
    assert programs.read("jobs/1").startswith("CANCELLED") and programs.read("jobs/2").startswith("PENDING")


def test_no_job_is_submitted_beside_one_that_runs(project, run, programs):
    start(run, job_id="1")
    programs.write("jobs/1", "RUNNING|||\n")
    submit(run, "9")  # SLURM knows no such job
    code, output = one(project, COMMAND)
    assert code == EXIT_RUN_STATE and "Job 1 of" in output and "still runs" in output
    assert programs.calls("sbatch") == 1


def test_nothing_is_submitted_or_left_while_slurm_does_not_say_which_jobs_the_run_has(project, programs):
    programs.write("squeue-timeouts", "9")
    code, output = one(project, COMMAND)
    assert code == EXIT_SLURM and "Socket timed out" in output and "Nothing was submitted." in output
    assert programs.calls("sbatch") == 0 and not (project / "runs").exists()


@pytest.mark.parametrize("command", ["stop", "cancel"])
@pytest.mark.parametrize("job_id", ["1", "77"], ids=["named", "not named"])
def test_jobs_that_slurm_would_still_start_are_found_by(project, run, programs, command, job_id):
    run.attempts_file.unlink()
    start(run, job_id=job_id)
    end(run, "stopped", code=75, job_id=job_id)
    code, output = one(project, (command, "first"))
    assert code == 0 and "job 1" in output
    assert programs.read("jobs/1").startswith("CANCELLED")


def test_the_jobs_of_another_run_with_the_same_name_are_left_alone(run, programs, tmp_path):
    other = make_project(tmp_path / "other")
    code, output = one(other, COMMAND)
    assert code == 0 and "job     2\n" in output
    assert programs.read("jobs/1").startswith("PENDING")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "gpt")
    folder.path.mkdir(parents=True)
    return folder


def refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("no_locks", [False, True])
def test_a_lock_is_free_again_when_its_holder_is_killed(folder, monkeypatch, no_locks):
    if no_locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    command = [sys.executable, "-c", HOLDS, str(folder.path), *["--no-locks"] * no_locks]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert not RunLock(folder).acquire()
        holder.kill()
        holder.wait()
    for _ in range(2):
        with RunLock(folder) as lock:
            assert lock.acquire()


@pytest.mark.parametrize(
    ("holder", "age_s", "free"),
    [
        ({"host": "elsewhere", "pid": 1, "process_start": "x"}, 10, False),
        ({"host": "elsewhere", "pid": 1, "process_start": "x"}, 1000, True),
        ("half a li", 0, False),
        ("half a li", 60, True),
    ],
)
def test_a_holder_that_can_not_be_seen_counts_for_a_while(folder, monkeypatch, holder, age_s, free):
    monkeypatch.setattr(fcntl, "flock", refuse)
    (folder.path / ".lock-holder").write_text(holder if isinstance(holder, str) else json.dumps(holder))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age_s)
    assert RunLock(folder).acquire() is free


def test_a_lock_is_held_where_the_file_system_refuses_the_name_of_its_holder(folder, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "open", refusing_open)
    with RunLock(folder) as lock:
        assert lock.acquire()
        assert not RunLock(folder).acquire()


def test_the_lock_of_a_run_that_was_put_aside_is_not_the_lock_of_the_next(folder):
    with RunLock(folder) as first:
        assert first.acquire()
        folder.path.rename(folder.path.with_name("gpt.old-1"))
        with pytest.raises(RunNotFoundError, match="removed by another command"):
            RunLock(folder).acquire()
        folder.path.mkdir()
        with RunLock(folder) as second:
            assert second.acquire()
