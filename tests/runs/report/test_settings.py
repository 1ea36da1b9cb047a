"""Settings of runs, and those in which runs differ."""

from __future__ import annotations

from slurmddp.runs.report.settings import settings_that_differ


def test_a_missing_setting_is_none_and_order_is_kept():
    assert settings_that_differ({"b": 1, "a": 2, "c": 3}, {"a": 1, "d": None, "c": 3}) == {
        "b": (1, None),
        "a": (2, 1),
    }


def test_several_runs_are_compared_at_once():
    runs = [{"lr": 0.1, "seed": 1, "steps": 4}, {"lr": 0.1, "seed": 1, "steps": 4}, {"lr": 0.1, "seed": 2}]
    assert settings_that_differ(*runs) == {"seed": (1, 1, 2), "steps": (4, 4, None)}
    assert settings_that_differ() == settings_that_differ(runs[0]) == {}
