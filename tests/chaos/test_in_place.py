"""Faults after which ranks begin again in the same job, as `make chaos ARGS=--in-place` sees them."""

from __future__ import annotations

import pytest

from chaos import recovery
from chaos.story import Story, story
from chaos.training import Shape

__all__ = ["story"]


def test_a_run_whose_ranks_begin_again_has_its_lost_steps_and_seconds_counted(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> bool:
        story.steps(0, 13, 14)
        story.event("restarted", attempt=0, generation=1, step=14)
        story.event("resumed", attempt=0, step=10)
        story.time += 5
        story.steps(0, 11, 16)
        return True

    found = story.strike(monkeypatch, act)
    assert found is not None
    assert (found.outcome, found.step, found.lost_steps, found.attempts) == ("in place", 14, 4, 0)
    assert found.recovery_s == 2 + 5 + 5  # two steps, the pause, and five steps up to number 15
    assert found.survived


def test_ranks_that_only_repeat_steps_have_not_recovered(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_resume_by_hand", lambda *args: False)
    story.event("restarted", attempt=0, generation=1, step=12)  # of an earlier fault
    story.steps(0, 11, 13)

    def act() -> bool:
        story.event("restarted", attempt=0, generation=2, step=13)
        story.event("resumed", attempt=0, step=10)
        story.steps(0, 11, 13)
        return True

    found = story.strike(monkeypatch, act)
    assert found is not None
    assert found.outcome == "lost"


@pytest.mark.parametrize(("in_place", "most"), [(False, 0), (True, 100000)])
def test_ranks_begin_again_only_where_that_was_asked_for(in_place: bool, most: int) -> None:
    assert f"policy.max_restarts_in_place={most}" in Shape(in_place=in_place).overrides()
