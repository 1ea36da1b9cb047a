"""The settings of runs, and the settings in which runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.report.differing_settings import settings_of, settings_that_differ
from slurmddp.settings.spec import FUNCTION_CALL
from support.runs.run_events import make_folder


def test_a_missing_setting_is_none_and_order_is_kept():
    assert settings_that_differ({"b": 1, "a": 2, "c": 3}, {"a": 1, "d": None, "c": 3}) == {
        "b": (1, None),
        "a": (2, 1),
    }


def test_several_runs_are_compared_at_once():
    runs = [{"lr": 0.1, "seed": 1, "steps": 4}, {"lr": 0.1, "seed": 1, "steps": 4}, {"lr": 0.1, "seed": 2}]
    assert settings_that_differ(*runs) == {"seed": (1, 1, 2), "steps": (4, 4, None)}
    assert settings_that_differ() == settings_that_differ(runs[0]) == {}


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ('["{run_dir}", math.pow, "[2.0, true]"]', {"program.call": "math.pow(2.0, True)"}),
        ('["{run_dir}", math.pow]', {"program.args": ["{run_dir}", "math.pow"]}),
        ('["{run_dir}", math.pow, "5"]', {"program.args": ["{run_dir}", "math.pow", "5"]}),
    ],
)
def test_the_run_of_a_function_has_its_call_as_a_setting(
    tmp_path: Path, arguments: str, settings: dict[str, Any]
) -> None:
    program = f"program:\n  script: {FUNCTION_CALL}\n  args: {arguments}\n  torchrun: 1\n"
    folder = make_folder(tmp_path, program)
    shown = settings_of(folder)
    assert {key: shown[key] for key in settings} == settings
    assert ("program.args" in shown) is ("program.call" not in shown)
