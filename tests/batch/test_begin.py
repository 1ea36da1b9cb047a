"""Before the ranks: the runs that a job leaves alone, and the settings of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.slurm.command import CommandResult
from support.slurm.batch_run import PARTITION, RUNNING, STOP, Run, exits


def test_each_start_claims_an_attempt_above_all_others_even_where_old_logs_were_deleted(run: Run) -> None:
    run.folder.log_dir(4).mkdir(parents=True)
    run.start(STOP)
    run.start(SLURM_RESTART_COUNT="1")
    assert [event["attempt"] for event in run.events("started")] == [5, 6]
    assert run.events("started")[-1]["restart_count"] == 1
    assert run.ends == [("stopped", "requeue"), ("finished", "none")]


@pytest.mark.parametrize(("file", "said"), [("cancelled", "was cancelled"), ("stop", "A person stopped")])
def test_a_run_that_a_person_ended_does_not_start(run: Run, file: str, said: str) -> None:
    (run.folder.path / file).touch()
    assert run.start() == 0
    assert said in run.said[0]
    assert run.folder.events() == [] and run.folder.attempts() == []


def test_a_folder_that_cannot_be_written_ends_the_job_at_once(run: Run) -> None:
    (run.folder.path / "logs").write_text("a file where a folder should be")
    assert run.start() == 1
    assert "Cannot write to" in run.said[0]


def test_an_array_starts_nothing_and_writes_nothing(run: Run) -> None:
    before = list(run.folder.path.iterdir())
    assert run.start(SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="3") == 78
    assert "Job 40 is an array" in run.said[0] and "train -m" in run.said[0]
    assert list(run.folder.path.iterdir()) == before


ELEMENT = {"started_as": "element", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}


def test_an_element_of_a_sweep_is_requeued_alone(run: Run) -> None:
    run.start(STOP, **ELEMENT)
    assert [event["job_id"] for event in (*run.events("started"), *run.events("ended"))] == ["40_3"] * 2
    assert run.end == ("stopped", "requeue") and run.asked() == ["requeue 40_3"]
    assert ["show", "job", "40_3"] in [call[-3:] for call in run.slurm.calls]


@pytest.mark.parametrize("state", ["RUNNING|n3|", "COMPLETED||"])
def test_an_element_leaves_a_run_alone_that_another_element_runs(run: Run, state: str) -> None:
    run.folder.add_event("started", attempt=0, job_id="39_1")
    run.slurm.jobs["39_1"] = state
    assert run.start(**ELEMENT) == 0
    assert ("Job 39_1 on n3 runs this run already" in " ".join(run.said)) == ("RUNNING" in state)
    assert len(run.events("started")) == (1 if "RUNNING" in state else 2)


def test_an_element_is_resubmitted_as_a_job_of_its_own(run: Run) -> None:
    run.slurm.on["requeue"] = lambda: CommandResult(1, err="Requested operation is presently disabled")
    run.start(STOP, **ELEMENT)
    (submitted,) = run.submissions()
    assert "--dependency=afterany:40_3" in submitted and submitted[-3:-1] == [
        str(run.folder.script_file),
        "resubmitted",
    ]
    assert "SLURM_ARRAY_JOB_ID" not in run.slurm.submitted_with


def test_outside_slurm_it_says_what_the_script_is_for(run: Run) -> None:
    assert run.start(SLURM_JOB_ID="") != 0
    assert "Submit this script with sbatch" in run.said[0]


# --- A run that is over ---


@pytest.mark.parametrize("outcome", ["finished", "failed", "config", "no_progress"])
@pytest.mark.parametrize("job_id", ["41", "43"], ids=["its own", "of another job"])
def test_a_job_that_had_its_end_does_not_begin_again(run: Run, outcome: str, job_id: str) -> None:
    run.folder.add_event("ended", attempt=0, job_id=job_id, exit_code=1, outcome=outcome, next="none")
    before = run.folder.events()
    assert run.start(SLURM_RESTART_COUNT="1") == 0
    assert f"has ended already ({outcome})" in run.said[0]
    assert run.folder.events() == before


def test_a_job_with_the_number_of_an_old_one_is_not_taken_for_it(run: Run) -> None:
    run.start(exits(1))
    assert run.start(exits(1)) == 1  # in a new SLURM, which counts from the same number
    run.folder.add_event("started", attempt=2, job_id="41")
    run.start(SLURM_RESTART_COUNT="1")
    assert run.end == ("finished", "none")


@pytest.mark.parametrize("outcome", ["finished", "failed", "config", "no_progress"])
def test_a_resubmitted_job_of_a_run_that_is_over_starts_nothing(run: Run, outcome: str) -> None:
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
def test_a_resubmitted_job_of_a_run_that_is_not_over_begins_an_attempt(
    run: Run, facts: dict[str, str] | None
) -> None:
    run.folder.add_event("ended", attempt=0, job_id="41", exit_code=1, outcome="failed", next="none")
    if facts is None:
        run.folder.add_event("submitted", job_id="44", submitter="sbatch")
    else:
        run.folder.add_event("ended", attempt=1, job_id="43", exit_code=75, **facts)
    assert run.succeed() == 0
    assert run.end == ("finished", "none")


# --- One job for each run ---


def second_job(run: Run, state: str = "RUNNING|n[3-4]|", **environ: str) -> str:
    """Start the script as job 77 while job 41 has an attempt without an end; return what it says."""
    run.folder.log_dir(0).mkdir(parents=True)
    run.folder.add_event("started", attempt=0, job_id="41", restart_count=0, nodes="n[3-4]", launcher="slurm")
    if state:
        run.slurm.jobs["41"] = state
    assert run.start(**{"SLURM_JOB_ID": "77", **environ}) == 0
    return "".join(run.said)


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
@pytest.mark.parametrize("comment", ["", "slurmddp:it-s-50-j:0123456789ab", "slurmddp:after-40-3", "my own"])
def test_a_second_job_of_a_run_leaves_the_first_one_alone(run: Run, state: str, comment: str) -> None:
    said = second_job(run, f"{state}|n[3-4]|{comment}")
    assert "Job 41 on n[3-4] runs this run already" in said
    assert f"slurmddp stop {run.folder.name}" in said
    assert [event["job_id"] for event in run.events("started")] == ["41"]
    assert run.folder.attempts() == [0]
    assert run.asked() == []


@pytest.mark.parametrize(
    "state",
    [
        "",
        "PENDING||",
        "COMPLETED||",
        "COMPLETING|n[3-4]|",
        "RUNNING|n[3-4]|slurmddp:other:0123456789ab",
        "RUNNING|n[3-4]|slurmddp:array-0123456789ab|/runs/.other.1/job.sbatch",
    ],
    ids=["unknown", "queued", "over", "ending", "of another run", "of another sweep"],
)
def test_a_second_job_takes_over_a_run_that_no_other_job_runs(run: Run, state: str) -> None:
    second_job(run, state)
    assert [event["job_id"] for event in run.events("started")] == ["41", "77"]
    assert run.end == ("finished", "none")


def test_a_slurm_that_does_not_answer_keeps_no_job_from_its_run(run: Run) -> None:
    run.slurm.silent_queue = 9
    second_job(run)
    assert run.end == ("finished", "none")


def test_a_job_that_has_ended_its_attempt_keeps_no_other_from_the_run(run: Run) -> None:
    run.folder.add_event("ended", attempt=0, job_id="40", outcome="stopped", next="requeue")
    run.slurm.jobs["40"] = "RUNNING|n[3-4]|"
    second_job(run, "")
    assert run.end == ("finished", "none")


# --- Limits for the ranks ---


def limits(run: Run) -> dict[str, str]:
    return {
        name: run.exported.get(name, "") for name in ("LEAD_S", "END_TIME", "KILL_WAIT_S", "PREEMPT_GRACE_S")
    }


def test_the_ranks_get_the_end_of_the_job_and_the_times_before_a_kill(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    run.slurm.job = f"{RUNNING} StartTime=2026-03-01T10:00:00 EndTime=2026-03-01T11:00:00 Deadline=N/A"
    run.slurm.config = "KillOnBadExit           = 0\nKillWait                = 30 sec\n"
    run.slurm.partition = PARTITION
    run.begin(SLURM_JOB_PARTITION="low")
    assert limits(run) == {
        "LEAD_S": "120", "END_TIME": "1772362800", "KILL_WAIT_S": "30", "PREEMPT_GRACE_S": "15",
    }  # fmt: skip


@pytest.mark.parametrize(("answer", "grace"), [("00:00:00", "0"), ("00:02:05", "125"), ("", "")])
def test_where_a_qos_is_preempted_its_grace_counts_and_not_the_grace_of_the_partition(
    run: Run, answer: str, grace: str
) -> None:
    run.slurm.config = "KillWait                = 30 sec\nPreemptType             = preempt/qos\n"
    run.slurm.partition = PARTITION
    run.slurm.qos = {"GraceTime": answer} if answer else {}
    run.begin(SLURM_JOB_PARTITION="low", SLURM_JOB_QOS="cheap")
    assert limits(run)["PREEMPT_GRACE_S"] == grace
    assert run.slurm.of("sacctmgr", "cheap")


@pytest.mark.parametrize("job", [f"{RUNNING} EndTime=Unknown", "down"])
def test_limits_that_slurm_does_not_tell_stay_empty(run: Run, job: str) -> None:
    run.slurm.job = job
    run.begin()
    assert limits(run) == {"LEAD_S": "120", "END_TIME": "", "KILL_WAIT_S": "", "PREEMPT_GRACE_S": ""}


def test_a_grace_that_a_person_names_is_not_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, grace_s=90, signal_lead_s=300)
    run.slurm.config = "KillWait                = 30 sec\n"
    run.begin()
    assert limits(run) == {"LEAD_S": "300", "END_TIME": "", "KILL_WAIT_S": "90", "PREEMPT_GRACE_S": "0"}


def test_an_attempt_that_began_while_the_disk_was_full_ends_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as at_the_start:
        at_the_start.setattr(Path, "write_text", full)
        run.begin()
    assert run.exported["ATTEMPT"] == "0"
    assert run.start(STOP) == 75
    assert run.end == ("stopped", "requeue")
