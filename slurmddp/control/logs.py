"""Read the last lines of the logs of a run, merged and labelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmddp.errors import ConfigError
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.status.merged_logs import ChosenLogs, files, job_lines, label, snapshot
from slurmddp.runs.status.run_status import status
from slurmddp.slurm.client import SlurmClient


@dataclass(frozen=True, kw_only=True)
class Logs:
    """The last lines of the chosen logs of one attempt of a run."""

    name: str
    """Full name of the run."""
    attempt: int | None
    """Number of the attempt; None: no attempt has begun."""
    lines: tuple[str, ...]
    """The lines, each with the label of its log: `[rank 3] ...`. Lines of slurmddp itself begin with `--`."""
    missing: str = ""
    """If there are no lines because no attempt has begun: the state of the run and its reason."""


def selection(
    ranks: Sequence[int] = (), nodes: Sequence[int] = (), *, everything: bool = False
) -> ChosenLogs:
    """Return the selection of the logs to read.

    Args:
        ranks: the ranks whose logs are read; without ranks and nodes, rank 0.
        nodes: the nodes whose agents' logs are read.
        everything: whether to read the logs of all ranks, of all agents and of the batch script.
    """
    if not ranks and not nodes:
        ranks = (0,)

    return ChosenLogs(frozenset(ranks), frozenset(nodes), everything=everything)


def logs(
    name: str | None = None,
    *,
    ranks: Sequence[int] = (),
    nodes: Sequence[int] = (),
    everything: bool = False,
    attempt: int | None = None,
    lines: int | None = 40,
    slurm: SlurmClient | None = None,
) -> Logs:
    """Return the last lines of the logs of an attempt, and lines about its failures.

    Args:
        name: name of a run, the beginning of a name, or a run folder; None: the newest run.
        ranks: the ranks whose logs are read; without ranks and nodes, rank 0.
        nodes: the nodes whose agents' logs are read.
        everything: whether to read the logs of all ranks, of all agents and of the batch script.
        attempt: number of the attempt; None: the newest.
        lines: number of last lines of each log; None: all lines.
        slurm: the client of the SLURM to which the run belongs; None: the SLURM of this machine.

    Raises:
        RunNotFoundError: the name matches no run, or several.
        ConfigError: there is no such attempt, or it has no log of a given rank or node.
    """
    folder = index.find(name)
    attempts = folder.attempts()
    if not attempts:
        printed = tuple(job_lines(folder, lines))
        run = None if printed else status(folder, slurm or SlurmClient())
        missing = "" if run is None else f"{run.state}: {run.detail}"
        return Logs(name=folder.name, attempt=None, lines=printed, missing=missing)

    if attempt is None:
        attempt = attempts[-1]
    if attempt not in attempts:
        known = ", ".join(map(str, attempts))
        raise ConfigError(
            f"{folder.name} has no attempt {attempt}.", hint=f"Give one of its attempts: {known}."
        )

    _require([*(f"rank {rank}" for rank in ranks), *(f"node {node}" for node in nodes)], folder, attempt)
    chosen = selection(ranks, nodes, everything=everything)

    return Logs(name=folder.name, attempt=attempt, lines=tuple(snapshot(folder, attempt, chosen, lines)))


def _require(labels: Sequence[str], folder: RunFolder, attempt: int) -> None:
    """Raise ConfigError if the attempt has no log with one of the labels, such as "rank 3" or "node 0"."""
    known = [label(path) for path in files(folder, attempt)]
    for wanted in labels:
        if wanted not in known:
            listed = ", ".join(known)
            if len(known) > 12:
                listed = f"{', '.join(known[:8])} and {len(known) - 8} more"
            raise ConfigError(
                f"Attempt {attempt} of {folder.name} has no log of {wanted}.",
                hint=f"It has logs of: {listed or 'no rank and no node'}.",
            )
