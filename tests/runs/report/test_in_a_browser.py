"""The reports in headless Chromium, on a screen and on a phone: nothing is blank or cut off."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slurmddp.bench.page import write_bench_page
from slurmddp.runs.failures.kinds import PHRASES
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report.html import write_report
from slurmddp.runs.report.sweep import write_sweep_report
from slurmddp.runs.status.run_status import status, statuses
from support.runs.bench_results import bench_result
from support.runs.run_events import add, saved, started, submitted, write

pytestmark = pytest.mark.browser

WIDTHS = {"screen": 1280, "phone": 390}
"""Pixels."""
HEIGHT = 3600
"""Height of the picture in pixels, larger than any page of the test on a phone."""
LONG = "a_word_without_a_space_" * 9

FRAMES = Path(__file__).with_name("frames.html")
"""A page that shows pages side by side, measures them, and writes the results into itself."""


def make(folder: RunFolder, config: str, *typed: str) -> RunFolder:
    folder.log_dir(0).mkdir(parents=True)
    folder.config_file.write_text(config)
    folder.overrides_file.write_text("".join(f"{word}\n" for word in typed))
    return folder


def log(folder: RunFolder, attempt: int, steps: range, start: float = 3.5) -> None:
    for step in steps:
        loss = 1.2 + start * math.exp(-step / 90)
        values = {
            "loss": loss,
            "tokens_per_s": 51_234.0,
            "lr": 3e-4 * min(1, step / 50),
            "grad_norm": 2 / loss,
        }
        values |= {"eval_loss": loss + 0.1} if step % 50 == 0 else {}
        append_line(folder.metrics_file, {"step": step, "attempt": attempt, "time": 1100.0 + step, **values})


def failed_run(runs: Path) -> RunFolder:
    """Return a run with everything that a report can show."""
    name = f"gpt-{LONG}0a1b2c3d"
    config = (
        "name: gpt\nnodes: 2\nranks_per_node: 4\ngpus_per_node: 4\ntrain: {steps: 400, best: eval_loss}\n"
    )
    folder = make(RunFolder(runs / name), config, "+cluster=a100x8", "nodes=2", f"name={LONG}")
    write(folder, submitted(1000.0), started(1050.0, nodes="node[1-2]"))
    add(folder, "first_step", 1100.0, attempt=0, step=1)
    log(folder, 0, range(10, 221, 10))
    write(folder, saved(1300.0, 200))
    add(folder, "ended", 1330.0, attempt=0, job_id="7", outcome="stopped", next="requeue", exit_code=75)
    folder.log_dir(1).mkdir()
    write(folder, started(1500.0, 1, nodes=f"{LONG}[1-2]"))
    add(folder, "resumed", 1510.0, attempt=1, step=200)
    add(folder, "first_step", 1520.0, attempt=1, step=201)
    log(folder, 1, range(210, 301, 10))
    lost = {"restart_count": 0, "rank": 1, "host": "node1", "signal": "SIGKILL", "reason": PHRASES["killed"]}
    (folder.log_dir(1) / "failure-g0.json").write_text(json.dumps(lost | {"time": 1530.0}))
    add(folder, "restarted", 1530.5, attempt=1, restart_count=1, step=210)
    add(folder, "memory", 1540.0, attempt=1, device="cuda", step=220, peak_bytes=[70 << 30] * 8)
    add(folder, "warned", 1541.0, attempt=1, about="spike", text=f"The loss of step 212 is high: {LONG}.")
    lines = [
        f'  File "/home/me/{LONG}/train.py", line 12, in step',
        "RuntimeError: CUDA error: out of memory",
    ]
    (folder.log_dir(1) / "failure.json").write_text(
        json.dumps({"rank": 3, "host": "node2", "exit_code": 1, "last_lines": lines, "time": 1600.0})
    )
    add(folder, "ended", 1601.0, attempt=1, job_id="7", outcome="failed", next="none", exit_code=1)
    folder.sample_file.write_text(f"def main():\n    {LONG * 3}\n")
    folder.code_note_file.write_text(f"Snapshot of 3 files of /home/me/{LONG}: commit 0a1b.\n")
    return folder


def script_run(runs: Path) -> RunFolder:
    config = "name: fit\nnodes: 2\nranks_per_node: 4\nprogram: {script: train.py, args: [--lr, 1e-3]}\n"
    folder = make(RunFolder(runs / "fit-0a1b2c3d"), config, 'program.script="train.py"', "nodes=2")
    write(folder, submitted(1000.0), started(1100.0, nodes="node[1-2]"))
    add(folder, "ended", 2900.0, attempt=0, job_id="7", outcome="finished", next="none", exit_code=0)
    folder.rank_log(0, 0).write_text("".join(f"epoch {number} {LONG}\n" for number in range(30)))
    return folder


def sweep_runs(runs: Path) -> list[RunFolder]:
    folders = []
    for number in range(4):
        config = (
            f"name: gpt\nnodes: 1\nranks_per_node: 2\nseed: {number}\ntrain: {{steps: 99, best: eval_loss}}\n"
            f"optimizer: {{lr: {10 ** -(1 + number % 3)}, weight_decay: {number / 10}}}\n"
            f"model: {{width: {64 << number % 2}, activation: {['gelu', LONG[:50]][number % 2]}}}\n"
        )
        folder = make(RunFolder(runs / f"gpt-{number:08x}"), config)
        folders.append(folder)
        if number < 3:
            write(folder, submitted(1000.0), started(1050.0))
            add(folder, "first_step", 1100.0, attempt=0, step=1)
            log(folder, 0, range(10, 101, 10), start=1.0 + number)
            outcome = ("finished", "failed")[number == 2]
            add(
                folder,
                "ended",
                1600.0,
                attempt=0,
                job_id="7",
                outcome=outcome,
                next="none",
                exit_code=int(number == 2),
            )
    return folders


def reports(runs: Path) -> dict[str, Path]:
    """Write the reports of a run, of a script's run and of a sweep, and the pages of two benchmarks."""
    run, script, points = failed_run(runs), script_run(runs), sweep_runs(runs)
    for folder in points:
        folder.report_file.touch()  # The page of the sweep links to it.
    benches = {name: runs / f"{name}.html" for name in ("collectives", "strategies")}
    for name, page in benches.items():
        write_bench_page(bench_result(name), page)
    return {
        **benches,
        "run": write_report(run, status(run, None)),
        "script": write_report(script, status(script, None)),
        "sweep": write_sweep_report(
            runs / "gpt-sweep-1.html", "gpt-sweep-1", statuses(points, None), missing=2
        ),
    }


