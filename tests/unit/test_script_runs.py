"""The batch script as bash runs it, between fakes of srun, scontrol, squeue and sbatch."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from outcome_table import TABLE, Row
from slurm_jobs import FakePrograms, make_job

from slurmddp.runs.folder import RunFolder
from slurmddp.runs.history import read_failure
from slurmddp.slurm.script import render
from slurmddp.spec import Program

RUNNING = "JobId=41 JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00"
ENDING = RUNNING.replace("RUNNING", "COMPLETING")
FINISH = 'for node in 0 1; do echo 0 >"$logs/exit-node-$node"; done; exit 0'
STOP = 'for node in 0 1; do echo 75 >"$logs/exit-node-$node"; done; exit 75'
SAVE = 'mkdir -p "$SLURMDDP_RUN_DIR/checkpoints"; echo step-9 >"$SLURMDDP_RUN_DIR/checkpoints/latest"\n'


class Run:
    """One run folder, the SLURM around it, and the script in between."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.programs = FakePrograms(tmp_path / "slurm")
        self.folder = RunFolder(tmp_path / "runs" / "it's 50%j")
        self.folder.path.mkdir(parents=True)
        project = tmp_path / "project"
        project.mkdir()
        changes = {
            "run_dir": self.folder.path,
            "project_dir": project,
            "run_name": self.folder.name,
            **changes,
        }
        self.script = render(make_job(**changes))
        self.folder.script_file.write_text(self.script)
        self.programs.write("job", RUNNING)
        self.environ = {
            **os.environ,
            **self.programs.environ,
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }

    def succeed(self, **environ: str) -> int:
        """Run the script as a successor that another job has submitted, with ranks that finish."""
        return self.start(arguments=("successor",), **{"SLURM_JOB_ID": "42", **environ})

    def start(self, step: str = FINISH, *, arguments: tuple[str, ...] = (), **environ: str) -> int:
        """Run the script with `step` in place of the ranks and return its exit code."""
        self.programs.write("step", step)
        done = subprocess.run(
            ["bash", str(self.folder.script_file), *arguments],
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        return done.returncode

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.events() if event["event"] == name]

    @property
    def end(self) -> tuple[str, str]:
        return self.events("ended")[-1]["outcome"], self.events("ended")[-1]["next"]

    def asked(self) -> list[str]:
        """Return the changes that were asked of SLURM."""
        calls = self.programs.folder / "scontrol.calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line for line in lines if not line.startswith(("-o show", "show"))] + [
            "sbatch"
        ] * self.programs.calls("sbatch")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


TRAIN = (
    'printf \'{"event": "first_step", "time": 1, "attempt": %d, "step": 1}\\n\' "$SLURMDDP_ATTEMPT"'
    ' >>"$SLURMDDP_RUN_DIR/attempts.jsonl"\n'
)
"""A step in which rank 0 records that the training has begun."""


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
    step = step_of(row)
    if row.cancelled:
        step = 'touch "$SLURMDDP_RUN_DIR/cancelled"\n' + step
    assert run.start(step) == (79 if row.outcome == "no_progress" else row.exit_code)
    assert run.end == (row.outcome, row.next)
    assert run.asked() == (["requeue 41"] if row.next == "requeue" else [])


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
    run.start(FINISH, SLURM_CPU_BIND="leaked", SLURM_CPU_BIND_LIST="leaked", SLURM_STEP_ID="leaked")
    environ = run.programs.read("srun.env")
    for line in (
        f"SLURMDDP_RUN_DIR={run.folder.path}",
        "SLURMDDP_ATTEMPT=0",
        "PYTHONUNBUFFERED=1",
        "SLURM_EXPORT_ENV=ALL",
        "SRUN_CPUS_PER_TASK=8",
        "GREETING=it's $HOME; `id`",
        "FROM_SETUP=.",
        f"PWD={tmp_path / 'project'}",
    ):
        assert line in environ.splitlines()
    assert "leaked" not in environ


