"""End a run: its jobs leave the queue, and it is not requeued."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmddp.cli.each_run import runs_of
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.launchers.submit.sbatch import leftovers_of_each, live_jobs
from slurmddp.runs.folder.history import History, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.alive import is_alive, is_here
from slurmddp.runs.status.run_status import RunStatus, statuses
from slurmddp.runs.text_format import counted
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp cancel`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")


def run(args: argparse.Namespace) -> int:
    """Cancel one run, or the runs of a sweep."""
    folders = runs_of(args.run)
    for folder in folders:
        refuse_foreign(folder.path, READ_ONLY)
    slurm = SlurmClient()
    wanted = [RunFolder(one.path) for one in with_jobs(folders, slurm, "cancel")]
    for sentence in cancel(wanted, slurm):
        print(sentence)
    return 0


def with_jobs(
    folders: Sequence[RunFolder], slurm: SlurmClient, verb: str, *, leave: str = ""
) -> list[RunStatus]:
    """Return the states of the runs that have, or may have, a job or process; SLURM is asked once for all.

    Args:
        folders: the runs.
        slurm: the SLURM to ask.
        verb: the command, for the sentence about each other run, which is printed.
        leave: runs in this state are left alone.
    """
    found = statuses(folders, slurm)
    over = [RunFolder(one.path) for one in found if not one.active]
    left = {folder.path for folder, jobs in zip(over, leftovers_of_each(over, slurm), strict=True) if jobs}
    wanted = []
    for one in found:
        if (one.active or one.path in left) and one.state != leave:
            wanted.append(one)
        else:
            print(f"{one.name} has nothing to {verb}: it is {one.state} ({one.detail}).")
    return wanted


def cancel(folders: Sequence[RunFolder], slurm: SlurmClient) -> list[str]:
    """Mark runs as cancelled, then end their jobs or processes; return sentences about each.

    SLURM is asked once for all runs. An unreadable record of a run is an error before anything is changed.
    """
    for folder in folders:
        read_history(folder)
    again = [folder.is_cancelled for folder in folders]
    # The mark comes first: from now on the batch step neither requeues nor resubmits.
    for folder in folders:
        mark = "cancelled by `slurmddp cancel`; `slurmddp resume` removes this\n"
        write_atomic(folder.cancelled_file, mark)
    histories = [read_history(folder) for folder in folders]
    told: dict[Path, list[str]] = {folder.path: [] for folder in folders}
    jobs: list[tuple[RunFolder, Sequence[str]]] = []
    for folder, history, at_once in zip(folders, histories, again, strict=True):
        if (history.job_id or "").startswith("local"):
            told[folder.path] += _stop_process(folder, history, at_once=at_once)
        else:
            jobs.append((folder, history.open_jobs))
    _cancel_jobs(jobs, slurm, told)
    # A resubmission that began before the mark has another job.
    late = [
        (folder, [one for one in read_history(folder).open_jobs if one not in history.open_jobs])
        for folder, history in zip(folders, histories, strict=True)
    ]
    _cancel_jobs([(folder, ids) for folder, ids in late if ids], slurm, told)
    for folder, history in zip(folders, histories, strict=True):
        folder.add_event("cancelled", job_id=history.job_id)
    none = "{} is cancelled; no job of it was left."
    return [line for folder in folders for line in told[folder.path] or [none.format(folder.name)]]


def cancel_jobs(runs: Sequence[tuple[RunFolder, Sequence[str]]], slurm: SlurmClient) -> list[list[str]]:
    """Cancel the live jobs of runs, and return the ids of each run.

    Args:
        runs: each run, with the jobs that its folder names. SLURM may have another one, whose submission was
            not recorded.
        slurm: the SLURM, which is asked once for all runs.
    """
    named = [job_id for _, ids in runs for job_id in ids if not job_id.startswith("local")]
    known = slurm.jobs(named) if named else {}
    active: list[list[str]] = []
    for (folder, ids), live in zip(runs, live_jobs([run for run, _ in runs], slurm), strict=True):
        ours = [one for one in ids if one in known and known[one].may_be_of(folder.name)]
        # A job with an error is not in the queue.
        ours = [one for one in ours if not known[one].terminal and not known[one].error]
        active.append([*ours, *(one for one in live if one not in ours)])
    if wanted := [job_id for ids in active for job_id in ids]:
        slurm.cancel(*wanted)
    return active


def _cancel_jobs(
    runs: Sequence[tuple[RunFolder, Sequence[str]]], slurm: SlurmClient, told: Mapping[Path, list[str]]
) -> None:
    """Cancel the live jobs of runs, and add a sentence about each job to `told`."""
    if not runs:
        return
    try:
        active = cancel_jobs(runs, slurm)
    except SlurmError as error:
        name, ids = runs[0][0].name, [job_id for _, ids in runs for job_id in ids]
        marked = f"{name} is" if len(runs) == 1 else f"{name} and {counted(len(runs) - 1, 'other run')} are"
        raise SlurmError(
            f"{marked} marked as cancelled and won't be requeued, but {_jobs(ids)} may "
            f"still be there: {error.message}",
            hint=f"Try the same command again when SLURM answers. {error.hint}".strip(),
        ) from error
    for (folder, _), found in zip(runs, active, strict=True):
        told[folder.path].extend(f"{folder.name} is cancelled: job {one} was told to end." for one in found)


def _jobs(ids: Sequence[str]) -> str:
    more = f" and {counted(len(ids) - 5, 'other')}" if len(ids) > 5 else ""
    return f"job {', '.join(ids[:5])}{more}" if ids else "a job of it"


def _stop_process(folder: RunFolder, history: History, *, at_once: bool) -> list[str]:
    newest = history.newest
    if newest is None or newest.pid is None:
        return []
    alive = is_alive(newest)
    marked = f"{folder.name} is marked as cancelled, but"
    if alive is None and not is_here(newest):
        return [
            f"{marked} runs as process {newest.pid} on {newest.host}, and this is {socket.gethostname()}: "
            "stop it there with Ctrl-C or `slurmddp cancel`."
        ]
    if alive is None:
        return [f"{marked} its process {newest.pid} can't be seen from here: stop it with Ctrl-C."]
    if not alive:
        return []
    try:
        # The launcher saves and stops at the first signal, and kills at a later Ctrl-C.
        os.kill(newest.pid, signal.SIGINT if at_once else signal.SIGTERM)
        os.kill(newest.pid, signal.SIGCONT)  # A process that Ctrl-Z suspended handles no signal.
    except ProcessLookupError:
        return []
    except PermissionError:
        return [
            f"{marked} process {newest.pid} belongs to another account. Only that account or root can end it."
        ]
    asked = "to end at once" if at_once else "to save and stop; a second `slurmddp cancel` kills it"
    return [f"{folder.name} is cancelled: process {newest.pid} was told {asked}."]
