"""The report of a sweep: a table and parallel coordinates of its runs."""

from __future__ import annotations

import re

import pytest

from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.sweep import write_sweep_report
from slurmddp.runs.status.run_status import statuses

CONFIG = """\
name: gpt
nodes: 1
ranks_per_node: 2
gpus_per_node: {gpus}
train: {{steps: 40, best: {best}}}
optimizer: {{lr: {lr}}}
model: {{width: 8}}
cluster: {{env: {{TOKEN: "secret-{lr}"}}}}
"""


@pytest.fixture
def make(tmp_path):
    def make(name, lr, *, best="null", gpus=0, outcome="finished", **logged):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.log_dir(0).mkdir(parents=True)
        folder.config_file.write_text(CONFIG.format(lr=lr, best=best, gpus=gpus))
        if outcome is None:
            return folder
        start = {"attempt": 0, "job_id": "7"}
        append_line(folder.attempts_file, {"event": "started", "time": 1000.0, "launcher": "slurm", **start})
        for name_, values in logged.items():
            for step, value in enumerate(values, 1):
                record = {"step": 10 * step, "attempt": 0, "time": 1000.0 + step, name_: value}
                append_line(folder.metrics_file, record)
        ended = {"exit_code": 0, "outcome": outcome, "next": "none", **start}
        append_line(folder.attempts_file, {"event": "ended", "time": 4600.0, **ended})
        return folder

    return make


def page_of(tmp_path, folders, **facts):
    for folder in folders:
        folder.report_file.write_text("its report")
    file = tmp_path / "runs" / "gpt-sweep-1.html"
    return write_sweep_report(file, "gpt-sweep-1", statuses(folders, None), **facts).read_text()


def rows_of(page):
    """Return the cells of each run by column."""
    rows = re.findall(r"<tr[^>]*>\s*(<td.*?)</tr>", page, flags=re.DOTALL)
    cells = [re.findall(r'<td data-label="([^"]*)"[^>]*>(.*?)</td>', row) for row in rows]
    return [{label: re.sub(r"<[^>]*>", " ", text).split() for label, text in row} for row in cells]


def test_runs_are_compared_the_best_first(tmp_path, make):
    folders = [
        make("gpt-1", 0.1, gpus=2, loss=[3.0, 2.0], eval_loss=[2.5, 2.75]),
        make("gpt-2", 0.01, gpus=2, loss=[3.0, 1.0], eval_loss=[1.5, 1.75], outcome="failed"),
        make("gpt 3", 0.001, gpus=2, outcome=None),
    ]
    page = page_of(tmp_path, folders, missing=2)
    rows = rows_of(page)
    assert [row["Run"] for row in rows] == [["gpt-2", "best"], ["gpt-1"], ["gpt", "3"]]
    assert rows[0] == {
        "Run": ["gpt-2", "best"],
        "State": ["failed"],
        "lr": ["0.01"],
        "steps": ["20"],
        "best held-out loss": ["1.5000"],
        "training loss": ["1.0000"],
        "held-out loss": ["1.7500"],
        "GPU-hours": ["2.00"],
    }
    assert (rows[2]["State"], rows[2]["best held-out loss"]) == (["preparing"], ["-"])
    assert 'href="gpt-2/report.html"' in page and 'href="gpt%203/report.html"' in page
    assert "4.00 GPU-hours; 2 of 5 points have no run folder" in page
    assert "Left out, without a result: 1 run." in page
    assert "secret" not in page


@pytest.mark.parametrize(
    ("best", "logged", "label", "order"),
    [
        ("null", {"loss": [[3.0, 1.0], [2.0, 2.0]]}, "lowest training loss", "ab"),
        ("max accuracy", {"accuracy": [[0.5, 0.75], [0.9, 0.1]]}, "best accuracy", "ba"),
        ("min error", {"error": [[0.5, 0.75], [0.9, 0.1]]}, "best error", "ba"),
        ("null", {"score": [[1.0, 2.0], [1.0, 3.0]]}, "last score", "ab"),
        ("null", {"loss": [[float("nan")], [2.0]]}, "lowest training loss", "ba"),
    ],
)
def test_the_metric_of_the_comparison(tmp_path, make, best, logged, label, order):
    (name, values), = logged.items()  # fmt: skip
    folders = [make(run, lr, best=best, **{name: values[lr - 1]}) for run, lr in (("a", 1), ("b", 2))]
    rows = rows_of(page_of(tmp_path, folders))
    assert label in rows[0]
    assert "".join(row["Run"][0] for row in rows) == order
    assert (rows[0]["Run"][-1] == "best") == label.startswith(("best", "lowest"))


def test_one_page_needs_nothing_else_and_draws_both_pictures(tmp_path, make):
    folders = [make(f"gpt-{number}", number, loss=[3.0 / number]) for number in (1, 2, 3)]
    page = page_of(tmp_path, folders)
    assert page.count("<svg") == 2
    assert not re.search(r'src=|url\(http|href="http|@import', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert "#fefefe" not in page and "var(--held)" in page and "var(--card)" in page
    assert "the orange line has the best value, the minimum" in page
    alone = page_of(tmp_path, folders[:1])
    assert "<svg" not in alone and len(rows_of(alone)) == 1
    assert "No run of this sweep has a folder yet." in page_of(tmp_path, [])