def test_a_signal_does_not_end_the_wait_and_is_not_ignored_by_the_ranks(run: Run) -> None:
    step = "kill -TERM $PPID; kill -USR2 $PPID; /bin/sleep 0.3\n"
    step += 'grep SigIgn /proc/self/status >"$FAKE_SLURM/ignored"\n' + STOP
    assert run.start(step) == 75
    assert run.end == ("stopped", "requeue")
    ignored = int(run.programs.read("ignored").split()[1], 16)
    assert not ignored & (1 << 14 | 1 << 11)  # SIGTERM and SIGUSR2


def test_signals_do_not_change_the_code_of_the_ranks(tmp_path: Path) -> None:
    """The shell's `wait` says -1 or 143 for a child whose end and a signal come at one moment."""
    run = Run(tmp_path, program=Program(target="mine.train", config={}))
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


def test_an_element_of_an_array_requeues_only_itself(run: Run) -> None:
    run.start(STOP, SLURM_ARRAY_JOB_ID="41", SLURM_ARRAY_TASK_ID="3")
    assert run.asked() == ["requeue 41_3"]
    assert run.events("ended")[0]["job_id"] == "41_3"


# --- What srun's code hides ---


@pytest.mark.parametrize("code", [0, 1, 75, 137, 143])
def test_a_recorded_failure_is_a_failure_whatever_srun_says(run: Run, code: int) -> None:
    record = '{\n "rank": 3,\n "exit_code": null,\n "signal": "SIGKILL"\n}'
    exit_code = run.start(f"echo '{record}' >\"$logs/failure.json\"; exit {code}")
    assert exit_code != 0
    assert exit_code != 75
    assert run.end == ("failed", "none")


@pytest.mark.parametrize(("code", "outcome"), [(78, "config"), (79, "no_progress")])
def test_a_refusal_is_kept_though_srun_killed_the_other_agents(run: Run, code: int, outcome: str) -> None:
    record = f'{{"exit_code": {code}, "signal": null}}'
    assert run.start(f"echo '{record}' >\"$logs/failure.json\"; exit 143") == code
    assert run.end == (outcome, "none")


def test_what_a_rank_printed_is_not_taken_for_its_code(run: Run) -> None:
    record = json.dumps({"exit_code": 1, "last_lines": ['"exit_code": 78']})
    run.programs.write("record", record)
    assert run.start('cp "$FAKE_SLURM/record" "$logs/failure.json"; exit 1') == 1
    assert run.end == ("failed", "none")


def test_a_stop_of_all_is_kept_though_srun_killed_an_agent_that_was_leaving(run: Run) -> None:
    assert run.start(STOP.replace("exit 75", "exit 143")) == 75
    assert run.end == ("stopped", "requeue")


def test_an_agent_that_had_finished_is_no_obstacle_to_a_stop(run: Run) -> None:
    run.start('echo 0 >"$logs/exit-node-0"; echo 75 >"$logs/exit-node-1"; exit 75')
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize("code", [75, 137, 143])
@pytest.mark.parametrize("other", ["", 'echo 1 >"$logs/exit-node-1"; '])
def test_an_agent_that_died_is_a_failure_though_srun_made_the_others_stop(
    run: Run, code: int, other: str
) -> None:
    assert run.start(f'echo 75 >"$logs/exit-node-0"; {other}exit {code}') not in (0, 75)
    assert run.end == ("failed", "none")


@pytest.mark.parametrize("words", ["", 'echo 0 >"$logs/exit-node-0"; '], ids=["none", "of the first"])
def test_srun_that_ends_with_0_without_the_word_of_every_agent_is_not_the_end(run: Run, words: str) -> None:
    """So it does when SLURM has given a node up and the others do not end in time."""
    run.programs.write("hostnames", "n1\nn2\n")
    step = f'{SAVE}touch "$logs/node-0.log" "$logs/node-1.log"; {words}exit 0'
    assert run.start(step) == 1
    assert run.end == ("failed", "requeue")
    assert run.asked() == ["requeue 41"]
    log = (run.folder.log_dir(0) / "batch.log").read_text()
    assert "The agent of node 1 (n2) left no exit code." in log
    assert ("The agent of node 0 (n1) left no exit code." in log) == (not words)


