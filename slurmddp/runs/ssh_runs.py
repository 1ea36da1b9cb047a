"""The record of runs and sweeps that this account has submitted over ssh, so that commands find their host.

The run folders lie on the cluster. A line here names a run, its login node and the project's folder there.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from slurmddp.errors import RunNotFoundError, SlurmddpError
from slurmddp.runs import index, sweeps
from slurmddp.runs.folder.jsonl import append_line, read_lines
from slurmddp.runs.folder.owner import refuse_file_of_others
from slurmddp.settings.spec import END_OF_RUN_NAME

log = logging.getLogger(__name__)


def _ignore(names: Sequence[str], sweep: str | None) -> None:
    """Let nobody know."""


listener: Callable[[Sequence[str], str | None], object] = _ignore
"""Called on a login node with the runs that a command over ssh has started, and their sweep."""


def report_started(names: Sequence[str], sweep: str | None = None) -> None:
    """Report runs that are queued, active or finished, so that the laptop can record them.

    Args:
        names: the runs; those of a sweep in the order of its points.
        sweep: the sweep if `names` are all of its points, of which some may not be started yet.
    """
    listener(names, sweep)


@dataclass(frozen=True, kw_only=True)
class SshRun:
    """A run or a sweep on a cluster."""

    name: str
    host: str
    """The login node, as ssh knows it."""
    folder: str
    """Absolute path of the project's folder on the host."""
    python: str | None = None
    """The interpreter there that has slurmddp; None: the program `slurmddp` of the PATH."""
    is_sweep: bool = False
    removed: bool = False
    time: float = field(default_factory=time.time)
    """Time of the submission, in seconds since the epoch."""


def records_file() -> Path:
    """Return the file with the records, beside the index of runs."""
    return index.index_file().with_name("ssh-runs.jsonl")


def remember(*runs: SshRun) -> None:
    """Record runs; only warn if a record can't be written."""
    try:
        records_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        append_line(records_file(), *map(asdict, runs))
    except OSError as error:
        log.warning("%s on %s can't be recorded: %s", runs[-1].name, runs[-1].host, error)


def ssh_runs() -> list[SshRun]:
    """Return the recorded runs that are not removed, the last submitted last."""
    known = {one.name for one in fields(SshRun)}
    found: dict[tuple[str, str], SshRun] = {}
    try:
        # A record names a host, and a program that runs there as this account.
        refuse_file_of_others(records_file(), "Remove it; runs are then found on their login node.")
        for line in read_lines(records_file()):
            run = SshRun(**{key: value for key, value in line.items() if key in known})
            found.pop((run.name, run.host), None)
            found[run.name, run.host] = run
    except (OSError, SlurmddpError, TypeError) as error:
        log.warning("The list of runs over ssh can't be read whole: %s", error)
    return [run for run in found.values() if not run.removed]


def find(name: str | None) -> SshRun | None:
    """Return the run over ssh that a command means; None if a run of this machine may be meant.

    Args:
        name: name, beginning of a name, or HOST:NAME; None: the run that was submitted last, if no run of
            this machine was written to since.

    Raises:
        RunNotFoundError: several runs have names that begin so, here and there or on several hosts.
    """
    runs = ssh_runs()
    if not runs or (name and "/" in name):
        return None
    if not name:
        touched = [index.last_touched(str(run.path)) or 0 for run in index.all_runs()[:1]]
        return runs[-1] if all(runs[-1].time > moment for moment in touched) else None
    found = [run for run in runs if name in (run.name, f"{run.host}:{run.name}")]
    here = [] if ":" in name else _names_here(name)
    if found or name in here:
        here = [one for one in here if one == name]
    else:
        found = [
            run for run in runs if run.name.startswith(name) or f"{run.host}:{run.name}".startswith(name)
        ]
        # `exp` names exp-0a1b2c3d though exp2-... begins alike.
        found = [run for run in found if re.fullmatch(END_OF_RUN_NAME, run.name.removeprefix(name))] or found
    if found and len(found) + len(here) > 1:
        raise _ambiguous(name, found, here)
    return found[0] if found else None


def _names_here(name: str) -> list[str]:
    """Return the names of this machine's runs and sweeps that begin so."""
    names = {run.name for run in index.all_runs()}.union(sweeps.names())
    return sorted(one for one in names if one.startswith(name))


def _ambiguous(name: str, there: Sequence[SshRun], here: Sequence[str]) -> RunNotFoundError:
    listed = [*(f"{run.host}:{run.name}" for run in there), *(f"{one} (here)" for one in here)]
    return RunNotFoundError(
        f"{name!r} fits {len(listed)} runs: {', '.join(listed[:5])}.",
        hint="Give HOST:NAME for a run over ssh, or the folder of a run of this machine.",
    )
