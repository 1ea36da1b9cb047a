"""What the batch script does before, with and around the ranks; fakes stand in for SLURM's programs."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from outcome_table import PROGRESS, TABLE, Row
from script_nodes import NODE
from script_run import (
    ENDING,
    FINISH,
    PARTITION,
    RUNNING,
    SAVE,
    STOP,
    TRAIN,
    Run,
)

from slurmddp.spec import Program


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def step_of(row: Row) -> str:
    return (
        (TRAIN if row.stalls else "")
        + (SAVE if row.progressed else "")
        + {0: FINISH, 75: STOP}.get(row.exit_code, f"exit {row.exit_code}")
    )


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)
def test_the_shell_decides_as_the_table_says(tmp_path: Path, row: Row) -> None:
    run = Run(tmp_path, max_restarts=row.max_restarts, requeue=row.requeue)
    for _ in range(row.failures - 1):
        run.folder.add_event("ended", attempt=0, job_id="40", exit_code=1, outcome="failed", next="requeue")
    for _ in range(row.stalls - 1):
        run.folder.add_event("ended", attempt=0, outcome="stopped", next="requeue", stalled_at="")
    for count in range(1, row.without_progress):
        facts = {"outcome": "stopped", "next": "requeue", "without_progress": count}
        run.folder.add_event("ended", attempt=0, job_id="40", exit_code=75, **facts)
    if row.progressed_before:
        run.folder.add_event("ended", attempt=0, outcome="stopped", next="requeue", progressed=True)
    step = step_of(row)
    if row.cancelled:
        step = 'touch "$SLURMDDP_RUN_DIR/cancelled"\n' + step
    assert run.start(step) == (79 if row.outcome == "no_progress" else row.exit_code)
    assert run.end == (row.outcome, row.next)
    assert run.asked() == (["requeue 41"] if row.next == "requeue" else [])


@pytest.mark.parametrize(("before", "after", "progress"), PROGRESS)
def test_the_shell_sees_progress_as_the_table_says(run: Run, before: str, after: str, progress: bool) -> None:
    run.folder.checkpoints_dir.mkdir()
    latest = run.folder.checkpoints_dir / "latest"
    latest.write_text(before + "\n")
    run.start(f'echo "{after}" >"$SLURMDDP_RUN_DIR/checkpoints/latest"; exit 1')
    assert run.end == ("failed", "requeue" if progress else "none")


@pytest.mark.parametrize(
    ("submitted", "then"),
    [({"submitter": "sbatch"}, "requeue"), ({"submitter": "sbatch", "resubmitted": True}, "none")],
    ids=["by a person", "by the job"],
)
def test_a_person_who_submits_again_gives_the_run_its_restarts_back(
    tmp_path: Path, submitted: dict[str, Any], then: str
) -> None:
    run = Run(tmp_path, max_restarts=1)
    run.folder.add_event("ended", attempt=0, job_id="40", exit_code=1, outcome="failed", next="none")
    run.folder.add_event("submitted", job_id="41", **submitted)
    run.start(SAVE + "exit 1")
    assert run.end == ("failed", then)


def test_a_run_that_has_progressed_survives_one_failure_without_progress_but_not_two(run: Run) -> None:
    """A bad node at a requeue costs one more attempt; a bug at one step is not repeated further."""
    nexts = []
    for step in (SAVE + STOP, "exit 1", STOP, "exit 1"):
        run.start(step)
        nexts.append(run.end[1])
    assert nexts == ["requeue", "requeue", "requeue", "none"]
    assert [event.get("progressed") for event in run.events("ended")] == [True, None, None, None]


def test_progress_after_a_failure_without_progress_allows_another_one(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=5)
    for step in (SAVE + "exit 1", "exit 1", SAVE.replace("step-9", "step-10") + "exit 1", "exit 1"):
        run.start(step)
    assert [event["next"] for event in run.events("ended")] == ["requeue"] * 4


@pytest.mark.parametrize(
    ("resubmitted", "then"), [(False, "none"), (True, "requeue")], ids=["by a person", "by the job"]
)
def test_progress_before_a_person_submitted_the_run_counts_no_more(
    run: Run, resubmitted: bool, then: str
) -> None:
    run.start(SAVE + STOP)
    run.folder.add_event("submitted", job_id="41", **({"resubmitted": True} if resubmitted else {}))
    run.start("exit 1")
    assert run.end == ("failed", then)


def test_an_attempt_is_recorded_from_start_to_end(run: Run) -> None:
    assert run.start() == 0
    (started,), (ended,) = run.events("started"), run.events("ended")
    assert {key: started[key] for key in ("attempt", "job_id", "restart_count", "nodes", "launcher")} == {
        "attempt": 0,
        "job_id": "41",
        "restart_count": 0,
        "nodes": "n[1-2]",
        "launcher": "slurm",
    }
    assert {key: ended[key] for key in ("attempt", "job_id", "exit_code", "outcome", "next")} == {
        "attempt": 0,
        "job_id": "41",
        "exit_code": 0,
        "outcome": "finished",
        "next": "none",
    }
    assert started["time"] <= ended["time"]
    assert "Attempt 0: finished" in (run.folder.log_dir(0) / "batch.log").read_text()


def test_each_start_claims_the_next_attempt(run: Run) -> None:
    run.folder.log_dir(0).mkdir(parents=True)
    run.start(STOP)
    run.start(SLURM_RESTART_COUNT="1")
    assert [event["attempt"] for event in run.events("started")] == [1, 2]
    assert run.events("started")[-1]["restart_count"] == 1


def test_an_attempt_is_numbered_above_all_others_even_where_old_logs_were_deleted(run: Run) -> None:
    run.folder.log_dir(4).mkdir(parents=True)
    run.start()
    assert [event["attempt"] for event in run.events("started")] == [5]


@pytest.mark.parametrize("step", [FINISH, STOP, SAVE + "exit 1"], ids=["finished", "stopped", "failed"])
def test_an_attempt_after_which_another_began_neither_ends_nor_requeues_the_run(run: Run, step: str) -> None:
    assert run.start('mkdir "${logs%-0}-1"\n' + step) == 79
    assert run.events("ended") == []
    assert run.asked() == []
    assert "a later one has begun" in (run.folder.log_dir(0) / "batch.log").read_text()


def test_setup_lines_that_fail_after_another_attempt_began_leave_the_run_to_it(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=('mkdir "$run/logs/attempt-1"', "exit 3"))
    done = subprocess.run(["bash", str(run.folder.script_file)], env=run.environ, timeout=60)
    assert done.returncode == 79
    assert run.events("ended") == []


def test_the_step_is_one_agent_per_node(tmp_path: Path) -> None:
    run = Run(tmp_path, cpus_per_node=8, srun={"gpu-bind": "none", "label_x": "a b"})
    run.start()
    logs = str(run.folder.log_dir(0)).replace("%", "%%")
    assert run.programs.read("srun.argv").splitlines() == [
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--gpu-bind=none",
        "--label-x=a b",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
        f"--output={logs}/node-%n.log",
        "/home/ada/env/bin/python",
        "-m",
        "slurmddp.launchers.agent",
        str(run.folder.path),
    ]


def test_the_agents_find_their_run_and_a_clean_environment(tmp_path: Path) -> None:
    run = Run(
        tmp_path, cpus_per_node=8, env={"GREETING": "it's $HOME; `id`"}, setup=("export FROM_SETUP=$UNSET.",)
    )
    leaked = ("CPU_BIND", "CPU_BIND_LIST", "STEP_ID", "TRES_PER_TASK", "GPUS_PER_TASK", "MEM_PER_CPU")
    kept = {"SLURM_CPUS_PER_TASK": "8"}  # as the header asks for it
    run.start(FINISH, **{f"SLURM_{name}": "leaked" for name in leaked}, **kept)
    environ = run.programs.read("srun.env")
    for line in (
        f"SLURMDDP_RUN_DIR={run.folder.path}",
        "SLURMDDP_ATTEMPT=0",
        "PYTHONUNBUFFERED=1",
        "SLURM_EXPORT_ENV=ALL",
        "SRUN_CPUS_PER_TASK=8",
        "SLURM_CPUS_PER_TASK=8",
        "GREETING=it's $HOME; `id`",
        "FROM_SETUP=.",
        f"PWD={tmp_path / 'project'}",
    ):
        assert line in environ.splitlines()
    assert "leaked" not in environ


def test_a_job_that_asks_for_no_cpus_has_none_of_the_job_around_it(run: Run) -> None:
    run.start(FINISH, SLURM_CPUS_PER_TASK="1", SLURM_MEM_PER_NODE="1024")
    environ = run.programs.read("srun.env")
    assert "SLURM_CPUS_PER_TASK" not in environ and "SLURM_MEM_PER_NODE" not in environ


def test_a_signal_does_not_end_the_wait_and_is_not_ignored_by_the_ranks(run: Run) -> None:
    step = "kill -TERM $PPID; kill -USR2 $PPID; /bin/sleep 0.3\n"
    step += 'grep SigIgn /proc/self/status >"$FAKE_SLURM/ignored"\n' + STOP
    assert run.start(step) == 75
    assert run.end == ("stopped", "requeue")
    ignored = int(run.programs.read("ignored").split()[1], 16)
    assert not ignored & (1 << 14 | 1 << 11)  # SIGTERM and SIGUSR2


def test_signals_do_not_change_the_code_of_the_ranks(tmp_path: Path) -> None:
    """The shell's `wait` says -1 or 143 for a child whose end and a signal come at one moment."""
    program = Program(target="mine.train", config={})
    run = Run(tmp_path, program=program, max_requeues_without_progress=99)
    run.programs.write("step", 'touch "$logs/began"; /bin/sleep "0.0$((RANDOM % 9))"\n' + STOP)
    for attempt in range(12):
        began = run.folder.log_dir(attempt) / "began"
        script = subprocess.Popen(["bash", str(run.folder.script_file)], env=run.environ)
        while script.poll() is None:
            if began.exists():
                script.terminate()
            time.sleep(0.001)
    assert [event["exit_code"] for event in run.events("ended")] == [75] * 12