def test_srun_that_ends_with_0_when_slurm_has_lost_a_node_is_no_failure(run: Run) -> None:
    run.programs.write("job", ENDING.replace("Reason=None", "Reason=NodeDown"))
    run.start(f'{SAVE}echo 0 >"$logs/exit-node-0"; exit 0')
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize("other", ["75", "0"])
def test_srun_that_ends_with_0_hides_no_stop(run: Run, other: str) -> None:
    assert run.start(f'echo 75 >"$logs/exit-node-0"; echo {other} >"$logs/exit-node-1"; exit 0') == 75
    assert run.end == ("stopped", "requeue")


def test_srun_that_ends_with_0_hides_no_failure(run: Run) -> None:
    assert run.start('echo 0 >"$logs/exit-node-0"; echo 3 >"$logs/exit-node-1"; exit 0') == 1
    assert run.end == ("failed", "none")


def test_a_word_that_is_seen_late_is_waited_for(run: Run) -> None:
    run.programs.write("on-sleep", f'echo 0 >"{run.folder.log_dir(0)}/exit-node-1"')
    assert run.start('echo 0 >"$logs/exit-node-0"; exit 0') == 0
    assert run.end == ("finished", "none")


def peer_lost(text: str) -> str:
    """Return a step in which node 1's agent vanishes and a rank of node 0 ends with `text`."""
    record = json.dumps({"rank": 0, "host": "n1", "exit_code": 1, "signal": None, "last_lines": [text]})
    lines = [f"echo '{record}' >\"$logs/failure.json\"", 'touch "$logs/node-0.log" "$logs/node-1.log"']
    return "; ".join([*lines, 'echo 1 >"$logs/exit-node-0"', "exit 137"])


def test_an_agent_that_vanished_is_named_instead_of_the_rank_that_lost_it(run: Run) -> None:
    run.programs.write("hostnames", "n1\nn2\n")
    run.start(peer_lost("Connection closed by peer [10.0.0.2]"))
    failure = read_failure(run.folder, 0)
    assert failure is not None
    assert failure.sentence == "the agent on n2 left no word: it was killed, or its host is gone"
    assert "The agent of node 1 (n2) left no exit code." in (run.folder.log_dir(0) / "batch.log").read_text()
    (run.folder.log_dir(0) / "exit-node-1").write_text("1\n")  # seen late
    late = read_failure(run.folder, 0)
    assert late is not None and late.rank == 0


def test_a_rank_that_failed_by_itself_is_named_though_an_agent_left_no_code(run: Run) -> None:
    run.programs.write("hostnames", "n1\nn2\n")
    run.start(peer_lost("ValueError: bad luck"))
    failure = read_failure(run.folder, 0)
    assert failure is not None and (failure.rank, failure.host) == (0, "n1")


def test_agents_that_srun_never_started_are_not_called_lost(run: Run) -> None:
    run.start("exit 1")
    assert read_failure(run.folder, 0) is None


# --- What SLURM has done with the job meanwhile ---


def test_a_job_that_slurm_has_requeued_is_left_to_it(run: Run) -> None:
    run.programs.write("job", ENDING.replace("Restarts=0", "Restarts=1"))
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == []


@pytest.mark.parametrize("code", [143, 137, 1])
def test_ranks_that_preemption_killed_have_not_failed(run: Run, code: int) -> None:
    run.programs.write("job", ENDING.replace("Restarts=0", "Restarts=3"))
    run.start(f"exit {code}", SLURM_RESTART_COUNT="2")
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize(
    "job",
    [
        ENDING + " PreemptTime=2026-01-01T00:00:00",
        RUNNING.replace("RUNNING", "PREEMPTED"),
        ENDING.replace("Reason=None", "Reason=NodeDown"),
        RUNNING.replace("RUNNING", "NODE_FAIL"),
    ],
)
def test_a_job_that_slurm_ended_without_requeueing_it_is_put_back(run: Run, job: str) -> None:
    run.programs.write("job", job)
    run.start("exit 143")
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]


