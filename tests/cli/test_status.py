"""`slurmddp status`: state, failure, goodput and start of a run; errors that all commands share."""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest

from slurmddp.cli.main import main
from slurmddp.errors import EXIT_FAILED, EXIT_NO_RUN
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.text_format import local_time
from slurmddp.slurm.states import JobState
from support.runs.cli_runs import end, start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_status_tells_how_each_attempt_ended(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    for attempt, signal in enumerate(("SIGUSR2", "SIGTERM")):
        start(folder, attempt=attempt)
        folder.add_event("signalled", attempt=attempt, signal=signal, rank=0)
        end(folder, "stopped", attempt=attempt, code=75, next_="requeue")
    start(folder, attempt=2)
    slurm.set_state("7", "RUNNING")
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"\n +0  .*time limit, no save recorded\n +1  .*requeued, no save recorded\n +2  .*not ended yet\n",
        out,
    )
    assert "attempt 1 ended: requeued, no save recorded" in out


def test_status_names_the_command_that_draws_the_curves_once_there_are_some(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    assert main(["status"]) == 0
    assert "curves" not in capsys.readouterr().out
    folder.tensorboard_dir.mkdir(parents=True)
    assert main(["status"]) == 0
    command = f"tensorboard --logdir {shlex.quote(str(folder.tensorboard_dir))}"
    assert f"\n  curves     {command}\n" in capsys.readouterr().out


def test_status_says_how_curves_that_were_written_offline_get_to_weights_and_biases(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    offline = [folder.loggers_dir / "wandb" / f"offline-run-{attempt}" for attempt in (1, 2)]
    for path in offline:
        path.mkdir(parents=True)
    upload = f"\n  curves     wandb sync {shlex.quote(str(offline[0].parent))}/offline-run-*  # "

    (offline[0] / "run-gpt.wandb.synced").touch()  # as `wandb sync` does after an upload
    assert main(["status"]) == 0
    assert upload in capsys.readouterr().out

    (offline[1] / "run-gpt.wandb.synced").touch()
    assert main(["status"]) == 0
    assert "wandb" not in capsys.readouterr().out


def test_status_of_the_newest_run_by_default(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.set_state("7", "PENDING", reason="PartitionTimeLimit")
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert folder.name in out
    assert re.search(r"state +queued: job 7 waits: it asks for more time", out)
    assert "time_limit=" in out


def test_status_shows_the_failing_rank(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    folder.rank_log(0, 3).write_text("boom\n")
    left = {"rank": 3, "host": "node4", "exit_code": None, "signal": "SIGKILL", "last_lines": ["boom"]}
    folder.failure_file(0).write_text(json.dumps(left))
    end(folder, "failed", code=137)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 on node4 was killed by SIGKILL" in out
    assert "| boom" in out
    assert str(folder.rank_log(0, 3)) in out
    assert "exit code 137 (failed)" in out


@pytest.mark.parametrize("key", ["restart_count", "generation"])
def test_status_explains_the_failure_and_every_restart_in_place(make_run, slurm, capsys, key):
    """Records of earlier versions hold `generation`."""
    folder = make_run()
    submit(folder)
    start(folder)
    left = {"rank": 3, "host": "node4", "exit_code": None, "signal": "SIGKILL", "reason": "out of memory: so"}
    folder.failure_file(0).write_text(json.dumps(left))
    for count in range(7):
        path = folder.log_dir(0) / f"failure-g{count}.json"
        path.write_text(json.dumps(left | {"rank": count, key: count, "time": 100.0}))
        step = 140 if count == 6 else -1
        folder.add_event("restarted", attempt=0, **{key: count + 1}, step=step)
    (folder.log_dir(0) / "failure-g7.json").write_text(json.dumps(left | {"rank": 7, key: 7}))
    end(folder, "failed", code=1)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 on node4 was killed by SIGKILL: out of memory: so\n" in out
    assert "rank 7" not in out, "nobody began again after it"
    assert "Ask for more with mem_gb=" in out
    assert [f"rank {rank} on" in out for rank in range(7)] == [False] * 2 + [True] * 5
    assert "(2 earlier ones)" in out
    assert f"{local_time(100.0)} after step 140: rank 6 on" in out
    assert f"{local_time(100.0)}: rank 5 on" in out
    assert main(["status", "--json", "gpt"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failure"]["reason"] == "out of memory: so"
    assert [one["restart_count"] for one in found["restarted"]] == list(range(7))
    assert [one["reached"] for one in found["restarted"]] == [None] * 6 + [140]
    start(folder, attempt=1)
    assert main(["status", "gpt"]) == 0
    assert "after step 140: rank 6 on" in capsys.readouterr().out, "a later attempt hides no restart"


def test_status_names_the_nodes_that_the_run_avoids(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    append_line(folder.excluded_file, {"time": 1, "node": "node9", "reason": "", "expires": 2})
    assert main(["status"]) == 0
    assert "avoids" not in capsys.readouterr().out
    append_line(folder.excluded_file, {"time": 1, "node": "node7", "reason": "", "expires": 9e9})
    assert main(["status"]) == 0
    assert "avoids     node7: failed recently\n" in capsys.readouterr().out
    for state, waits in (("PENDING", True), ("RUNNING", False)):
        slurm.set_state("7", state)
        assert main(["status"]) == 0
        assert ("`scontrol update JobId=7 ExcNodeList=` lets the job" in capsys.readouterr().out) == waits


def test_status_shows_why_no_rank_started(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    start(folder)
    (folder.log_dir(0) / "node-1.log").write_text("execve(): /no/such/python: No such file or directory\n")
    (folder.log_dir(0) / "batch.log").write_text("srun ended with code 2.\n")
    end(folder, "failed", code=2)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "| [node 1] execve(): /no/such/python" in out
    assert "| [batch] srun ended with code 2." in out


def test_a_job_of_another_run_that_has_the_same_id_is_left_alone(make_run, slurm, capsys):
    folder = make_run()
    submit(folder)
    slurm.states["7"] = JobState(job_id="7", state="RUNNING", run="other-11111111")
    assert main(["status", "gpt"]) == 0
    assert "SLURM no longer knows job 7" in capsys.readouterr().out
    folder.add_event("submitted", job_id="8", submitter="sbatch")
    slurm.states["8"] = JobState(job_id="8", state="RUNNING", run=folder.name)
    assert main(["cancel", "gpt"]) == 0
    assert {job: slurm.states[job].state for job in "78"} == {"7": "RUNNING", "8": "CANCELLED"}


def test_a_queued_element_is_queued_although_its_array_does_not_name_its_run(make_run, slurm, capsys):
    folder = make_run()
    submit(folder, "7_1")
    script = str(folder.path.parent / ".gpt.1" / "job.sbatch")
    slurm.states["7_1"] = JobState(job_id="7_1", state="PENDING", reason="Priority", script=script)
    assert main(["status", "gpt"]) == 0
    assert "queued" in capsys.readouterr().out
    assert main(["cancel", "gpt"]) == 0
    assert slurm.states["7_1"].state == "CANCELLED"


def trained(folder):
    """Two attempts: one that failed after a save, one that runs."""
    facts = {"job_id": "7", "launcher": "slurm", "nodes": "node[1-2]"}
    for event in (
        {"event": "submitted", "time": 1000.0, "job_id": "7"},
        {"event": "started", "time": 1010.0, "attempt": 0, **facts},
        {"event": "first_step", "time": 1020.0, "attempt": 0, "step": 1},
        {"event": "saved", "time": 1142.0, "attempt": 0, "step": 20, "seconds": 2.0},
        {"event": "rank_failed", "time": 1160.0, "attempt": 0, "rank": 1, "host": "node1"},
        {"event": "ended", "time": 1161.0, "attempt": 0, **facts, "outcome": "failed", "next": "requeue"},
        {"event": "started", "time": 1170.0, "attempt": 1, **facts},
        {"event": "resumed", "time": 1178.0, "attempt": 1, "step": 20},
    ):
        append_line(folder.attempts_file, event)
    return {
        "event": "first_step",
        "time": 1180.0,
        "attempt": 1,
        "step": 21,
        "phases": {"imports": 4.0, "rendezvous": 0.5, "first_step": 1.5, "odd": "x"},
    }


END = {"event": "ended", "attempt": 1, "job_id": "7", "exit_code": 0, "outcome": "finished", "next": "none"}


def test_status_tells_what_the_time_went_into(make_run, slurm, capsys):
    folder = make_run()
    for event in (trained(folder), {**END, "time": 1240.0}):
        append_line(folder.attempts_file, event)
    assert main(["status", "gpt"]) == 0
    out = capsys.readouterr().out
    said = "75 % (81 % of the time on nodes): 3m 00s training, 20s starting, 19s queued, 18s lost, 2s saving"
    assert re.search(r"goodput +(.*)", out)[1] == f"{said}, 1s ending"
    assert "ATTEMPT" not in out
    assert main(["status", "-v", "gpt"]) == 0
    rows = [
        line.split("  ") for line in capsys.readouterr().out.partition("Where the time went")[2].splitlines()
    ]
    table = [[cell.strip() for cell in row if cell] for row in rows]
    assert ["ATTEMPT", "WHOLE", "TRAINING", "SAVING", "LOST", "STARTING", "ENDING", "QUEUED"] in table
    assert ["0", "2m 41s", "2m 00s", "2.0s", "18s", "10s", "1.0s", "10s"] in table
    assert ["1", "1m 19s", "1m 00s", "10s", "9.0s"] in table
    assert ["all", "4m 00s", "3m 00s", "2.0s", "18s", "20s", "1.0s", "19s"] in table
    assert ["Start of attempt 1: 10.00 s until its first step"] in table
    for row in (["launch", "4.00"], ["imports", "4.00"], ["rendezvous", "0.50"], ["first step", "1.50"]):
        assert row in table
    assert not [row for row in table if "odd" in row]


def test_the_phases_of_a_start_come_with_its_first_step(make_run, slurm, capsys):
    folder = make_run()
    first_step = trained(folder)
    append_line(folder.attempts_file, {**first_step, "attempt": 0})
    slurm.set_state("7", "RUNNING")
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "ATTEMPT" in out
    assert "PHASE" not in out, "those of an earlier attempt would be taken for its own"
    append_line(folder.attempts_file, first_step)
    assert main(["status", "-v", "gpt"]) == 0
    assert "Start of attempt 1" in capsys.readouterr().out


def test_the_goodput_of_a_program_that_tells_nothing_is_not_known(make_run, slurm, capsys):
    folder = make_run()
    folder.config_file.write_text("name: gpt\nprogram: {script: train.py}\n")
    append_line(folder.attempts_file, {"event": "started", "time": 1000.0, "attempt": 1, "job_id": "7"})
    append_line(folder.attempts_file, {**END, "time": 1060.0})
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"time +1m 00s in the program; the program reports no first step, so its training", out)
    assert re.search(r"used +0\.00 rank-hours", out)


def test_status_of_a_damaged_record_says_nothing_of_its_time(make_run, slurm, capsys):
    folder = make_run()
    folder.attempts_file.write_text("no JSON\n")
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "unknown: the run folder can't be read" in out
    assert "goodput" not in out
    assert main(["status", "--json", "gpt"]) == 0
    assert json.loads(capsys.readouterr().out)["goodput"]["parts"] == {}


def test_the_times_as_json(make_run, slurm, capsys):
    folder = make_run()
    for event in (trained(folder), {**END, "time": 1240.0}):
        append_line(folder.attempts_file, event)
    assert main(["status", "gpt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["goodput"]["share"], found["goodput"]["whole"]) == (0.75, 240.0)
    assert found["goodput"]["attempts"][0]["parts"]["lost"] == 18.0
    assert found["phases"]["attempt"] == 1
    assert list(found["phases"]["seconds"]) == ["launch", "imports", "rendezvous", "first_step"]


def test_status_as_json(make_run, slurm, capsys):
    submit(make_run())
    assert main(["status", "gpt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "cancelled"
    assert found["total_steps"] == 400


@pytest.mark.parametrize("command", ["status", "logs", "stop", "cancel", "resume", "report"])
def test_an_unknown_run_is_an_error_with_near_names(make_run, slurm, command, capsys):
    make_run()
    assert main([command, "gtp-0a1b2c3d"]) == EXIT_NO_RUN
    assert "Did you mean gpt-0a1b2c3d?" in capsys.readouterr().err


def test_a_record_that_may_not_be_read_is_named_plainly(make_run, slurm, capsys):
    folder = make_run()
    folder.attempts_file.mkdir()
    assert main(["status", "gpt"]) == 0
    expected = f"{folder.attempts_file} can't be read: it is a folder and no file."
    assert expected in capsys.readouterr().out
    assert main(["report", "gpt"]) == EXIT_FAILED
    assert expected in capsys.readouterr().err


AWAITED = "node 2 (n3); 2 of 3 nodes have joined, and all start their ranks together"


@pytest.mark.parametrize(
    ("waits", "state", "is_shown"),
    [
        ([(0, AWAITED)], "RUNNING", True),
        ([(0, AWAITED), (0, "")], "RUNNING", False),
        ([(0, AWAITED), (1, "")], "RUNNING", False),
        ([(0, AWAITED)], "FAILED", False),
        ([], "RUNNING", False),
    ],
)
def test_the_nodes_for_which_the_others_wait_are_named(make_run, slurm, capsys, waits, state, is_shown):
    folder = make_run()
    for event in ({"event": "submitted"}, {"event": "started", "attempt": 0}):
        append_line(folder.attempts_file, {**event, "time": time.time(), "job_id": "7"})
    for attempt, nodes in waits:
        folder.add_event("awaits", attempt=attempt, nodes=nodes)
    slurm.set_state("7", state)
    assert main(["status", "gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["awaited"] == (AWAITED if is_shown else "")


@pytest.mark.parametrize(("age_s", "until"), [(5, ""), (200, " until the last heartbeat")])
def test_the_speed_of_a_run_that_stands_still_is_one_of_the_past(make_run, slurm, capsys, age_s, until):
    folder = make_run()
    now = time.time()
    for event in ({"event": "submitted"}, {"event": "started", "attempt": 0}):
        append_line(folder.attempts_file, {**event, "time": now - 300, "job_id": "7"})
    append_line(folder.attempts_file, {"event": "first_step", "time": now - 250, "attempt": 0, "step": 1})
    line = {"step": 9, "attempt": 0, "time": now - age_s, "loss": 2.0, "samples_per_s": 7.0}
    append_line(folder.metrics_file, line)
    slurm.set_state("7", "RUNNING")
    assert main(["status", "gpt"]) == 0
    assert f"  speed      7 samples/s{until}\n" in capsys.readouterr().out


def test_status_shows_the_use_of_the_devices_and_the_memory_of_each_rank(make_run, slurm, capsys):
    folder = make_run()
    append_line(folder.attempts_file, trained(folder))
    line = {"step": 9, "attempt": 1, "time": 1.0, "loss": 2.0, "samples_per_s": 7.0, "grad_norm": 1.5}
    append_line(folder.metrics_file, {**line, "tflops": 395.27, "mfu": 0.3997})
    slurm.set_state("7", "RUNNING")
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "  speed      7 samples/s, 395 TFLOP/s per rank, MFU 40 % until" in out
    assert "Peak memory" not in out and "  metrics " not in out
    memory = {"event": "memory", "time": 2.0, "attempt": 1, "step": 9, "device": "cuda"}
    append_line(folder.attempts_file, {**memory, "peak_bytes": [1 << 30, 1 << 31]})
    append_line(folder.attempts_file, {**memory, "peak_bytes": [3 << 29, 9 << 30]})
    assert main(["status", "-v", "gpt"]) == 0
    out = capsys.readouterr().out
    assert "Peak memory (GPU); largest: 9.00 GiB on rank 1\n" in out
    assert [line.split() for line in out.splitlines() if "GiB" in line][-2:] == [
        ["0", "1.50", "GiB"],
        ["1", "9.00", "GiB"],
    ]


@pytest.mark.parametrize("command", [["status", "gpt"], ["list"], ["status", "-v", "gpt"]])
def test_a_run_folder_of_others_commands_no_terminal(make_run, slurm, capsys, command):
    evil = "\x1b]0;title\x07\x1b[2Jn1"
    folder = make_run()
    folder.add_event("submitted", job_id="7", submitter="sbatch")
    folder.add_event("started", attempt=0, job_id="7", restart_count=0, nodes=evil, launcher="slurm")
    folder.overrides_file.write_text(f"model.x='{evil}'\n")
    append_line(folder.metrics_file, {"step": 1, "loss": 1.0, evil: 2.0, "attempt": 0, "time": 1.0})
    slurm.set_state("7", "RUNNING")
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "n1" in shown or command == ["list"]
    assert "\x1b" not in shown and "\x07" not in shown
