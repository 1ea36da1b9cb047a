"""Attempts with and without progress: what counts as progress, and how often a run may do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.settings.schema import OWN_TRAINER
from slurmddp.settings.spec import Program
from support.slurm.batch_run import (
    ENDING,
    PREEMPTED,
    RUNNING,
    SAVE,
    STOP,
    TRAIN,
    Run,
    Step,
    do,
    exits,
    saves,
)


@pytest.mark.parametrize(
    ("before", "after", "progress"),
    [
        ("", "step-0000000009", True),
        ("", "step-0", False),
        ("step-0000000200", "step-0000000300", True),
        ("step-0000000200", "step-0000000200", False),
        ("step-0000000200", "step-0000000100", False),  # the newest checkpoint was damaged and set aside
        ("step-0000000200", "", False),
        ("step-9", "step-10", True),
        ("step-08", "step-09", True),
        ("step-5", "nonsense", False),
    ],
)
def test_progress_is_a_later_checkpoint(run: Run, before: str, after: str, progress: bool) -> None:
    latest = run.folder.checkpoints_dir / "latest"
    latest.parent.mkdir()
    latest.write_text(before + "\n")
    run.start(do(lambda _: latest.write_text(after + "\n")) + exits(1))
    assert run.end == ("failed", "requeue" if progress else "none")


@pytest.mark.parametrize(("facts", "then"), [({}, "requeue"), ({"resubmitted": True}, "none")])
def test_a_person_who_submits_again_gives_the_run_its_restarts_back(
    tmp_path: Path, facts: dict[str, Any], then: str
) -> None:
    run = Run(tmp_path, max_restarts=1)
    run.folder.add_event("ended", attempt=0, job_id="40", exit_code=1, outcome="failed", next="none")
    run.folder.add_event("submitted", job_id="41", submitter="sbatch", **facts)
    run.start(SAVE + exits(1))
    assert run.end == ("failed", then)


def test_a_run_that_has_progressed_survives_one_failure_without_progress_but_not_two(run: Run) -> None:
    """A bad node at a requeue costs one more attempt; a bug at one step is not repeated further."""
    for step in (SAVE + STOP, exits(1), STOP, exits(1)):
        run.start(step)
    assert [then for _, then in run.ends] == ["requeue", "requeue", "requeue", "none"]
    assert [event.get("progressed") for event in run.events("ended")] == [True, None, None, None]


def test_progress_after_a_failure_without_progress_allows_another_one(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=5)
    for step in (SAVE + exits(1), exits(1), saves(10) + exits(1), exits(1)):
        run.start(step)
    assert run.ends == [("failed", "requeue")] * 4


def test_two_attempts_that_are_stopped_at_the_same_step_are_enough(run: Run) -> None:
    run.slurm.job = PREEMPTED
    assert [run.start(TRAIN + exits(143)) for _ in range(2)] == [143, 79]
    assert run.ends == [("stopped", "requeue"), ("no_progress", "none")]
    assert "Two attempts started from step 0 and were stopped" in run.log(1)
    assert f"slurmddp resume {run.folder.name}" in run.log(1)


def test_an_attempt_that_got_further_begins_the_count_again(run: Run) -> None:
    run.slurm.job = PREEMPTED
    for step in (TRAIN, TRAIN + SAVE, TRAIN):
        run.start(step + exits(143))
    assert run.ends == [("stopped", "requeue")] * 3
    assert [event.get("stalled_at") for event in run.events("ended")] == ["", None, "step-9"]
    run.start(TRAIN + exits(143))
    assert run.end == ("no_progress", "none")


def test_preemptions_while_the_training_starts_never_end_a_run(run: Run) -> None:
    run.slurm.job = PREEMPTED
    for step in (TRAIN + exits(143), STOP, STOP, STOP):
        run.start(step)
    assert run.ends == [("stopped", "requeue")] * 4
    run.start(TRAIN + exits(143))
    assert run.end == ("no_progress", "none")


def test_a_time_limit_that_ends_twice_before_the_first_step_ends_the_run(run: Run) -> None:
    run.start(STOP)
    run.start(STOP)
    assert run.ends == [("stopped", "requeue"), ("no_progress", "none")]


IN_GRACE = RUNNING + " PreemptTime=2026-01-01T00:00:00"


@pytest.mark.parametrize("found", [0, 4], ids=["first step", "resume"])
def test_preemptions_whose_grace_outlasts_the_stop_never_end_a_run(run: Run, found: int) -> None:
    """SLURM calls the job running until the grace is over, and the agents leave before."""
    run.slurm.job = IN_GRACE
    if found:
        run.folder.checkpoints_dir.mkdir()
        (run.folder.checkpoints_dir / "latest").write_text(f"step-{found}\n")
    assert [run.start(STOP) for _ in range(3)] == [75] * 3
    assert run.ends == [("stopped", "requeue")] * 3


def test_a_rank_that_a_preemption_broke_in_its_grace_has_not_failed(run: Run) -> None:
    run.slurm.job = IN_GRACE
    run.start(exits(1))
    assert run.end == ("stopped", "requeue")


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
    run.slurm.job = job
    assert [run.start(STOP) for _ in range(most + 1)] == [75] * most + [79]
    assert run.ends == [("stopped", "requeue")] * most + [("no_progress", "none")]
    assert [event["without_progress"] for event in run.events("ended")] == list(range(1, most + 2))
    assert f"slurmddp resume {run.folder.name} program.checkpoints=PATH" in run.log(most)
    assert "policy.max_requeues_without_progress" in run.log(most)


def test_a_script_whose_files_are_named_gets_the_advice_to_take_more_time(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0, checkpoints="out/*.pt")
    assert run.start(STOP) == 79
    assert f"slurmddp resume {run.folder.name} time_limit=..." in run.log(0)
    assert "program.checkpoints=PATH" not in run.log(0)


@pytest.mark.parametrize("step", [STOP, TRAIN + STOP], ids=["no events", "first_step"])
def test_preemptions_of_a_script_are_not_counted_and_do_not_reset(tmp_path: Path, step: Step) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=1)
    run.start(STOP)
    run.slurm.job = PREEMPTED
    assert [run.start(step) for _ in range(3)] == [75] * 3
    assert [event["without_progress"] for event in run.events("ended")] == [1] * 4
    run.slurm.job = RUNNING
    assert run.start(STOP) == 79


def test_a_checkpoint_in_the_run_folder_begins_the_count_again(tmp_path: Path) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=1)
    for step in (STOP, SAVE + STOP, STOP):
        run.start(step)
    assert [event.get("without_progress") for event in run.events("ended")] == [1, None, 1]
    assert run.start(STOP) == 79


@pytest.mark.parametrize(
    ("pattern", "saved"),
    [
        ("out", "out/deep/model.pt"),
        ("out/*.pt", "out/b c.pt"),
        ("model.pt", "model.pt"),
        ("{run_dir}/mine/*", "{run_dir}/mine/x"),
        ("it's $(touch hacked)*", "it's $(touch hacked).pt"),
        ("linked", "real/model.pt"),
    ],
)
def test_files_that_a_script_names_are_progress(tmp_path: Path, pattern: str, saved: str) -> None:
    run = of_a_script(tmp_path, max_requeues_without_progress=0, checkpoints=pattern)
    file = run.project / saved.replace("{run_dir}", str(run.folder.path))
    (run.project / "real").mkdir()
    (run.project / "linked").symlink_to("real")
    (run.project / "real/loop").symlink_to("../real")

    def write(run: Run) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(f"{run.attempt}\n")

    assert [run.start(do(write) + STOP) for _ in range(2)] == [75, 75]
    assert "without_progress" not in run.events("ended")[-1]
    run.start(do(write) + exits(1))
    assert run.end == ("failed", "requeue"), "a failure after such progress is tried again"
    assert [(run.start(exits(1)), run.end) for _ in range(2)] == [
        (1, ("failed", "requeue")),
        (1, ("failed", "none")),
    ]
    assert run.start(do(lambda run: (run.project / "other.pt").touch()) + STOP) == 79
    assert not list(tmp_path.rglob("hacked"))


@pytest.mark.parametrize(
    "program",
    [
        Program(target="mine.train", config={}),
        Program(target=OWN_TRAINER, config={"program": {"_target_": OWN_TRAINER, "script": "mine.py"}}),
    ],
    ids=["function", "script"],
)
def test_a_program_without_events_is_never_called_stuck(tmp_path: Path, program: Program) -> None:
    run = Run(tmp_path, program=program)
    for _ in range(3):
        run.start(STOP)
    assert run.ends == [("stopped", "requeue")] * 3