@pytest.mark.parametrize(
    "job", [ENDING, RUNNING.replace("RUNNING", "CANCELLED"), ENDING + " PreemptTime=None"]
)
@pytest.mark.parametrize("code", [75, 143])
def test_a_job_that_was_cancelled_with_scancel_stays_cancelled(run: Run, job: str, code: int) -> None:
    run.programs.write("job", job)
    run.start(SAVE + (STOP if code == 75 else f"exit {code}"))
    assert run.end == ("cancelled", "none")
    assert run.asked() == []


@pytest.mark.parametrize(
    ("requeue", "kind", "mode", "expected"),
    [
        (1, "preempt/partition_prio", "REQUEUE", ("cancelled", "none")),
        (1, "preempt/partition_prio", "CANCEL", ("stopped", "requeue")),
        (1, "preempt/qos", "REQUEUE", ("stopped", "requeue")),  # the QOS may say otherwise
        (0, "preempt/partition_prio", "REQUEUE", ("stopped", "resubmit")),  # SLURM cancels those
    ],
)
@pytest.mark.parametrize("code", [75, 143])
def test_a_scancel_during_the_grace_of_a_preemption_is_one(
    run: Run, code: int, requeue: int, kind: str, mode: str, expected: tuple[str, str]
) -> None:
    ending = ENDING.replace("Requeue=1", f"Requeue={requeue}")
    run.programs.write("job", ending + " PreemptTime=2026-01-01T00:00:00")
    run.programs.write("config", f"PreemptMode             = REQUEUE\nPreemptType             = {kind}\n")
    run.programs.write("partition", f"{PARTITION.strip()} PreemptMode={mode}\n")
    run.start(STOP if code == 75 else f"exit {code}", SLURM_JOB_PARTITION="low")
    assert run.end == expected


def test_a_job_that_slurm_calls_cancelled_was_not_preempted(run: Run) -> None:
    cancelled = RUNNING.replace("RUNNING", "CANCELLED") + " PreemptTime=2026-01-01T00:00:00"
    run.programs.write("job", cancelled)
    run.start(STOP)
    assert run.end == ("cancelled", "none")


@pytest.mark.parametrize(
    "times",
    [
        "RunTime=01:00:05 TimeLimit=01:00:00",
        "RunTime=1-00:00:31 TimeLimit=1-00:00:00",
        "RunTime=08:09:08 TimeLimit=08:09:00",
    ],
)
def test_a_job_at_its_time_limit_goes_on(run: Run, times: str) -> None:
    run.programs.write("job", ENDING.partition(" RunTime")[0] + " " + times)
    assert run.start(STOP) == 75
    assert run.end == ("stopped", "requeue")


def test_a_job_killed_at_its_time_limit_goes_on_if_it_had_saved(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("RUNNING", "TIMEOUT"))
    assert run.start(SAVE + "exit 137") == 75
    assert run.end == ("stopped", "requeue")


def test_a_job_that_saves_nothing_in_its_time_has_failed(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("RUNNING", "TIMEOUT"))
    assert run.start("exit 137") == 137
    assert run.end == ("failed", "none")


def test_a_job_without_time_limit_is_cancelled_not_timed_out(run: Run) -> None:
    run.programs.write("job", ENDING.replace("01:00:00", "UNLIMITED"))
    run.start(STOP)
    assert run.end == ("cancelled", "none")


def test_a_controller_that_does_not_answer_changes_nothing(run: Run) -> None:
    run.programs.write("job", "down\n")
    run.start(STOP)
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41"]


SILENCE = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"'