def shown(
    pages: Sequence[tuple[str, str, int]], folder: Path
) -> tuple[dict[str, Any], list[str], np.ndarray]:
    """Open pages side by side in one window, as (name, address, width in pixels).

    Returns:
        Measures of each page, the messages of the browser's console, and the picture.
    """
    page, picture = folder / "frames.html", folder / "picture.png"
    page.write_text(FRAMES.read_text().replace("PAGES", json.dumps(pages)))
    width = sum(width for _, _, width in pages)
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        # Without this flag a page may not measure another page.
        "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=30000", f"--window-size={width},{HEIGHT}",
        f"--screenshot={picture}", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(["chromium", *options, page.as_uri()], capture_output=True, text=True, check=True)
    measures = re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert measures, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    with Image.open(picture) as image:
        assert (image.format, image.size) == ("PNG", (width, HEIGHT))
        return json.loads(html.unescape(measures[1])), console, np.asarray(image.convert("RGB"))


def test_each_report_fits_a_screen_and_a_phone(tmp_path: Path) -> None:
    pages = [
        (f"{name} on a {device}", page.as_uri(), width)
        for name, page in reports(tmp_path / "runs").items()
        for device, width in WIDTHS.items()
    ]
    sizes, console, picture = shown(pages, tmp_path)
    assert console == []
    for name, _, width in pages:
        measured = sizes[name]
        assert measured["width"] == width, name
        assert measured["tables"] == measured["cut"] == measured["low"] == [], name
        area = picture[: measured["height"], measured["left"] : measured["left"] + width]
        drawn = (area != area[:, :1]).any(axis=(1, 2))
        colours = np.unique(area @ [1, 1 << 8, 1 << 16])
        assert drawn.mean() > 0.8 and len(colours) > 100, name
