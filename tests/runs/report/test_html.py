"""The report page and its parts."""

from __future__ import annotations

import json
import os
import re
import sys
from html.parser import HTMLParser

import pytest

from slurmddp.errors import SlurmddpError
from slurmddp.pages.page import coded
from slurmddp.runs.failures.kinds import PHRASES
from slurmddp.runs.folder import owner
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report import curves
from slurmddp.runs.report.html import _per_row, with_report, write_report
from slurmddp.runs.status import metrics
from slurmddp.runs.status.metrics import Curve
from slurmddp.runs.status.run_status import status
from support.runs.run_events import add as event
from support.runs.run_events import make_folder, saved, started, write
from support.slurm.slurm_in_memory import FakeSlurm

CONFIG = "name: gpt\nnodes: 2\nranks_per_node: 2\ntrain:\n  steps: 40\n"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path, CONFIG)


def log(folder, step, attempt=0, time=1.0, **values):
    append_line(folder.metrics_file, {"step": step, "attempt": attempt, "time": time, **values})


def train(folder, attempt, first, last, loss=2.0):
    for step in range(first, last + 1, 10):
        log(folder, step, attempt, 100.0 + step, loss=loss, tokens_per_s=50.0)


def end(folder, time, attempt=0, outcome="finished", next_="none", code=0):
    facts = {"job_id": "7", "exit_code": code, "outcome": outcome, "next": next_}
    event(folder, "ended", time, attempt=attempt, **facts)


def two_attempts(folder):
    write(folder, started(100.0, nodes="node[1-2]"))
    event(folder, "first_step", 101.0, attempt=0, step=0)
    train(folder, 0, 10, 30)
    write(folder, saved(121.0, 20, seconds=0.0))
    end(folder, 160.0, outcome="stopped", next_="requeue", code=75)
    write(folder, started(300.0, 1, nodes="node[1-2]"))
    event(folder, "resumed", 301.0, attempt=1, step=20)
    event(folder, "first_step", 303.0, attempt=1, step=21)
    log(folder, 20, 1, 302.0, eval_loss=3.5)
    train(folder, 1, 30, 40, loss=1.5)
    log(folder, 40, 1, 330.0, eval_loss=1.75)


def fail(folder, attempt, name="failure.json", **left):
    folder.log_dir(attempt).mkdir(parents=True, exist_ok=True)
    (folder.log_dir(attempt) / name).write_text(json.dumps({"rank": 3, "host": "node4"} | left))


class Page(HTMLParser):
    """A parser that collects text and checks that every element is closed in its place."""

    VOID = {"meta", "br", "link", "img"}  # noqa: RUF012

    def __init__(self, html):
        super().__init__()
        self.open, self.texts, self.links, self.tags = [], [], [], set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script") and "svg" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def html_of(folder):
    return write_report(folder, status(folder, None)).read_text()


def page_of(folder):
    return Page(html_of(folder))


def test_a_finished_run(folder):
    folder.config_file.write_text(f"{CONFIG}  best: eval_loss\n")
    two_attempts(folder)
    end(folder, 360.0, 1)
    folder.overrides_file.write_text("+cluster=a100x8\n'name=it is'\n")
    folder.sample_file.write_text("def main():\n    pass\n")
    text = page_of(folder).text
    for part in (
        "finished",
        "40",
        "of 40",
        "1.5000",
        "1.7500",
        "from 3.5000",
        "Best eval_loss 3.5000 step 20",
        "tokens/s",
        "Goodput 30 % of 4m 20s",
        "node[1-2]",
        "0 to 30",
        "20 to 40",
        "stopped at a checkpoint",
        "def main():",
        "slurmddp train +cluster=a100x8 'name=it is'",
        "ranks_per_node: 2",
    ):
        assert part in text, part
    assert folder.figure_file.read_bytes().startswith(b"\x89PNG")


def bars_of(html):
    """Return the label of each bar, and the width of each kind of time in it, in thousandths."""
    bars = re.findall(r'<div class="bar" role="img" aria-label="([^"]*)"[^>]*>(.*?)</div>', html)
    slices = [re.findall(r'<i class="(\w+)"[^>]*flex-grow: ([^"]*)"', inner) for _, inner in bars]
    widths = [{word: round(float(grow)) for word, grow in pairs} for pairs in slices]
    return list(zip([label for label, _ in bars], widths, strict=True))


