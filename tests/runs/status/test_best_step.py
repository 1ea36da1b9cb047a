"""The best step of a run, by its records."""

from __future__ import annotations

import pytest

from slurmddp.errors import ConfigError
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.best_step import BestStep, best_step
from slurmddp.settings.spec import parse_best


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ("eval_loss", BestStep(20, "eval_loss", 1.0)),
        ("max accuracy", BestStep(30, "accuracy", 0.5)),
        ("min accuracy", BestStep(20, "accuracy", 0.25)),
        ("max f1", None),
        ("null", None),
    ],
)
def test_only_evaluated_and_saved_steps_count(tmp_path, best, expected):
    """Step 40 is the best but was not saved. Of equal values the newest counts."""
    folder = RunFolder(tmp_path)
    folder.config_file.write_text(f"train:\n  best: {best}\n")
    for step, loss, accuracy in ((10, 3.0, 0.5), (20, 1.0, 0.25), (30, float("nan"), 0.5), (40, 0.5, 0.75)):
        append_line(folder.metrics_file, {"step": step, "eval_loss": loss, "accuracy": accuracy})
    for step in (10, 20, 30, 35):
        folder.add_event("saved", attempt=0, step=step)
    assert best_step(folder) == expected


@pytest.mark.parametrize(
    ("text", "parsed"), [("eval_loss", ("eval_loss", "min")), (" max  f1 ", ("f1", "max"))]
)
def test_the_direction_of_a_metric_is_said(text, parsed):
    assert parse_best(text) == parsed


@pytest.mark.parametrize("text", ["accuracy", "best f1", "max f1 now", ""])
def test_a_metric_without_a_direction_is_refused(text):
    with pytest.raises(ConfigError, match="can't be chosen by"):
        parse_best(text)
