"""The command of `policy.on_event`: it gets the events of a run, and can't hurt the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmddp.batch.event_command import EventCommands, kind_of_end, run_command
from slurmddp.runs.folder.freeze import batch_program
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.script import settings
from support.runs.agent_runs import runs, wait_until
from support.slurm.slurm_jobs import make_job

TELL = 'printf "%s %s %s " "$SLURMDDP_EVENT" "$SLURMDDP_ATTEMPT" "$PWD" >>told; cat >>told'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.log_dir(0).mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("outcome", "next_", "kind"),
    [
        ("finished", "none", "finished"),
        ("stopped", "none", "stopped"),
        ("stopped", "requeue", "requeued"),
        ("failed", "resubmit", "requeued"),
        ("failed", "none", "failed"),
        ("no_progress", "none", "failed"),
        ("config", "none", "failed"),
        ("cancelled", "none", "cancelled"),
    ],
)
def test_the_end_of_an_attempt_is_told_as_what_follows(outcome: str, next_: str, kind: str) -> None:
    assert kind_of_end(outcome, next_) == kind


def frozen(folder: RunFolder, command: list[str]) -> None:
    job = make_job(project_dir=folder.path.parent)
    folder.batch_file.write_bytes(batch_program())
    folder.job_file.write_text(json.dumps({**settings(job), "on_event": command}))


def batch_step(folder: RunFolder, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "SLURMDDP_RUN_DIR": str(folder.path), **environ}
    command = [sys.executable, "-IS", str(folder.batch_file), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)


def wait_for_lines(file: Path, count: int) -> list[str]:
    end = time.monotonic() + 120
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    return file.read_text().splitlines()


def test_the_batch_step_tells_start_and_end_as_json_and_ends_as_ever(
    folder: RunFolder,
) -> None:
    frozen(folder, ["sh", "-c", TELL + "; exit 3"])
    folder.log_dir(0).rmdir()
    job, told = {"SLURM_JOB_ID": "41"}, folder.path.parent / "told"
    begun = batch_step(folder, "begin", **job)
    assert (begun.returncode, begun.stdout.splitlines()[0]) == (0, "export SLURMDDP_ATTEMPT=0")
    wait_for_lines(told, 1)
    for number in range(2):
        (folder.log_dir(0) / f"exit-node-{number}").write_text("0\n")
    ended = batch_step(folder, "end", "0", "", SLURMDDP_ATTEMPT="0", **job)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split(" ", 3) for line in wait_for_lines(told, 2)]
    assert [line[:3] for line in lines] == [[kind, "0", str(told.parent)] for kind in ("started", "finished")]
    started, finished = (json.loads(line[3]) for line in lines)
    facts = {"run": "run", "run_dir": str(folder.path), "attempt": 0, "job_id": "41"}
    assert {key: started[key] for key in facts} == facts == {key: finished[key] for key in facts}
    assert (finished["event"], finished["exit_code"], finished["next"]) == ("finished", 0, "none")
    events = [event["event"] for event in folder.events()]
    assert [event for event in events if event != "warned"] == ["started", "ended"]
    assert events[-1] == "warned" and "ended with exit code 3" in folder.events()[-1]["text"]


@pytest.mark.parametrize(
    ("command", "timeout_s", "why"),
    [
        (["sh", "-c", "exit 3"], 60, "`sh` ended with exit code 3 (event: failed)"),
        (["no-such-program"], 60, "`no-such-program` can't be started (No such file or directory)"),
        (["sh", "-c", "sleep 600 & echo $! >child; wait"], 0.5, "`sh` was killed after 0.5 s"),
    ],
)
def test_a_failure_is_recorded_and_a_command_that_hangs_ends_with_its_children(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, command: list[str], timeout_s: float, why: str
) -> None:
    monkeypatch.chdir(folder.path)
    run_command(folder, {"command": command, "event": {"event": "failed", "attempt": 0}}, timeout_s=timeout_s)
    (event,) = folder.events()
    assert event["event"] == "warned" and why in event["text"] and "on-event.log" in event["text"]
    if (child := folder.path / "child").exists() and (pid := child.read_text()):
        wait_until(lambda: not runs(int(pid)), "the child of the command has ended")


def test_a_command_that_reads_nothing_and_ends_well_leaves_no_record(folder: RunFolder) -> None:
    run_command(folder, {"command": ["true"], "event": {"event": "started", "attempt": 0}})
    assert folder.events() == []


def test_without_a_command_or_a_folder_for_its_output_nothing_starts(folder: RunFolder) -> None:
    said: list[str] = []
    EventCommands(folder, [], folder.path, said.append).start("started", 0)
    assert said == [] and not (folder.log_dir(0) / "on-event.log").exists()
    EventCommands(folder, ["true"], folder.path, said.append).start("started", 7)
    assert len(said) == 1 and "was not started" in said[0]
