"""Show a run in a notebook: a card with its state, its loss and the next command."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from slurmddp.errors import SlurmddpError
from slurmddp.host.working_folder import working_folder
from slurmddp.pages import drawing
from slurmddp.pages.page import coded
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.report import curves
from slurmddp.runs.report.html import TONES
from slurmddp.runs.status.metrics import RATE_WINDOW, Curve, curve, read_steps, seconds_left
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import duration, number
from slurmddp.templates import template

_SIZE = (8.0, 2.6)
"""Width and height of the loss curve in inches."""
_FAILURE_LINES = 3
"""Number of last lines shown for a failure."""


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """The status of a run and its loss curves, as a notebook shows them."""

    status: RunStatus
    train: Curve
    """The training loss, with at most as many points as a screen can show."""
    held_out: Curve
    """The held-out loss, with at most as many points."""
    seconds_left: float | None = None
    """Remaining seconds at the speed of the last steps; None if that is not known."""


def read_card(folder: RunFolder, status: RunStatus) -> RunCard:
    """Return the card of a run.

    Args:
        folder: the run folder.
        status: the status of the run.
    """
    steps = read_steps(folder)
    newest = steps[-1].get("attempt") if steps else None
    points = [
        (float(step["time"]), step["step"])
        for step in steps
        if "loss" in step and "time" in step and step.get("attempt") == newest
    ]

    left = None
    if status.state == "running":
        left = seconds_left(points[-RATE_WINDOW:], status.total_steps)
    return RunCard(
        status=status,
        train=curves.thin(curve(steps, "loss")),
        held_out=curves.thin(curve(steps, "eval_loss")),
        seconds_left=left,
    )


def card_html(card: RunCard) -> str:
    """Return the HTML of a card: an element with a style of its own, which fits a light and a dark notebook.

    All texts of the run are escaped. Without matplotlib the card has no curve.
    """
    status = card.status
    failure_lines: tuple[str, ...] = ()
    if status.failure is not None:
        failure_lines = status.failure.telling_lines(_FAILURE_LINES)

    return template("card.html.j2").render(
        run=status,
        tone=TONES.get(status.state, "wait"),
        facts=_facts(card),
        loss=_loss(card),
        failure_lines=failure_lines,
        report_link=_link(status.report),
        command=_command(status),
        coded=coded,
    )


def error_html(error: SlurmddpError) -> str:
    """Return the escaped message and hint of an error as HTML, for a run whose status can't be read."""
    return str(coded(f"{error.message} {error.hint}"))


def _facts(card: RunCard) -> list[tuple[str, str]]:
    """Return the key figures of a run as (label, text); unknown ones are left out."""
    status = card.status
    facts = []
    if status.step is not None:
        total = f" of {status.total_steps:,}" if status.total_steps else ""
        facts.append(("step", f"{status.step:,}{total}"))
    if card.seconds_left is not None:
        facts.append(("time left", duration(card.seconds_left)))
    if status.loss is not None:
        facts.append(("loss", number(status.loss)))
    if status.held_out is not None:
        facts.append(("held-out loss", number(status.held_out)))

    facts += [(name, number(value)) for name, value in status.metrics.items()]
    if status.rate is not None:
        facts.append(("speed", f"{status.rate:,.0f} {status.rate_unit}"))
    return facts


def _loss(card: RunCard) -> str:
    """Return the loss curves as SVG; empty without a point, or without matplotlib."""
    if not curves.has_points(card.train, card.held_out):
        return ""

    # A notebook may show many cards, so the name of the run makes the ids of each picture unique.
    digest = hashlib.sha256(str(card.status.path).encode()).hexdigest()[:12]
    try:
        return drawing.figure_svg(
            f"card-{digest}", partial(curves.draw_loss, card.train, card.held_out, {}, _SIZE)
        )
    except SlurmddpError:
        return ""


def _link(report: Path | None) -> str:
    """Return the address of a report for a notebook of the current folder; empty if there is no report.

    A page in this folder gets a relative address, which Jupyter resolves. Browsers open other addresses of
    this machine only from a notebook that is itself a file.
    """
    if report is None or not report.is_absolute():
        return ""

    folder = working_folder()
    if report.is_relative_to(folder):
        return quote(os.path.relpath(report, folder))
    return report.as_uri()


def _command(status: RunStatus) -> str:
    """Return a sentence with the command that a person needs next."""
    if status.advice:
        return status.advice
    if status.active:
        return f"`slurmddp logs -f {status.name}` follows its output."
    if status.report is not None:
        return f"`slurmddp open {status.name}` opens the report."
    return f"`slurmddp status {status.name}` shows more."