@pytest.mark.parametrize("silent", [1, 25])
def test_a_controller_that_is_away_for_a_while_is_waited_for(run: Run, silent: int) -> None:
    """A host that is cut off can't ask; what SLURM has done meanwhile must not be taken for a failure."""
    run.programs.write("job", "JobState=PENDING Reason=BeginTime Restarts=1 NodeList=")
    back = f'[ "$(wc -l <"$FAKE_SLURM/sleeps")" -lt {silent} ] || rm -f "$FAKE_SLURM/silence"'
    run.programs.write("on-sleep", back)
    run.start(f'{SILENCE} >"$FAKE_SLURM/silence"; exit 1')
    assert run.end == ("stopped", "requeue")
    assert run.asked() == []


def test_a_controller_that_stays_away_is_not_waited_for_without_end(run: Run) -> None:
    run.programs.write("refusal", "sbatch: error: no\n")
    run.start(f'{SAVE}{SILENCE} >"$FAKE_SLURM/silence"; exit 1')
    assert run.end == ("failed", "none")


def test_a_job_that_could_not_be_put_back_goes_on_when_slurm_starts_it_all_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=2)
    run.programs.write("requeue", "exit 1")
    run.programs.write("refusal", "sbatch: error: no\n")
    run.start(SAVE + "exit 1")
    assert run.end == ("failed", "none")
    run.start(SAVE.replace("step-9", "step-10") + "exit 1", SLURM_RESTART_COUNT="1")
    assert [event["attempt"] for event in run.events("started")] == [0, 1]
    assert [event["next"] for event in run.events("ended")] == ["requeue", "none"] * 2, "each counted once"


GIVEN_UP = "JobState=PENDING Reason=BeginTime Restarts=1 NodeList="
TERM_THE_SCRIPT = (
    "parent=$PPID; while grep -q job.sbatch /proc/$parent/cmdline; do kill -TERM $parent;"
    " parent=$(cut -d ' ' -f 4 /proc/$parent/stat); done"
)
UNTIL_KILLED = '[ "$1" != 600 ] || kill -TERM "$PPID"'


@pytest.mark.parametrize("step", ["exit 137", FINISH, 'mkdir "${logs%-0}-1"; exit 1'])
def test_on_a_host_that_slurm_has_given_up_the_script_waits_to_be_ended(run: Run, step: str) -> None:
    """Had it ended when the host reports back, SLURM would drain the node and hold the job."""
    run.programs.write("job", GIVEN_UP)
    run.programs.write("on-sleep", UNTIL_KILLED)
    assert run.start(step, SLURMD_NODENAME="n1") == -15
    assert "waiting to be ended by it" in (run.folder.log_dir(0) / "batch.log").read_text()
    assert len(run.events("ended")) == ("mkdir" not in step)


def test_a_script_that_slurm_is_ending_already_does_not_wait_for_that(run: Run) -> None:
    run.programs.write("job", GIVEN_UP)
    assert run.start(f"{TERM_THE_SCRIPT}; /bin/sleep 0.3; exit 137", SLURMD_NODENAME="n1") == 137
    assert "waiting to be ended" not in (run.folder.log_dir(0) / "batch.log").read_text()


def test_on_a_host_that_still_has_the_job_slurm_waits_for_the_script(run: Run) -> None:
    run.programs.write("job", ENDING.replace("Restarts=0", "Restarts=1") + " NodeList=n[1-2]")
    run.programs.write("hostnames", "n1\nn2\n")
    run.programs.write("on-sleep", UNTIL_KILLED)
    assert run.start(STOP, SLURMD_NODENAME="n1") == 75


# --- Whether it would only be stopped again ---

PREEMPTED = ENDING.replace("Restarts=0", "Restarts=9")


def ends(run: Run) -> list[tuple[str, str]]:
    return [(event["outcome"], event["next"]) for event in run.events("ended")]


def test_two_attempts_that_are_stopped_at_the_same_step_are_enough(run: Run) -> None:
    run.programs.write("job", PREEMPTED)
    assert [run.start(TRAIN + "exit 143") for _ in range(2)] == [143, 79]
    assert ends(run) == [("stopped", "requeue"), ("no_progress", "none")]
    log = (run.folder.log_dir(1) / "batch.log").read_text()
    assert "Two attempts were stopped at step 0" in log
    assert f"slurmddp resume {run.folder.name}" in log


