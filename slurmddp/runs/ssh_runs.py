"""The record of runs and sweeps that this account has submitted over ssh, so that commands find their host.

The run folders are on the cluster. Each line of the record names a run, its login node, and the folder of the
project on that host.
"""

from __future__ import annotations

import logging
import os
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
    """Do nothing: this command was not started over ssh, so no laptop records its runs."""


listener: Callable[[Sequence[str], str | None], object] = _ignore
"""Called on a login node with the runs that a command over ssh has started, and their sweep."""


def report_started(names: Sequence[str], sweep: str | None = None) -> None:
    """Call `listener` with runs that a command has started, so that the laptop can record them.

    Args:
        names: the names of the runs; runs of a sweep are in the order of its points.
        sweep: the name of the sweep if `names` are all its runs, including runs that have not started yet.
    """
    listener(names, sweep)


@dataclass(frozen=True, kw_only=True)
class SshRun:
    """The record on a laptop of a run or a sweep that was submitted over ssh."""

    name: str
    host: str
    """The name of the login node, for ssh."""
    folder: str
    """Absolute path of the project's folder on the host."""
    python: str | None = None
    """The interpreter on the host that has slurmddp; None for the program `slurmddp` on the PATH."""
    is_sweep: bool = False
    removed: bool = False
    time: float = field(default_factory=time.time)
    """Time of the submission, in seconds since the epoch."""


def records_file() -> Path:
    """Return the path of the file with the records, `ssh-runs.jsonl` beside the index of runs."""
    return index.index_file().with_name("ssh-runs.jsonl")


def are_recorded() -> bool:
    """Return whether the file of records exists; it is not read, so all its runs may have been removed."""
    return os.path.lexists(records_file())


def remember(*runs: SshRun) -> None:
    """Append records of runs to the file; log a warning if they can't be written."""
    try:
        records_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        append_line(records_file(), *map(asdict, runs))
    except OSError as error:
        text = (
            "%s was submitted on %s, but can't be recorded on this machine (%s). Type later commands there."
        )
        log.warning(text, runs[-1].name, runs[-1].host, error)


def ssh_runs() -> list[SshRun]:
    """Return the recorded runs that are not removed, the last submitted last."""
    known = {known_field.name for known_field in fields(SshRun)}
    runs: dict[tuple[str, str], SshRun] = {}

    try:
        # The owner is checked, because a record names a program that ssh runs on a host as this account.
        refuse_file_of_others(records_file(), "Remove it; runs are then found on their login node.")
        for line in read_lines(records_file()):
            run = SshRun(**{key: value for key, value in line.items() if key in known})
            # A later record of a run replaces the earlier one. Remove that first, so that the last submitted
            # run comes last.
            runs.pop((run.name, run.host), None)
            runs[run.name, run.host] = run
    except (OSError, SlurmddpError, TypeError) as error:
        log.warning("The list of runs over ssh can't be read completely: %s", error)
    return [run for run in runs.values() if not run.removed]


def find(name: str | None) -> SshRun | None:
    """Return the run over ssh that a command means; None if a run of this machine may be meant.

    Args:
        name: a name, beginning of a name, or HOST:NAME; None for the run that was submitted last, unless a
            run of this machine was written to since.

    Raises:
        RunNotFoundError: the name means several runs, on hosts or on this machine.
    """
    runs = ssh_runs()
    # A name with a slash is a path, which means a run of this machine.
    if not runs or (name and "/" in name):
        return None
    if not name:
        return _newest(runs)

    local_names = [] if ":" in name else _local_names(name)
    fitting = [run for run in runs if name in (run.name, f"{run.host}:{run.name}")]
    if fitting or name in local_names:
        local_names = [local_name for local_name in local_names if local_name == name]
    else:
        fitting = _beginning_with(name, runs)

    if not fitting:
        return None
    if len(fitting) + len(local_names) > 1:
        raise _ambiguous(name, fitting, local_names)
    return fitting[0]


def _newest(runs: Sequence[SshRun]) -> SshRun | None:
    """Return the run that was submitted last; None if a run of this machine has been written to since."""
    newest = runs[-1]
    for local_run in index.all_runs()[:1]:
        if (index.last_touched(str(local_run.path)) or 0) >= newest.time:
            return None
    return newest


def _beginning_with(name: str, runs: Sequence[SshRun]) -> list[SshRun]:
    """Return the runs whose NAME or HOST:NAME begins with `name`.

    If some of their names are `name` and a hash, only these runs are returned.
    """
    fitting = [run for run in runs if run.name.startswith(name) or f"{run.host}:{run.name}".startswith(name)]
    # `name=exp` makes the run exp-0a1b2c3d, so `exp` means that run, although exp2-... begins with it, too.
    return [run for run in fitting if re.fullmatch(END_OF_RUN_NAME, run.name.removeprefix(name))] or fitting


def _local_names(name: str) -> list[str]:
    """Return the names of runs and sweeps of this machine that begin with `name`."""
    names = {run.name for run in index.all_runs()}.union(sweeps.names())
    return sorted(local_name for local_name in names if local_name.startswith(name))


def _ambiguous(name: str, runs: Sequence[SshRun], local_names: Sequence[str]) -> RunNotFoundError:
    """Return the error for a text that means several runs, on hosts or on this machine."""
    listed = [f"{run.host}:{run.name}" for run in runs]
    listed += [f"{local_name} (on this machine)" for local_name in local_names]
    return RunNotFoundError(
        f"{name!r} matches {len(listed)} runs: {', '.join(listed[:5])}.",
        hint="Give HOST:NAME for a run over ssh, or the folder of a run of this machine.",
    )