def test_what_the_time_went_into(folder):
    two_attempts(folder)
    end(folder, 360.0, 1)
    html = html_of(folder)
    whole, first, second = bars_of(html)
    assert whole[0] == (
        "All of the time, 4m 20s: queued 2m 20s (54 %), starting 4s (2 %), training 1m 17s (30 %), "
        "lost 39s (15 %)"
    )
    assert list(whole[1].items()) == [("queued", 538), ("starting", 15), ("training", 296), ("lost", 150)]
    assert first[0].startswith("Attempt 0, 1m 00s: ")
    assert second[0].startswith("Attempt 1, 3m 20s: queued 2m 20s (70 %)")
    assert re.findall(r'class="bar"[^>]*style="width: max\(\d+px, ([\d.]+)%\)', html) == ["100", "30", "100"]
    assert "Lost 15 % 39s in steps that no checkpoint holds" in Page(html).text


def test_a_run_of_one_attempt_has_one_bar(folder):
    write(folder, started(100.0))
    event(folder, "first_step", 105.0, attempt=0, step=1)
    end(folder, 160.0)
    html = html_of(folder)
    assert len(bars_of(html)) == 1
    assert "Goodput 92 % of 1m 00s" in Page(html).text
    assert "Ranks 4 on 2 nodes, 0.07 rank-hours" in Page(html).text


def test_the_page_of_a_script_shows_its_command_and_output_and_no_empty_card(folder):
    folder.config_file.write_text(
        CONFIG + "gpus_per_node: 4\nprogram: {script: train.py, args: [--lr, 1e-3]}\n"
    )
    folder.overrides_file.write_text(
        'nodes=2\n\'program.script="train.py"\'\n\'program.args=["--lr","1e-3"]\'\n'
    )
    (folder.path / "code.txt").write_text("Snapshot of 3 files of /p: commit 0a1b.\n")
    write(folder, started(100.0))
    end(folder, 1900.0)
    folder.log_dir(0).mkdir(parents=True)
    folder.rank_log(0, 0).write_text("".join(f"epoch {label}\n" for label in range(30)))
    text = page_of(folder).text
    assert "its program ended with exit code 0" in text
    assert "Time 30m 00s share of training unknown Ranks 4 on 2 nodes, 4.00 GPU-hours" in text
    assert "Last output of rank 0 epoch 10 epoch 11" in text
    assert "slurmddp run nodes=2 train.py --lr 1e-3 Snapshot of 3 files of /p: commit 0a1b." in text
    assert not [label for label in ("loss", "Steps -", "Speed", "Where the time went") if label in text]


def test_the_page_of_a_controller_shows_its_command(folder):
    program = "program: {script: -m slurmddp.remote.job, args: [control.py]}\n"
    folder.config_file.write_text(CONFIG + program)
    folder.overrides_file.write_text(
        "nodes=2\n'program.script=\"-m slurmddp.remote.job\"'\n'program.args=[\"control.py\"]'\n"
    )
    assert "slurmddp controller nodes=2 control.py" in page_of(folder).text


def test_the_page_needs_nothing_from_outside_and_every_reference_is_met(folder):
    two_attempts(folder)
    html = html_of(folder)
    page = Page(html)
    assert all(link.startswith("#") for link in page.links)
    assert page.links, "the curve links to its markers"
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"url\((?!#)|@import", html)
    assert "svg" in page.tags
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', html)
    assert {first or other for first, other in used} <= set(ids)


HOSTILE = "</pre><script>alert(1)</script><b>\"&amp;'$x$ {{ 7 * 7 }}"


def test_everything_is_escaped(tmp_path):
    run = RunFolder(tmp_path / "a<b>&'$x$-00000000")
    run.path.mkdir()
    run.config_file.write_text(f"{CONFIG}# {HOSTILE}\n")
    two_attempts(run)
    run.sample_file.write_text(HOSTILE)
    run.overrides_file.write_text(HOSTILE)
    fail(run, 1, host=HOSTILE, exit_code=1, last_lines=[HOSTILE])
    html = html_of(run)
    page = Page(html)
    assert not page.tags & {"script", "b"}
    assert page.text.count("{{ 7 * 7 }}") >= 4
    assert "<script>alert(1)</script>" in page.text


def test_a_failed_run_shows_rank_host_and_the_end_of_its_last_lines(folder):
    two_attempts(folder)
    fail(folder, 1, signal="SIGKILL", last_lines=["File a.py", "boom"])
    end(folder, 360.0, 1, outcome="failed", code=137)
    html = html_of(folder)
    text = Page(html).text
    assert "What failed" in text
    assert "Rank 3 on node4 was killed by SIGKILL" in text
    style = re.search(r"pre\.end {([^}]*)}", html)
    assert style is not None and "column-reverse" in style[1], "the box shows the end of its text"
    assert re.search(r'<pre class="end"[^>]*><span>File a.py\nboom</span></pre>', html)