def test_the_end_is_recorded_before_slurm_is_asked_to_requeue(run: Run) -> None:
    run.programs.write("requeue", f'cp "{run.folder.attempts_file}" before')
    run.start(STOP)
    assert json.loads(run.programs.read("before").splitlines()[-1])["next"] == "requeue"


def test_an_array_starts_nothing_and_writes_nothing(run: Run) -> None:
    environ = {**run.environ, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    done = subprocess.run(["bash", str(run.folder.script_file)], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (78, "")
    assert "Job 40 is an array" in done.stdout and "name=" in done.stdout
    assert [path.name for path in run.folder.path.iterdir()] == ["job.sbatch"]


# --- Calls that hang ---


@pytest.mark.parametrize("call", ["show", "requeue", "update"])
def test_a_controller_that_hangs_does_not_hold_the_script_up(run: Run, call: str) -> None:
    run.programs.write("impatient", "")
    run.programs.write("on-ask" if call == "show" else call, "exec /bin/sleep 100")
    if call == "show":  # it hangs for two calls after the ranks, then answers again
        run.programs.write(
            "on-ask", '[ "$(grep -c "show job" scontrol.calls)" -gt 3 ] || exec /bin/sleep 100'
        )
    if call == "update":
        run.programs.write("nodes", NODE.format("n2", "DOWN"))
    began = time.monotonic()
    run.start(STOP)
    assert time.monotonic() - began < 30
    assert run.end == ("stopped", "requeue")
    assert run.asked()[0] == "requeue 41"
    assert ("sbatch" in run.asked()) == (call == "requeue")
    assert (run.asked()[-1].startswith("update")) == (call == "update")


def test_a_request_to_slurm_outlives_the_signal_that_ends_the_script(run: Run) -> None:
    """SLURM sends SIGTERM to all processes of a job that it requeues, also to the next request."""
    run.programs.write("nodes", NODE.format("n2", "DOWN"))
    run.programs.write("update", 'kill -TERM "$PPID"; /bin/sleep 0.3; touch excluded')
    run.start(STOP)
    assert (run.programs.folder / "excluded").exists()
    assert "runs on other nodes than n2" in (run.folder.log_dir(0) / "batch.log").read_text()


def test_an_sbatch_and_a_queue_that_hang_do_not_hold_the_script_up(run: Run) -> None:
    run.programs.write("impatient", "")
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("on-submit", "exec /bin/sleep 100")
    run.start(STOP)
    assert run.end == ("stopped", "none")
    assert f"slurmddp resume {run.folder.name}" in (run.folder.log_dir(0) / "batch.log").read_text()


# --- Before the ranks ---


def test_a_cancelled_run_does_not_start(run: Run) -> None:
    run.folder.cancelled_file.touch()
    assert run.start() == 0
    assert not run.folder.attempts_file.exists()


def test_a_folder_that_cannot_be_written_ends_the_job_at_once(run: Run) -> None:
    (run.folder.path / "logs").write_text("a file where a folder should be")
    run.programs.write("step", "exit 0")
    done = subprocess.run(
        ["bash", str(run.folder.script_file)], env=run.environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Cannot write to" in done.stderr


def test_a_strict_mode_of_the_setup_lines_ends_with_them(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("set -euo pipefail", "trap 'exit 9' TERM ERR EXIT"))
    assert run.start("kill -TERM $PPID; /bin/sleep 0.1\n" + STOP) == 75
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize(
    ("lines", "code"),
    [(("set -e", "false"), 1), (("exit 3",), 3), (("exit 0",), 1), (("set -e", "set -u", "echo $UNSET"), 1)],
)
def test_setup_lines_that_end_the_script_are_a_failure(
    tmp_path: Path, lines: tuple[str, ...], code: int
) -> None:
    run = Run(tmp_path, setup=lines)
    done = subprocess.run(["bash", str(run.folder.script_file)], env=run.environ, timeout=60)
    assert done.returncode == code
    assert run.end == ("failed", "none")
    assert run.events("ended")[0]["exit_code"] == code
    assert "before any rank was started" in (run.folder.log_dir(0) / "batch.log").read_text()
    assert not (run.programs.folder / "srun.argv").exists()


def start_only(run: Run, **environ: str) -> int:
    """Run the script with no word on what srun would do; returns its exit code."""
    script = ["bash", str(run.folder.script_file)]
    return subprocess.run(script, env={**run.environ, **environ}, timeout=60, capture_output=True).returncode


@pytest.mark.parametrize("lines", [("set -e", "false"), ("exit 75",), ("exit 143",), ("exit 0",)])
@pytest.mark.parametrize("requeue", [1, 0])
def test_a_preemption_that_ends_a_setup_line_is_no_failure(
    tmp_path: Path, lines: tuple[str, ...], requeue: int
) -> None:
    """SLURM signals all that the batch step has started, the commands of the setup lines too."""
    run = Run(tmp_path, setup=lines)
    preempted = ENDING.replace("Requeue=1", f"Requeue={requeue}") + " PreemptTime=2026-01-01T00:00:00"
    run.programs.write("job", preempted)
    assert start_only(run) == 1
    assert run.end == ("stopped", "requeue" if requeue else "resubmit")
    assert run.asked() == (["requeue 41"] if requeue else ["sbatch"])


def test_a_job_that_is_told_to_end_while_it_is_set_up_starts_no_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("kill -TERM $BASHPID", "touch $run/went-on"))
    run.programs.write("job", ENDING + " PreemptTime=2026-01-01T00:00:00")
    start_only(run)
    assert run.end == ("stopped", "requeue")
    assert not (run.folder.path / "went-on").exists()
    assert not (run.programs.folder / "srun.argv").exists()


def test_setup_lines_that_are_no_shell_are_a_failure_with_an_end(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("if true; then",))
    assert start_only(run) == 1
    assert run.end == ("failed", "none")
    assert "no shell that bash can read" in (run.folder.log_dir(0) / "batch.log").read_text()


OWN_NAMES = (
    "job",
    "log",
    "run",
    "attempt",
    "nodes",
    "max_restarts",
    "python",
    "code",
    "latest_before",
    "fate",
)


@pytest.mark.parametrize("where", ["env", "setup"])
def test_no_name_that_the_script_uses_itself_can_be_taken(tmp_path: Path, where: str) -> None:
    """The ranks see such a variable as it was given; the script decides by its own."""
    names = dict.fromkeys(OWN_NAMES, "999")
    lines = ("set -- a b", *(f"export {name}=999" for name in OWN_NAMES))
    run = Run(tmp_path, **({"env": names} if where == "env" else {"setup": lines}))
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]
    assert {f"{name}=999" for name in OWN_NAMES} <= set(run.programs.read("srun.env").splitlines())
    assert run.programs.read("srun.argv").splitlines()[-4:] == [
        "/home/ada/env/bin/python",
        "-m",
        "slurmddp.launchers.agent",
        str(run.folder.path),
    ]
    output = str(run.folder.log_dir(0)).replace("%", "%%")
    assert f"--output={output}/node-%n.log" in run.programs.read("srun.argv").splitlines()


@pytest.mark.parametrize("line", ["env", "set", "set -x", "declare -p", "set -x; set -a"])
def test_no_setup_line_prints_the_secret(tmp_path: Path, line: str) -> None:
    run = Run(tmp_path, setup=(line,))
    run.start(STOP)
    (secret,) = re.findall(r"^SLURMDDP_SECRET=([0-9a-f]{32})$", run.programs.read("srun.env"), re.MULTILINE)
    assert secret not in (run.folder.log_dir(0) / "batch.log").read_text()


# --- Setup lines that fail, and let the shell go on ---


def warnings(run: Run) -> list[str]:
    return [event["text"] for event in run.events("warned") if event["about"] == "setup"]


def test_a_setup_line_that_fails_is_told_of_and_the_ranks_start(tmp_path: Path) -> None:
    lines = ("source /nope/activate", "  load() { return 3; }", '  load "a\\b"', "true", "export A=1")
    run = Run(tmp_path, setup=lines)
    assert run.start() == 0
    assert run.end == ("finished", "none")
    first, second = warnings(run)
    assert first.startswith("The setup line `source /nope/activate` failed with code 1.")
    assert second.startswith('The setup line `load "a\\b"` failed with code 3.')
    assert "`set -e`" in first
    assert (
        "The setup line `source /nope/activate` failed" in (run.folder.log_dir(0) / "batch.log").read_text()
    )
    assert all(event["attempt"] == 0 for event in run.events("warned"))


def test_setup_lines_whose_failure_is_meant_are_not_told_of(tmp_path: Path) -> None:
    script = tmp_path / "activate"
    script.write_text("false\nreturn 0\n")
    lines = ("false || true", "if false; then true; fi", "[ -e /nope ] && true", "! true", f"source {script}")
    run = Run(tmp_path, setup=lines)
    assert run.start() == 0
    assert warnings(run) == []


def test_a_setup_line_that_fails_and_takes_the_names_of_the_script_is_told_of(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("run=/nope", "attempt=x", "false"))
    run.start()
    assert [text[:23] for text in warnings(run)] == ["The setup line `false` "]


def test_a_line_that_ends_the_setup_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("set -e", "ls /nope/nope"))
    assert start_only(run) == 2
    assert "`ls /nope/nope` failed with code 2" in warnings(run)[0]


