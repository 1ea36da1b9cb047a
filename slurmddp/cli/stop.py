"""Let a run save and leave; it stays stopped until a person goes on with it.

It leaves a file `stop` in the run folder, which rank 0 looks for. Whoever has no slurmddp at hand can write
it too: touch RUN/stop. The run ends with exit code 75 and is neither requeued nor started again by itself;
`slurmddp resume` and `slurmddp train` take the file away and go on from the checkpoint. A script of your
own has to ask `should_stop()`. A run that waits to go on has saved already: its job leaves the queue.
"""

from __future__ import annotations

import argparse

from slurmddp.cli.cancel import cancel_jobs
from slurmddp.errors import ConfigError, SlurmError
from slurmddp.runs import index
from slurmddp.runs.folder import RunFolder, write_atomic
from slurmddp.runs.history import read_history
from slurmddp.runs.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status import RunStatus, status
from slurmddp.slurm.client import Slurm, SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp stop`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder")


def run(args: argparse.Namespace) -> int:
    """Ask one run to stop and say what will happen."""
    folder, slurm = index.find(args.run), SlurmClient()
    refuse_foreign(folder.path, READ_ONLY)
    found = status(folder, slurm)
    if not found.active or found.state == "cancelled":
        print(f"{folder.name} has nothing to stop: it is {found.state} ({found.detail}).")
        return 0
    refuse(found)
    write_atomic(folder.stop_file, "stop, by `slurmddp stop`; `slurmddp resume` takes this away\n")
    print(leave_queue(folder, slurm) if found.state == "stopped" else promise(found))
    print(f"follow  slurmddp status {folder.name}\ngo on   slurmddp resume {folder.name}")
    return 0


def refuse(found: RunStatus) -> None:
    """Raise ConfigError where nothing was saved or will be; a place in the queue is given up by `cancel`."""
    waits_to_go_on = found.state == "stopped" and found.launcher == "slurm"
    if not waits_to_go_on and found.state not in ("running", "unknown"):
        raise ConfigError(
            f"{found.name} is not running: it is {found.state} ({found.detail}).",
            hint=f"There is nothing to save; take it out of the queue with `slurmddp cancel {found.name}`.",
        )


def promise(found: RunStatus) -> str:
    """Return what will happen to a run that was asked to stop."""
    then = "saves a checkpoint, ends with exit code 75 and is not put back"
    if found.state == "unknown":
        return f"{found.name} was asked to stop, but {found.detail}. If it runs, it {then}."
    return f"{found.name} was asked to stop: within seconds it {then}."


def leave_queue(folder: RunFolder, slurm: Slurm) -> str:
    """Take the job that would go on with a run out of the queue, and say so."""
    jobs = read_history(folder).open_jobs
    waiting = ", ".join(jobs)
    try:
        cancel_jobs(folder, slurm, jobs)
    except SlurmError as error:
        return (
            f"{folder.name} has saved and stays stopped, but job {waiting} may still be in the queue: "
            f"{error.message} If SLURM starts it, it ends at once."
        )
    return f"{folder.name} has saved and stays stopped: job {waiting} was taken out of the queue."