def test_a_failure_that_only_slurm_knows_is_on_the_page(folder):
    two_attempts(folder)
    slurm = FakeSlurm()
    slurm.set_state("7", "TIMEOUT")
    with_page = with_report(folder, status(folder, slurm))
    text = Page(with_page.report.read_text()).text
    assert "failed job 7: it was killed at its time limit" in text
    assert "running" not in text


def test_failures_before_restarts_in_place_are_listed_with_advice_whose_commands_are_code(folder):
    two_attempts(folder)
    assert "Restarted in place" not in page_of(folder).text
    for count, reason in enumerate((PHRASES["killed"], "")):
        left = {"rank": count, "signal": "SIGKILL", "reason": reason, "time": 340.0}
        fail(folder, 1, f"failure-g{count}.json", restart_count=count, **left)
        step = 40 if count else -1
        event(folder, "restarted", 340.5 + count, attempt=1, restart_count=count + 1, step=step)
    html = html_of(folder)
    text = Page(html).text
    assert "Restarted in place" in text
    assert f"Rank 0 on node4 was killed by SIGKILL: {PHRASES['killed']}. " in text
    assert "<code>sacct</code>" in html and "`sacct`" not in html
    assert coded("a `<b>` & c") == "a <code>&lt;b&gt;</code> &amp; c"
    assert "attempt 1, after step 40 Rank 1 on node4 was killed by SIGKILL" in text


def test_an_attempt_that_was_stopped_without_a_checkpoint_does_not_claim_one(folder):
    for attempt, reason in enumerate((f"the file {folder.stop_file}", "SIGUSR2")):
        write(folder, started(100.0, attempt), *([saved(140.0, 30, attempt)] * attempt))
        event(folder, "signalled", 150.0, attempt=attempt, signal=reason)
        end(folder, 151.0, attempt, outcome="stopped", code=75)
    assert re.findall(r'data-label="Outcome" class="prose wait"><span>([^<]*)<', html_of(folder)) == [
        "stopped (on request)",
        "stopped at a checkpoint (time limit)",
    ]


def test_only_an_attempt_that_resumed_from_a_checkpoint_is_marked_in_the_chart(folder):
    for attempt in (0, 1):
        write(folder, started(100.0, attempt))
        event(folder, "first_step", 110.0, attempt=attempt, step=1)
        train(folder, attempt, 20, 40)
        end(folder, 151.0, attempt, outcome="stopped", code=75)
    assert "dashed line" not in html_of(folder)
    write(folder, started(152.0, 2))
    event(folder, "resumed", 153.0, attempt=2, step=30)
    page = html_of(folder)
    assert "dashed line" in page
    assert "attempt 2" in page and "attempt 1<" not in page


@pytest.mark.parametrize("first_resumed", [True, False])
def test_an_attempt_starts_at_the_step_of_its_first_ranks(folder, first_resumed):
    two_attempts(folder)
    if not first_resumed:
        lines = folder.attempts_file.read_text().splitlines(keepends=True)
        folder.attempts_file.write_text("".join(line for line in lines if '"resumed"' not in line))
    event(folder, "restarted", 331.0, attempt=1, restart_count=1, step=40)
    event(folder, "resumed", 332.0, attempt=1, step=30)
    event(folder, "first_step", 333.0, attempt=1, step=31)
    assert f"{20 if first_resumed else 0} to 40" in page_of(folder).text


def test_a_run_without_metrics_has_a_page_too(folder):
    text = page_of(folder).text
    assert "preparing" in text
    assert "No step has been logged yet" in text
    assert "No attempt has started yet" in text
    assert not folder.figure_file.exists()


def test_a_status_draws_the_report_of_a_run_that_has_ended_since(folder):
    two_attempts(folder)
    assert with_report(folder, status(folder, None)).report is None, "the run still runs"
    end(folder, 360.0, 1)
    assert with_report(folder, status(folder, None)).report == folder.report_file
    drawn = folder.report_file.stat().st_mtime_ns
    assert with_report(folder, status(folder, None)).report == folder.report_file
    assert folder.report_file.stat().st_mtime_ns == drawn, "a report is written once"
    os.utime(folder.metrics_file, ns=(drawn + 1, drawn + 1))
    with_report(folder, status(folder, None))
    assert folder.report_file.stat().st_mtime_ns != drawn
    left = {path.name for path in folder.path.iterdir()}
    assert left == {"config.yaml", "attempts.jsonl", "metrics.jsonl", "report.html", "report.png"}


