"""Read what a notebook shows of a run: its status and its loss curves."""

from __future__ import annotations

from slurmddp.control.status import status_of
from slurmddp.runs import index
from slurmddp.runs.report.card import RunCard, read_card
from slurmddp.runs.report.html import with_report
from slurmddp.slurm.client import SlurmClient


def card(name: str | None = None, *, slurm: SlurmClient | None = None) -> RunCard:
    """Return the card of a run for a notebook.

    If the run has finished or failed since its report was written, the report is written again.

    Args:
        name: name of a run, the beginning of a name, or a run folder; None: the newest run.
        slurm: the client of the SLURM to which the run belongs; None: the SLURM of this machine, if any.

    Raises:
        RunNotFoundError: the name matches no run, or several.
    """
    folder = index.find(name)
    return read_card(folder, with_report(folder, status_of(folder, slurm)))
