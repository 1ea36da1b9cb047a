"""The recovery of a run from a fault: without help or by hand, with its lost steps and seconds."""

from __future__ import annotations

import pytest

from chaos import recovery
from chaos.faults import MissedError
from chaos.story import Story, story

__all__ = ["story"]


@pytest.mark.parametrize(("in_place", "how"), [(False, "came back"), (True, "in place")])
def test_a_recovery_has_its_lost_steps_and_seconds_counted(story: Story, in_place: bool, how: str) -> None:
    attempt = 0 if in_place else 1

    def act() -> bool:
        story.steps(0, 13, 14)
        if in_place:
            story.event("restarted", attempt=0, restart_count=1, step=14)
        else:
            story.event("ended", attempt=0, job_id="1", outcome="failed", exit_code=1, next="requeue")
            story.event("started", attempt=1, job_id="1")
        story.event("resumed", attempt=attempt, step=10)
        story.time += 5
        story.steps(attempt, 11, 16)
        return True

    found = story.outcome(act)
    assert (found.outcome, found.step, found.lost_steps, found.attempts) == (how, 14, 4, attempt)
    assert found.recovery_s == 2 + 5 + 5  # two steps, the pause, and five steps up to number 15
    assert found.survived


def test_a_run_that_was_not_interrupted_continued(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        story.time += 3
        story.steps(0, 13, 13)
        monkeypatch.setattr(recovery, "CALM_S", -1.0)

    found = story.outcome(act)
    assert (found.outcome, found.lost_steps, found.recovery_s) == ("went on", 0, 4.0)


def test_a_run_that_repeats_old_steps_is_not_back_yet(story: Story) -> None:
    def act() -> bool:
        story.event("started", attempt=1, job_id="1")
        story.event("resumed", attempt=1, step=10)
        story.steps(1, 11, 12)
        return True

    found = story.outcome(act)
    assert (found.outcome, found.survived, found.lost_steps) == ("lost", False, None)
    assert "last step 12, SLURM: PENDING, launch failed requeued held" in found.note


def test_a_run_that_gave_up_is_lost_until_a_hand_helps(story: Story) -> None:
    def by_hand(*_: object) -> bool:
        story.event("submitted", job_id="2")
        story.event("started", attempt=1, job_id="2")
        story.steps(1, 1, 13)
        return True

    def act() -> bool:
        story.event("ended", attempt=0, job_id="1", outcome="failed", exit_code=1, next="none")
        return True

    story.resume_by_hand(by_hand)
    found = story.outcome(act)
    assert (found.outcome, found.survived, found.lost_steps) == ("by hand", False, 12)
    assert "failed" in found.note


def test_a_fault_that_ends_several_attempts_counts_from_the_last(story: Story) -> None:
    def act() -> bool:
        story.event("started", attempt=1, job_id="1")
        story.event("resumed", attempt=1, step=12)
        story.steps(1, 13, 13)
        story.event("started", attempt=2, job_id="1")
        return True

    found = story.outcome(act, attempt=1)
    assert (found.outcome, found.step) == ("lost", 13)


def test_a_broken_promise_is_a_loss_although_the_training_continues(story: Story) -> None:
    def act() -> bool:
        story.steps(0, 13, 14)
        return False

    found = story.outcome(act, broken="SLURM has 2 jobs of the run, not one")
    assert (found.outcome, found.survived) == ("lost", False)
    assert found.note == "SLURM has 2 jobs of the run, not one"


def test_a_fault_that_comes_too_late_does_not_count(story: Story) -> None:
    def act() -> bool:
        story.event("ended", attempt=0, job_id="1", outcome="finished", exit_code=0, next="none")
        return True

    def miss() -> bool:
        raise MissedError

    assert story.strike(act) is None
    assert story.strike(miss) is None


def test_ranks_that_only_repeat_steps_have_not_recovered(story: Story) -> None:
    story.event("restarted", attempt=0, restart_count=1, step=12)  # of an earlier fault
    story.steps(0, 11, 13)

    def act() -> bool:
        story.event("restarted", attempt=0, restart_count=2, step=13)
        story.event("resumed", attempt=0, step=10)
        story.steps(0, 11, 13)
        return True

    assert story.outcome(act).outcome == "lost"
