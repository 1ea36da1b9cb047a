"""Let a run save and stop; it stays stopped until `slurmddp resume`.

The command writes the file `stop` into the run folder; `touch RUN/stop` does the same. The run saves, ends
with exit code 75, and is not requeued. `slurmddp resume` and `slurmddp train` remove the file and resume.
The ranks of a script get SIGUSR2, which ends them unless they call `should_stop()` or handle the
signal. The job of a queued run leaves the queue.
"""

from __future__ import annotations

import argparse

from slurmddp.cli.commands.cancel import cancel_jobs
from slurmddp.cli.each_run import for_each_run
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.launchers.submit.sbatch import leftovers
from slurmddp.runs import index
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus, status
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp stop`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")


def run(args: argparse.Namespace) -> int:
    """Ask one run, or each run of a sweep to stop, and print what happens next."""
    return for_each_run(args, _run)


def _run(args: argparse.Namespace) -> int:
    folder, slurm = index.find(args.run), SlurmClient()
    refuse_foreign(folder.path, READ_ONLY)
    found = status(folder, slurm)
    waits = found.state in ("queued", "stopped") and found.launcher != "local"
    if found.state == "cancelled" or not (found.active or leftovers(folder, slurm)):
        print(f"{folder.name} has nothing to stop: it is {found.state} ({found.detail}).")
        return 0
    write_atomic(folder.stop_file, "stop, by `slurmddp stop`; `slurmddp resume` removes this\n")
    print(leave_queue(folder, slurm) if waits or not found.active else promise(found))
    print(f"follow  slurmddp status {folder.name}\nresume  slurmddp resume {folder.name}")
    return 0


def promise(found: RunStatus) -> str:
    """Return the message about a run that was asked to stop."""
    if (RunFolder(found.path).config().get("program") or {}).get("script"):
        then = "gets SIGUSR2, and is not requeued"
        more = (
            " A script that calls should_stop() or handles the signal can save first; any other script ends "
            f"at once. `slurmddp cancel {found.name}` ends it in any case."
        )
    else:
        then, more = "saves a checkpoint, ends with exit code 75 and is not requeued", ""
    if found.state == "unknown":
        return f"{found.name} was asked to stop, but {found.detail}. If it runs, it {then}.{more}"
    return f"{found.name} was asked to stop: within seconds it {then}.{more}"


def leave_queue(folder: RunFolder, slurm: SlurmClient) -> str:
    """Cancel the queued jobs of a run; return the message about them."""
    history = read_history(folder)
    saved = any(attempt.saved_step is not None for attempt in history.attempts)
    stays = f"{folder.name} has saved and stays stopped" if saved else f"{folder.name} stays stopped"
    try:
        (jobs,) = cancel_jobs([(folder, history.open_jobs)], slurm)
    except SlurmError as error:
        return (
            f"{stays}, but job {', '.join(history.open_jobs)} may still be in the queue: {error.message} "
            "If SLURM starts it, it ends at once."
        )
    return f"{stays}: job {', '.join(jobs)} was taken out of the queue." if jobs else f"{stays}."
