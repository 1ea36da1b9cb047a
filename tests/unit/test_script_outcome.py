"""What the batch script takes an attempt's end for: by its agents, by SLURM, by the attempts before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_run import (
    ENDING,
    FINISH,
    GIVEN_UP,
    PARTITION,
    PREEMPTED,
    RUNNING,
    SAVE,
    STOP,
    TERM_THE_SCRIPT,
    TRAIN,
    UNTIL_KILLED,
    Run,
)

from slurmddp.config.schema import OWN_TRAINER
from slurmddp.runs.failures.model import read_failure
from slurmddp.spec import Program

# --- What srun's code hides ---


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


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


# --- A program that saves nothing that slurmddp sees ---


def of_a_script(tmp_path: Path, **keys: object) -> Run:
    policy = {key: keys.pop(key) for key in list(keys) if key.startswith("max_")}
    config = {"program": {"_target_": OWN_TRAINER, "script": "mine.py", **keys}}
    return Run(tmp_path, program=Program(target=OWN_TRAINER, config=config), **policy)


AT_LIMIT = ENDING.partition(" RunTime")[0] + " RunTime=01:00:05 TimeLimit=01:00:00"


@pytest.mark.parametrize("job", [RUNNING, AT_LIMIT], ids=["signalled", "at the limit"])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_time_limits_without_progress_are_bounded(tmp_path: Path, most: int, job: str) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=most)
    run.programs.write("job", job)
    codes = [run.start(STOP) for _ in range(most + 1)]
    assert codes == [75] * most + [79]
    assert ends(run) == [("stopped", "requeue")] * most + [("no_progress", "none")]
    assert [event["without_progress"] for event in run.events("ended")] == list(range(1, most + 2))
    log = (run.folder.log_dir(most) / "batch.log").read_text()
    assert f"slurmddp resume {run.folder.name} program.checkpoints=PATH" in log
    assert "policy.max_requeues_without_progress" in log


@pytest.mark.parametrize("step", [STOP, TRAIN + STOP], ids=["no events", "first_step"])
def test_preemptions_of_a_script_are_not_counted_and_do_not_reset(tmp_path: Path, step: str) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=1)
    run.start(STOP)
    run.programs.write("job", PREEMPTED)
    assert [run.start(step) for _ in range(3)] == [75] * 3
    assert [event["without_progress"] for event in run.events("ended")] == [1] * 4
    run.programs.write("job", RUNNING)
    assert run.start(STOP) == 79


def test_a_checkpoint_in_the_run_folder_begins_the_count_again(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=1)
    run.start(STOP)
    run.start(SAVE + STOP)
    run.start(STOP)
    assert [event.get("without_progress") for event in run.events("ended")] == [1, None, 1]
    assert run.start(STOP) == 79


def test_a_person_who_submits_again_gives_a_script_its_time_limits_back(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0)
    assert run.start(STOP) == 79
    run.folder.add_event("submitted", job_id="41", submitter="sbatch")
    assert run.start(STOP) == 79
    assert [event["without_progress"] for event in run.events("ended")] == [1, 1]


def test_a_script_that_a_person_stops_is_not_called_stuck(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0)
    run.start('touch "$SLURMDDP_RUN_DIR/stop"\n' + STOP)
    assert run.end == ("stopped", "none")


@pytest.mark.parametrize(
    ("pattern", "saved"),
    [
        ("out", "out/deep/model.pt"),
        ("out/*.pt", "out/b c.pt"),
        ("model.pt", "model.pt"),
        ("{run_dir}/mine/*", "$SLURMDDP_RUN_DIR/mine/x"),
        ("it's $(touch hacked)*", "it's \\$(touch hacked).pt"),
    ],
)
def test_files_that_a_script_names_are_progress(tmp_path: Path, pattern: str, saved: str) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0, checkpoints=pattern)
    save = f'mkdir -p "$(dirname "{saved}")"; echo "$SLURMDDP_ATTEMPT" >>"{saved}"\n'
    assert [run.start(save + STOP) for _ in range(2)] == [75, 75]
    assert "without_progress" not in run.events("ended")[-1]
    run.start(save + "exit 1")
    assert run.end == ("failed", "requeue"), "a failure after such progress is tried again"
    assert [(run.start("exit 1"), run.end) for _ in range(2)] == [
        (1, ("failed", "requeue")),
        (1, ("failed", "none")),
    ]
    assert run.start(f"touch other.pt\n{STOP}") == 79
    assert not list(tmp_path.rglob("hacked"))


IN_GRACE = RUNNING + " PreemptTime=2026-01-01T00:00:00"


@pytest.mark.parametrize("found", ["", "step-4"], ids=["first step", "resume"])
def test_preemptions_whose_grace_outlasts_the_stop_never_end_a_run(run: Run, found: str) -> None:
    """SLURM calls the job running until the grace is over, and the agents leave before."""
    run.programs.write("job", IN_GRACE)
    if found:
        run.folder.checkpoints_dir.mkdir()
        (run.folder.checkpoints_dir / "latest").write_text(found + "\n")
    for _ in range(3):
        assert run.start(STOP) == 75
    assert ends(run) == [("stopped", "requeue")] * 3


def test_a_rank_that_a_preemption_broke_in_its_grace_has_not_failed(run: Run) -> None:
    run.programs.write("job", IN_GRACE)
    run.start("exit 1")
    assert run.end == ("stopped", "requeue")


@pytest.mark.parametrize(
    "program",
    [
        Program(target="mine.train", config={}),
        Program(target=OWN_TRAINER, config={"program": {"_target_": OWN_TRAINER, "script": "mine.py"}}),
    ],
    ids=["function", "script"],
)
def test_a_program_of_ones_own_that_tells_nothing_is_not_judged(tmp_path: Path, program: Program) -> None:
    run = Run(tmp_path, program=program)
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