# --- Around the ranks ---


def test_setup_lines_change_nothing_of_what_follows_the_ranks(tmp_path: Path) -> None:
    run = Run(tmp_path, setup=("job=99", "nodes=0"))
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]


def test_outside_slurm_the_script_says_what_it_is_for(run: Run) -> None:
    environ = {key: value for key, value in run.environ.items() if key != "SLURM_JOB_ID"}
    done = subprocess.run(["bash", str(run.folder.script_file)], env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    assert "this script is for sbatch" in done.stderr


@pytest.mark.parametrize("step", [STOP, SAVE + "exit 1"], ids=["stopped", "failed"])
def test_what_a_person_stopped_is_not_put_back(run: Run, step: str) -> None:
    run.start('touch "$SLURMDDP_RUN_DIR/stop"\n' + step)
    assert run.end == ("stopped" if step == STOP else "failed", "none")
    assert run.asked() == []


def test_what_a_person_stopped_does_not_start_when_slurm_puts_it_back(run: Run) -> None:
    run.folder.stop_file.touch()
    assert run.start() == 0
    assert run.folder.events() == [] and run.folder.attempts() == []


ENVIRONMENT = 'env | grep ^SLURMDDP_ | sort >"$logs/environment"\n'


def told(run: Run) -> dict[str, str]:
    """Return what the ranks were told about the limits of the job."""
    lines = (run.folder.log_dir(0) / "environment").read_text().splitlines()
    values = dict(line.removeprefix("SLURMDDP_").split("=", 1) for line in lines)
    return {name: values.get(name, "") for name in ("LEAD_S", "END_TIME", "KILL_WAIT_S", "PREEMPT_GRACE_S")}


def test_the_ranks_are_told_when_the_job_ends_and_how_it_is_killed(run: Run) -> None:
    run.programs.write(
        "job", f"{RUNNING} StartTime=2026-03-01T10:00:00 EndTime=2026-03-01T11:00:00 Deadline=N/A"
    )
    run.programs.write("config", "KillOnBadExit           = 0\nKillWait                = 30 sec\n")
    run.programs.write("partition", PARTITION)
    run.start(ENVIRONMENT, TZ="UTC", SLURM_JOB_PARTITION="low", SLURMDDP_END_TIME="1")
    assert told(run) == {
        "LEAD_S": "120",
        "END_TIME": "1772362800",
        "KILL_WAIT_S": "30",
        "PREEMPT_GRACE_S": "15",
    }


def test_limits_that_slurm_does_not_tell_stay_empty(run: Run) -> None:
    run.programs.write("job", f"{RUNNING} EndTime=Unknown")
    run.start(ENVIRONMENT, SLURMDDP_END_TIME="1", SLURMDDP_KILL_WAIT_S="1")
    assert told(run) == {"LEAD_S": "120", "END_TIME": "Unknown", "KILL_WAIT_S": "", "PREEMPT_GRACE_S": ""}


def test_a_grace_that_a_person_names_is_not_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, grace_s=90, signal_lead_s=300)
    run.programs.write("config", "KillWait                = 30 sec\n")
    run.start(ENVIRONMENT)
    assert told(run) == {"LEAD_S": "300", "END_TIME": "", "KILL_WAIT_S": "90", "PREEMPT_GRACE_S": "0"}


@pytest.mark.parametrize(
    ("other", "stopped"),
    [("", True), ('echo 1 >"$logs/exit-node-1"; ', False)],
    ids=["not begun", "failed"],
)
def test_a_person_who_stops_a_run_need_not_wait_for_agents_that_have_not_begun(
    run: Run, other: str, stopped: bool
) -> None:
    """The first one leaves with 75 while another still starts Python; srun then ends that one."""
    run.start(f'touch "$SLURMDDP_RUN_DIR/stop"; echo 75 >"$logs/exit-node-0"; {other}exit 143')
    assert run.end == ("stopped" if stopped else "failed", "none")
