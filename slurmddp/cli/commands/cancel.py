"""End a run: its jobs leave the queue, and it is not requeued."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Sequence

from slurmddp.cli.each_run import for_each_run
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.launchers.submit.sbatch import leftovers, live_jobs
from slurmddp.runs import index
from slurmddp.runs.folder.history import History, read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.alive import is_alive, is_here
from slurmddp.runs.status.run_status import status
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp cancel`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")


def run(args: argparse.Namespace) -> int:
    """Cancel one run, or each run of a sweep."""
    return for_each_run(args, _run)


def _run(args: argparse.Namespace) -> int:
    folder = index.find(args.run)
    refuse_foreign(folder.path, READ_ONLY)
    slurm = SlurmClient()
    found = status(folder, slurm)
    if not found.active and not leftovers(folder, slurm):
        print(f"{folder.name} has nothing to cancel: it is {found.state} ({found.detail}).")
        return 0
    for sentence in cancel(folder, slurm):
        print(sentence)
    return 0


def cancel(folder: RunFolder, slurm: SlurmClient) -> list[str]:
    """Mark a run as cancelled, then end its jobs or its process; return sentences about it."""
    read_history(folder)  # An unreadable record is an error before anything is changed.
    again = folder.cancelled_file.exists()
    # The mark comes first: from now on the batch step neither requeues nor resubmits.
    write_atomic(folder.cancelled_file, "cancelled by `slurmddp cancel`; `slurmddp resume` removes this\n")
    history = read_history(folder)
    if (history.job_id or "").startswith("local"):
        done = _stop_process(folder, history, at_once=again)
    else:
        done = _cancel_jobs(folder, slurm, list(history.open_jobs))
    # A resubmission that began before the mark has another job.
    late = [job_id for job_id in read_history(folder).open_jobs if job_id not in history.open_jobs]
    done += _cancel_jobs(folder, slurm, late) if late else []
    folder.add_event("cancelled", job_id=history.job_id)
    return done or [f"{folder.name} is cancelled; no job of it was left."]


def cancel_jobs(folder: RunFolder, slurm: SlurmClient, ids: Sequence[str]) -> list[str]:
    """Cancel the live jobs of a run and return their ids.

    Args:
        ids: the jobs that the folder names. SLURM may have another one, whose submission was not recorded.
    """
    named = [job_id for job_id in ids if not job_id.startswith("local")]
    known = slurm.jobs(named) if named else {}
    ours = [job_id for job_id in named if job_id in known and known[job_id].may_be_of(folder.name)]
    active = [job_id for job_id in ours if not known[job_id].terminal]
    active += [job_id for job_id in live_jobs(folder, slurm) if job_id not in active]
    for job_id in active:
        slurm.cancel(job_id)
    return active


def _cancel_jobs(folder: RunFolder, slurm: SlurmClient, ids: list[str]) -> list[str]:
    try:
        active = cancel_jobs(folder, slurm, ids)
    except SlurmError as error:
        raise SlurmError(
            f"{folder.name} is marked as cancelled and won't be requeued, but {_jobs(ids)} may "
            f"still be there: {error.message}",
            hint=f"Try `slurmddp cancel {folder.name}` again when SLURM answers. {error.hint}".strip(),
        ) from error
    return [f"{folder.name} is cancelled: job {job_id} was told to end." for job_id in active]


def _jobs(ids: Sequence[str]) -> str:
    return f"job {', '.join(ids)}" if ids else "a job of it"


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
            f"{marked} process {newest.pid} belongs to another account, which alone, or root, can stop it."
        ]
    asked = "to end at once" if at_once else "to save and stop; a second `slurmddp cancel` kills it"
    return [f"{folder.name} is cancelled: process {newest.pid} was told {asked}."]