def test_an_attempt_that_got_further_begins_the_count_anew(run: Run) -> None:
    run.programs.write("job", PREEMPTED)
    run.start(TRAIN + "exit 143")
    run.start(TRAIN + SAVE + "exit 143")
    run.start(TRAIN + "exit 143")
    assert ends(run) == [("stopped", "requeue")] * 3
    assert [event.get("stalled_at") for event in run.events("ended")] == ["", None, "step-9"]
    run.start(TRAIN + "exit 143")
    assert run.end == ("no_progress", "none")


def test_preemptions_while_the_training_starts_never_end_a_run(run: Run) -> None:
    run.programs.write("job", PREEMPTED)
    run.start(TRAIN + "exit 143")
    for _ in range(3):
        run.start(STOP)
    assert ends(run) == [("stopped", "requeue")] * 4
    run.start(TRAIN + "exit 143")
    assert run.end == ("no_progress", "none")


def test_a_time_limit_that_ends_twice_before_the_first_step_ends_the_run(run: Run) -> None:
    run.start(STOP)
    run.start(STOP)
    assert ends(run) == [("stopped", "requeue"), ("no_progress", "none")]


def test_a_program_of_ones_own_that_tells_nothing_is_not_judged(tmp_path: Path) -> None:
    run = Run(tmp_path, program=Program(target="mine.train", config={}))
    for _ in range(3):
        run.start(STOP)
    assert ends(run) == [("stopped", "requeue")] * 3


def test_a_person_who_submits_again_gives_a_stalled_run_another_chance(run: Run) -> None:
    run.start(TRAIN + STOP)
    run.folder.add_event("submitted", job_id="41", submitter="sbatch")
    run.start(TRAIN + STOP)
    assert run.end == ("stopped", "requeue")


def test_stops_by_a_person_are_stops(run: Run) -> None:
    run.start(TRAIN + STOP)
    run.start('touch "$SLURMDDP_RUN_DIR/stop"\n' + TRAIN + STOP)
    assert run.end == ("stopped", "none")


@pytest.mark.parametrize("outcome", ["finished", "failed", "config", "no_progress"])
def test_a_job_that_had_its_end_does_not_begin_again(run: Run, outcome: str) -> None:
    codes = {"finished": 0, "failed": 1, "config": 78, "no_progress": 79}
    run.start(FINISH if outcome == "finished" else f"exit {codes[outcome]}")
    before = run.folder.events()
    assert run.start(SLURM_RESTART_COUNT="1") == 0
    assert run.folder.events() == before


def test_a_job_that_is_to_go_on_begins_again(run: Run) -> None:
    run.start(STOP)
    run.start(SLURM_RESTART_COUNT="1")
    assert ends(run) == [("stopped", "requeue"), ("finished", "none")]


def test_a_job_with_the_number_of_an_old_one_is_not_taken_for_it(run: Run) -> None:
    run.start("exit 1")
    assert run.start("exit 1") == 1  # in a new SLURM, which counts from the same number
    run.folder.add_event("started", attempt=2, job_id="41")
    run.start(SLURM_RESTART_COUNT="1")
    assert run.end == ("finished", "none")


# --- Where requeueing is refused ---


