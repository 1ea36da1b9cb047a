"""The newest values of a run, read from the end of its metrics."""

from __future__ import annotations

import json

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status import metrics


def test_a_value_that_is_never_logged_costs_no_look_at_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_BLOCK", 1000)
    monkeypatch.setattr(metrics, "_LATEST_BYTES", 10_000)
    parsed = []
    really = metrics._parse
    monkeypatch.setattr(metrics, "_parse", lambda line: parsed.append(line) or really(line))
    folder = RunFolder(tmp_path)
    lines = [json.dumps({"step": step, "loss": step / 2, "attempt": 0, "time": 1.0}) for step in range(5000)]
    folder.metrics_file.write_text("\n".join(lines) + "\n")
    newest = metrics.latest(folder)
    assert (newest.step, newest.loss, newest.held_out) == (4999, 2499.5, None)
    assert sum(map(len, parsed)) <= 11_000
