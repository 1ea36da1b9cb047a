"""The card of a run in a notebook: what it shows, and that nothing of the run is markup."""

from __future__ import annotations

import builtins
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmddp.control.json_encoding import from_json, to_json
from slurmddp.errors import RunNotFoundError
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.card import RunCard, card_html, error_html, read_card
from slurmddp.runs.status.run_status import RunStatus, status
from support.runs.run_events import add, ended, make_folder, started, write

CONFIG = "name: gpt\nnodes: 1\nranks_per_node: 2\ntrain: {steps: 100}\n"
HOSTILE = "</pre><script>alert(1)</script><b>"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of a run that has logged steps 10 to 50, one in each second."""
    folder = make_folder(tmp_path, CONFIG)
    write(folder, started(100.0, pid=os.getpid(), host="c07"))
    add(folder, "first_step", 101.0, attempt=0, step=1)
    for step in range(10, 51, 10):
        line = {"step": step, "attempt": 0, "time": 100.0 + step / 10, "loss": 3.0 - step / 50}
        append_line(folder.metrics_file, line)
    append_line(folder.metrics_file, {"step": 50, "attempt": 0, "time": 105.0, "eval_loss": 2.5})
    return folder


def running(folder: RunFolder) -> RunStatus:
    return replace(status(folder, None), state="running", active=True)


def test_a_running_run_shows_its_loss_and_the_time_left(folder: RunFolder) -> None:
    card = read_card(folder, running(folder))
    assert (card.train.steps, card.held_out.values) == ((10, 20, 30, 40, 50), (2.5,))
    html = card_html(card)
    assert "<svg" in html and "var(--train)" in html and "var(--held)" in html
    assert "<dt>step</dt><dd>50 of 100</dd>" in html
    assert "<dt>time left</dt><dd>5s</dd>" in html
    assert "<code>slurmddp logs -f gpt-0a1b2c3d</code>" in html
    assert "time left" not in card_html(read_card(folder, replace(running(folder), state="stopped")))


def test_a_failed_run_shows_rank_host_and_last_line_and_no_markup_of_the_run(folder: RunFolder) -> None:
    write(folder, ended(110.0, "failed"))
    folder.log_dir(0).mkdir(parents=True)
    facts = {"rank": 3, "host": HOSTILE, "exit_code": 1, "reason": HOSTILE, "last_lines": [HOSTILE, "boom"]}
    folder.failure_file(0).write_text(json.dumps(facts))
    hostile = replace(status(folder, None), name=HOSTILE, metrics={HOSTILE: 1.0}, rate=1.0, rate_unit=HOSTILE)
    html = card_html(read_card(folder, replace(hostile, report=Path(f"/{HOSTILE}"))))
    assert "Rank 3 on &lt;/pre&gt;" in html and "boom</pre>" in html
    assert "<code>slurmddp resume" in html
    assert "<script" not in html and "<b>" not in html


def test_both_themes_have_the_colours_of_the_pages(folder: RunFolder) -> None:
    html = card_html(read_card(folder, running(folder)))
    for theme in ("prefers-color-scheme: dark", '[data-jp-theme-light="false"]', ".vscode-dark"):
        assert "--card: #191c20" in html.partition(theme)[2]
    assert "--card: #ffffff" in html.partition('[data-jp-theme-light="true"]')[2]
    assert "@import" not in html and "src=" not in html


def test_a_report_below_the_folder_of_the_notebook_gets_a_relative_link(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = replace(read_card(folder, status(folder, None)), seconds_left=None)
    shown = replace(shown, status=replace(shown.status, report=folder.report_file))
    monkeypatch.chdir(tmp_path)
    assert 'href="gpt-0a1b2c3d/report.html"' in card_html(shown)
    monkeypatch.chdir("/")
    elsewhere = replace(shown, status=replace(shown.status, report=Path("login1:/r/report.html")))
    assert "href" not in card_html(elsewhere).replace("xlink:href", "") and "login1:/r" in card_html(
        elsewhere
    )


def test_without_matplotlib_the_card_has_no_curve(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    html = card_html(read_card(folder, running(folder)))
    assert "<svg" not in html and "50 of 100" in html


def test_a_card_travels_as_json_and_an_error_is_escaped(folder: RunFolder) -> None:
    card = read_card(folder, running(folder))
    assert from_json(RunCard, json.loads(json.dumps(to_json(card)))) == card
    assert "<script" not in error_html(RunNotFoundError(HOSTILE, hint="`slurmddp list`"))


def test_a_long_run_gives_few_points(folder: RunFolder) -> None:
    lines = [json.dumps({"step": step, "time": 1.0, "loss": 1.0}) for step in range(5000)]
    folder.metrics_file.write_text("\n".join(lines) + "\n")
    assert len(read_card(folder, running(folder)).train) <= 800