def test_a_job_that_may_not_requeue_submits_a_new_one(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.start(STOP, SLURM_CPU_BIND="x", SBATCH_TIMELIMIT="1", SRUN_DEBUG="1", PMI_RANK="1", SLURM_CONF="/c")
    assert run.end == ("stopped", "resubmit")
    assert run.asked() == ["sbatch"]
    assert run.events("submitted")[0] | {"time": 0} == {
        "event": "submitted",
        "time": 0,
        "job_id": "1",
        "submitter": "sbatch",
        "resubmitted": True,
    }
    options = run.programs.read("sbatch.argv").splitlines()
    assert options[-2:] == [str(run.folder.script_file), "successor"]
    assert "--dependency=afterany:41" in options
    assert not [option for option in options if option.startswith("--array")]
    names = {line.partition("=")[0] for line in run.programs.read("sbatch.env").splitlines()}
    assert not {"SLURM_JOB_ID", "SLURM_CPU_BIND", "SBATCH_TIMELIMIT", "SRUN_DEBUG", "PMI_RANK"} & names
    assert "SLURM_CONF" in names


def test_an_element_of_an_array_is_succeeded_by_an_array_of_itself(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.start(STOP, SLURM_ARRAY_JOB_ID="41", SLURM_ARRAY_TASK_ID="3")
    assert {"--array=3", "--dependency=afterany:41_3"} <= set(run.programs.read("sbatch.argv").splitlines())
    assert [event["job_id"] for event in run.events("submitted")] == ["1_3"]


@pytest.mark.parametrize("outcome", ["finished", "failed", "config", "no_progress"])
def test_a_successor_of_a_run_that_had_its_end_starts_nothing(run: Run, outcome: str) -> None:
    run.start(STOP)
    run.folder.add_event("submitted", job_id="42", submitter="sbatch", resubmitted=True)
    run.folder.add_event("ended", attempt=1, job_id="43", exit_code=0, outcome=outcome, next="none")
    before = run.folder.events()
    assert run.succeed() == 0
    assert run.folder.events() == before
    assert run.folder.attempts() == [0]


@pytest.mark.parametrize(
    "facts", [{"outcome": "stopped", "next": "resubmit"}, None], ids=["goes on", "resumed"]
)
def test_a_successor_of_a_run_that_is_to_go_on_begins(run: Run, facts: dict[str, str] | None) -> None:
    run.folder.add_event("ended", attempt=0, job_id="41", exit_code=1, outcome="failed", next="none")
    if facts is None:
        run.folder.add_event("submitted", job_id="44", submitter="sbatch")
    else:
        run.folder.add_event("ended", attempt=1, job_id="43", exit_code=75, **facts)
    assert run.succeed() == 0
    assert run.end == ("finished", "none")


def test_a_successor_among_the_elements_of_an_array_minds_only_its_own_end(run: Run) -> None:
    run.folder.add_event("ended", attempt=0, job_id="41_1", exit_code=0, outcome="finished", next="none")
    run.succeed(SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID="3")
    assert [event["job_id"] for event in run.events("ended")] == ["41_1", "42_3"]


def test_a_refused_requeue_becomes_a_new_submission(run: Run) -> None:
    run.programs.write("requeue", 'echo "Requested operation is presently disabled for job 41" >&2; exit 1')
    run.start(STOP)
    assert run.asked()[-1] == "sbatch"
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_a_request_that_was_granted_though_its_answer_was_lost_is_enough(run: Run) -> None:
    granted = ENDING.replace("Restarts=0", "Restarts=1")
    run.programs.write("requeue", f'echo "{granted}" >job; exit 1')
    run.start(STOP)
    assert run.asked() == ["requeue 41"]


def test_a_job_that_is_pending_already_is_not_submitted_again(run: Run) -> None:
    pending = 'echo "JobState=PENDING Restarts=0" >job; echo "Job is pending execution for job 41"; exit 1'
    run.programs.write("requeue", pending)
    run.start(STOP)
    assert run.asked() == ["requeue 41"]


def test_a_submission_that_timed_out_but_was_queued_is_found(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("timeouts", "1")
    run.programs.write("queued-anyway", "")
    run.start(STOP)
    assert run.programs.calls("sbatch") == 1
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_a_banner_does_not_hide_the_new_job(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("banner", "Welcome\n")
    run.programs.write("suffix", ";alpha")
    run.start(STOP)
    assert [event["job_id"] for event in run.events("submitted")] == ["1"]


def test_when_slurm_takes_neither_the_run_says_that_nothing_will_start_it(run: Run) -> None:
    run.programs.write("requeue", "exit 1")
    run.programs.write("refusal", "sbatch: error: no\n")
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
PARTITION = "PartitionName=low AllowGroups=ALL GraceTime=15 MaxTime=1-00:00:00 State=UP TotalNodes=4\n"


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
