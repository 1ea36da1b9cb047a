"""Let a run save and stop; it stays stopped until `slurmddp resume`.

The command writes the file `stop` into the run folder; `touch RUN/stop` does the same. The run saves, ends
with exit code 75, and is not requeued. `slurmddp resume` and `slurmddp train` remove the file and resume.
The ranks of a script get SIGTERM, or SIGUSR2 if they handle that. It ends them unless they call
`should_stop()` or handle the signal. The job of a queued run leaves the queue.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slurmddp.cli.commands.cancel import cancel_jobs, with_jobs
from slurmddp.cli.each_run import runs_of
from slurmddp.errors import SlurmError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs import sweeps
from slurmddp.runs.folder.history import read_history
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.owner import READ_ONLY, refuse_foreign
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.slurm.client import SlurmClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp stop`."""
    parser.add_argument("run", metavar="RUN", help="name, its beginning, or folder; or a sweep")


def run(args: argparse.Namespace) -> int:
    """Ask one run, or the runs of a sweep, to stop, and print what happens next."""
    folders, sweep = runs_of(args.run), sweeps.find(args.run)
    for folder in folders:
        refuse_foreign(folder.path, READ_ONLY)
    slurm = SlurmClient()
    wanted = with_jobs(folders, slurm, "stop", leave="cancelled")
    # The mark comes first: an element of an array that starts in place of another one ends at once.
    for one in wanted:
        mark = "stop, by `slurmddp stop`; `slurmddp resume` removes this\n"
        write_atomic(RunFolder(one.path).stop_file, mark)
    told = _leave_queue([RunFolder(one.path) for one in wanted if _waits(one)], slurm)
    for one in wanted:
        print(told.get(one.path) or promise(one))
    if wanted:
        follow = f"list {sweep.name}" if sweep else f"status {folders[0].name}"
        print(
            f"follow  slurmddp {follow}\nresume  slurmddp resume {sweep.name if sweep else folders[0].name}"
        )
    return 0


def _waits(found: RunStatus) -> bool:
    """Return whether the jobs of a run hold no nodes, or belong to a run that is over."""
    return not found.active or (found.state in ("queued", "stopped") and found.launcher != "local")


def promise(found: RunStatus) -> str:
    """Return the message about a run that was asked to stop."""
    if (RunFolder(found.path).config().get("program") or {}).get("script"):
        then = "gets SIGTERM, or SIGUSR2 if it handles that, and is not requeued"
        more = (
            " A script that calls should_stop() or handles the signal can save first; any other script ends "
            f"at once. `slurmddp cancel {found.name}` ends it in any case."
        )
    else:
        then, more = "saves a checkpoint, ends with exit code 75 and is not requeued", ""
    if found.state == "unknown":
        waits = "If it waits, it ends as soon as it starts."
        return f"{found.name} was asked to stop, but {found.detail}. {waits} If it runs, it {then}.{more}"
    return f"{found.name} was asked to stop: within seconds it {then}.{more}"


def _leave_queue(folders: Sequence[RunFolder], slurm: SlurmClient) -> dict[Path, str]:
    """Cancel the queued jobs of runs, with one request for all; return the message about each run."""
    if not folders:
        return {}
    histories = {folder: read_history(folder) for folder in folders}
    told = {}
    for folder, history in histories.items():
        saved = any(attempt.saved_step is not None for attempt in history.attempts)
        told[folder.path] = f"{folder.name} {'has saved and ' if saved else ''}stays stopped"
    try:
        jobs = cancel_jobs([(folder, history.open_jobs) for folder, history in histories.items()], slurm)
    except SlurmError as error:
        return {
            folder.path: f"{told[folder.path]}, but job {', '.join(history.open_jobs)} may still be in the "
            f"queue: {error.message} If SLURM starts it, it ends at once."
            for folder, history in histories.items()
        }
    return {
        path: f"{stays}: job {', '.join(ids)} was taken out of the queue." if ids else f"{stays}."
        for (path, stays), ids in zip(told.items(), jobs, strict=True)
    }