@pytest.mark.parametrize("why", ["no matplotlib", "another measure's"])
def test_a_report_that_can_not_be_drawn_hides_no_status(folder, monkeypatch, why):
    two_attempts(folder)
    end(folder, 360.0, 1)
    if why == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SlurmddpError, match="needs matplotlib") as refused:
            html_of(folder)
        assert "slurmddp[report]" in refused.value.hint
    else:
        monkeypatch.setattr(owner.os, "geteuid", lambda: os.getuid() + 1)
    without_page = with_report(folder, status(folder, None))
    assert (without_page.state, without_page.report) == ("finished", None)
    assert not folder.report_file.exists()


def test_losses_that_are_no_numbers_are_left_out_of_the_picture(folder):
    log(folder, 1, loss=float("nan"))
    assert "nothing to draw" in page_of(folder).text
    two_attempts(folder)
    log(folder, 42, 1, 332.0, loss=float("inf"))
    page = page_of(folder)
    assert "inf" in page.text
    assert "svg" in page.tags


def test_the_mark_of_the_first_held_out_loss_is_whole_and_the_speed_is_of_the_whole_run(folder):
    train(folder, 0, 10, 20)
    log(folder, 30, loss=2.0)
    for step in (0, 40):
        log(folder, step, eval_loss=3.0 - step / 40)
    html = html_of(folder)
    marks = re.findall(r"<g([^>]*)>\s*<use [^>]*var\(--held\)", html)
    assert marks
    assert not [mark for mark in marks if "clip-path" in mark]
    assert 'Speed</dt><dd><span class="value">50</span><span class="note">tokens/s, median</span>' in html


def test_steps_that_ran_twice_count_once_in_any_order_of_lines(folder):
    two_attempts(folder)
    train(folder, 0, 40, 40, loss=9.0)
    curve = metrics.read(folder).train
    assert curve.steps == (10, 20, 30, 40)
    assert curve.values == (2.0, 2.0, 1.5, 1.5)


def test_damaged_lines_are_skipped(folder):
    train(folder, 0, 10, 20)
    with folder.metrics_file.open("a") as stream:
        stream.write(
            '{"step": 30, "lo\n[]\n3\n{"loss": 1}\n{"step": "x"}\n{"step": 30, "attempt": 0, "loss": 1.25}'
        )
    assert metrics.read(folder).train.steps == (10, 20)
    assert metrics.latest(folder).loss == 1.25


def test_the_newest_values_come_from_the_end_of_a_long_file(folder):
    log(folder, 5, eval_loss=7.0)
    for step in range(3000):
        log(folder, step, loss=float(step), samples_per_s=3.0)
    latest = metrics.latest(folder)
    assert (latest.step, latest.loss, latest.held_out) == (2999, 2999.0, 7.0)
    assert (latest.rate, latest.rate_unit) == (3.0, "samples/s")
    assert metrics.latest(RunFolder(folder.path / "none")).step is None


@pytest.mark.parametrize(
    "losses",
    [[0.0], [2.0], [1000.0, 1.0, 0.01], [-1.0, 500.0], [3.0, 3.0]],
    ids=lambda losses: str(len(losses)),
)
def test_curves_of_any_shape_can_be_drawn(folder, losses):
    for step, loss in enumerate(losses):
        log(folder, step, loss=loss)
    page = page_of(folder)
    assert "svg" in page.tags
    assert folder.figure_file.stat().st_size > 5000


def test_a_single_step_has_no_fractions_of_a_step_beside_it(folder):
    log(folder, 0, loss=200.0)
    ticks = re.findall(r">([\d.]+)</text>", html_of(folder))
    assert "200" in " ".join(ticks)
    assert [tick for tick in ticks if 0 < float(tick) < 1] == []


def test_a_personal_matplotlib_style_does_not_reach_the_report(folder, monkeypatch):
    import matplotlib

    two_attempts(folder)
    html_of(folder)
    plain = folder.figure_file.read_bytes()
    with matplotlib.rc_context({"text.usetex": True, "figure.facecolor": "black", "lines.linewidth": 9}):
        html_of(folder)
        assert matplotlib.rcParams["text.usetex"]
    assert folder.figure_file.read_bytes() == plain


def test_a_report_that_another_process_wrote_after_the_status_was_read_is_named(folder):
    two_attempts(folder)
    end(folder, 360.0, 1)
    before = status(folder, None)
    assert before.report is None
    write_report(folder, before)
    assert with_report(folder, before).report == folder.report_file


def test_long_curves_are_thinned_by_averaging():
    curve = Curve(tuple(range(10_000)), tuple(float(step % 2) for step in range(10_000)))
    thinned = curves.thin(curve)
    assert len(thinned) <= 800
    assert abs(sum(thinned.values) / len(thinned) - 0.5) < 0.05
    assert thinned.steps == tuple(sorted(thinned.steps))
    assert curves.thin(thinned) == thinned


def test_values_of_the_environment_and_for_it_are_not_on_the_page(tmp_path):
    config = CONFIG + (
        "data:\n  token: s3cret-1\n  size: 3\ncluster:\n  name: mine\n  env: {API_KEY: s3cret-2}\n"
        "from_environment:\n  data:\n    token: ${oc.env:TOKEN}\n"
    )
    folder = make_folder(tmp_path, config)
    typed = "+cluster=mine\n+cluster.env.OTHER=s3cret-3\ndata.size=3\n"
    folder.overrides_file.write_text(typed)
    page = html_of(folder)
    assert "s3cret" not in page and "from_environment" not in page
    assert "token: ${oc.env:TOKEN}" in page and "API_KEY: (not shown)" in page
    assert "+cluster=mine" in page and "cluster.env.OTHER=(not shown)" in page and "data.size=3" in page
    assert "size: 3" in page


def test_values_that_a_program_names_itself_are_cards_with_their_newest_value(folder):
    started(folder, 0)
    log(folder, 1, loss=2.0, **{"val/f1": 0.25})
    log(folder, 2, loss=1.5, **{"val/f1": 0.5, "note": "a text"})
    log(folder, 1, attempt=1, loss=1.9, **{"val/f1": 0.125})
    log(folder, 3, attempt=1, images_per_s=7, lr=0.1)
    assert metrics.read(folder).own == {"val/f1": Curve((1, 2), (0.125, 0.5))}
    html = html_of(folder)
    assert "val/f1" in html and "0.5000" in html
    assert not {"note", "lr", "images_per_s"} & set(metrics.latest(folder).own)


@pytest.mark.parametrize("last", ["eval_loss", "accuracy"])
def test_the_newest_own_value_is_found_beside_the_losses_in_either_order(folder, last):
    log(folder, 3, accuracy=0.25, loss=3.0, eval_loss=3.0)
    log(folder, 4, loss=2.0)
    first = "accuracy" if last == "eval_loss" else "eval_loss"
    for name in (first, last):
        log(folder, 4, **{name: 0.5})
    assert metrics.latest(folder).own == {"accuracy": 0.5}


def test_the_optimizer_the_devices_and_the_warnings(folder):
    two_attempts(folder)
    assert "Optimizer" not in page_of(folder).text
    for step in (10, 20):
        values = {"lr": step / 1000, "grad_norm": 100.0 / step, "tflops": 12.34, "mfu": 0.4}
        log(folder, step, 1, 340.0, loss=1.0, tokens_per_s=50.0, **values)
    event(folder, "memory", 341.0, attempt=1, device="cpu", step=20, peak_bytes=[1 << 30, 5 << 29])
    for attempt, step in ((0, 5), (1, 15), (1, 15)):
        event(
            folder, "warned", 342.0, attempt=attempt, about="spike", text=f"The loss of step {step} is <nan>."
        )
    html = html_of(folder)
    page = Page(html)
    for part in (
        "Optimizer",
        "TFLOP/s 12.3 per rank, MFU 40 %",
        "Peak memory 2.50 GiB host, rank 1",
        "Rank 0 1.00 GiB Rank 1 2.50 GiB",
        "1 The loss of step 5 is <nan>. 2 The loss of step 15 is <nan>. ",
    ):
        assert part in page.text, part
    assert html.count("gradient norm</text>") == html.count("learning rate</text>") == 2
    content = metrics.read(folder)
    assert (content.lr.steps, content.grad_norm.values) == ((10, 20), (10.0, 5.0))
    assert content.own == {}


@pytest.mark.parametrize("limit", [4, 6])
@pytest.mark.parametrize("count", range(13))
def test_no_tile_stands_alone_in_the_last_row(count: int, limit: int) -> None:
    per_row = _per_row(count, limit)
    assert min(count, 1) <= per_row <= limit
    assert count <= 1 or count % per_row != 1
