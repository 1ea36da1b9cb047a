"""Start a run, on SLURM or on this machine, and print how to follow it and how it ended.

`slurmddp train` and `slurmddp resume` share it. Imports stand in the functions, so that `--help` stays fast.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.environments.names import DETACHED_VARIABLE
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError, SlurmddpError, SlurmError
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder.code_snapshot import NOT_IN_GIT
from slurmddp.runs.folder.late_files import read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.ssh_runs import report_started
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from slurmddp.runs.folder.lock import RunLock
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.spec import Job


def hold(folder: RunFolder) -> RunLock:
    """Acquire the lock of a run, and print if another command holds it; see `slurmddp.control.hold`."""
    from slurmddp.cli.messages import print_event
    from slurmddp.control.hold import hold as hold_run

    return hold_run(folder, print_event)


def create(job: Job) -> bool:
    """Create the folder of a new run; return False if it exists."""
    from slurmddp.runs.folder import create

    return create.create(job, script_of(job))


def already_active(status: RunStatus) -> int:
    """Print the job or process of an active run; return the exit code."""
    from slurmddp.control.refusals import refuse_unclear

    refuse_unclear(status)
    print(f"{status.name} is {status.state} already: {status.detail}. Nothing was started.")
    print(_how_to_follow(status.name))
    report_started([status.name])
    return EXIT_FINISHED


def start_job(job: Job, lock: RunLock, *, is_new: bool = False) -> int:
    """Submit a job, or run it on this machine to its end, and return the exit code.

    Args:
        lock: the run's lock. It may be free only since the caller has found a launcher at work (see `hold`).
        is_new: whether the run folder was created for this job; it is removed if SLURM refuses the job.
    """
    if lock.fileno < 0 and not lock.acquire():
        name = job.run_name
        raise ConfigError(
            f"{name} is being trained by another process of this machine.",
            hint=f"Follow it with `slurmddp logs -f {name}`, or give this run another name=.",
        )
    return _submit(job, is_new=is_new) if job.launcher == "slurm" else _train_here(job, lock, is_new=is_new)


def script_of(job: Job) -> str | None:
    """Return the batch script of a job, None for a local run; raises SlurmddpError if it can't start."""
    if job.launcher != "slurm":
        fits_here(job)
        return None
    from slurmddp.launchers.submit import sbatch
    from slurmddp.slurm import client
    from slurmddp.slurm.script import render

    script = render(job)
    if not client.on_path():
        raise SlurmError(
            "There is no sbatch on this machine's PATH, so the job can't be submitted from here.",
            hint="Go to a login node of the cluster, start a SLURM here with `slurmddp sandbox up`, or train "
            "here with launcher=local. Nothing was written.",
        )
    for note in sbatch.refuse_misfit(job, client.SlurmClient()):
        print(f"slurmddp: note: {note}", file=sys.stderr)
    return script


def fits_here(job: Job) -> None:
    """Refuse a local run with far too many ranks for this machine, or more nodes than the allocation has."""
    from slurmddp.host import process
    from slurmddp.launchers.local import run as local
    from slurmddp.launchers.local.allocation import current

    if allocation := current(os.environ):
        allocation.require(job.resources.all_nodes, f"nodes={job.resources.all_nodes}")
    else:
        local.check_size(job.resources.world_size, process.usable_cpus())


def _submit(job: Job, *, is_new: bool) -> int:
    from slurmddp.control.status import status_of
    from slurmddp.launchers.submit import sbatch
    from slurmddp.runs.folder.create import prepare
    from slurmddp.runs.folder.history import UNANSWERED
    from slurmddp.runs.index import remember
    from slurmddp.slurm import client
    from slurmddp.slurm.options import note_on_cpus

    slurm, folder, asked = client.SlurmClient(), RunFolder(job.run_dir), False
    try:
        if (found := sbatch.settle(folder, slurm, print)) is not None:
            remember(folder)
            print(f"SLURM has job {found} of {folder.name}, which its folder did not name; it is recorded.")
            return already_active(status_of(folder))
        if not is_new:
            prepare(job, script_of(job))
        asked = True
        job_id = sbatch.build(job.submitter, slurm).submit(job)
    except BaseException as error:
        if asked and (not isinstance(error, SlurmddpError) or getattr(error, "may_be_queued", False)):
            with suppress(OSError):
                folder.add_event(UNANSWERED, submitter=job.submitter)
            remember(folder)
        elif is_new:
            remove(folder)
        raise
    remember(folder)
    report_started([folder.name])
    spares = f" and {counted(job.resources.spare_nodes, 'spare')}" if job.resources.spare_nodes else ""
    where = f"{counted(job.resources.nodes, 'node')}{spares} of {job.cluster.name}"
    print(f"run     {folder.name}  ({counted(job.resources.world_size, 'rank')} on {where})")
    print(f"job     {job_id}")
    print(_places(folder))
    for note in filter(None, (_progress_note(job, folder), note_on_cpus(job))):
        print(f"note    {note}")
    print(_how_to_follow(folder.name))
    return EXIT_FINISHED


def _places(folder: RunFolder) -> str:
    """Return where a run is, and which code it runs."""
    lines = [f"folder  {folder.path}"]
    with suppress(OSError):  # The file is missing with snapshot=false.
        note = read_regular(folder.code_note_file).decode().strip()
        if NOT_IN_GIT not in note:
            lines.append(f"code    {note}")
        elif not _has_other_runs(folder):
            lines.append("tip     `git init` in the project: then each run keeps a copy of its code.")
    return "\n".join(lines)


def _has_other_runs(folder: RunFolder) -> bool:
    """Return whether a run is not the first one of its folder of runs."""
    others = [path for path in folder.path.parent.iterdir() if path != folder.path]
    return any(RunFolder(path).config_file.is_file() for path in others)


def _progress_note(job: Job, folder: RunFolder) -> str:
    """Return a note about `program.checkpoints` for a script without a known save, if it may be requeued."""
    from slurmddp.batch.progress import latest_name
    from slurmddp.spec import FUNCTION_CALL, own_script

    program, most = job.program.config.get("program") or {}, job.policy.max_requeues_without_progress
    again = job.policy.requeue and job.resources.time_limit_min is not None
    if not program.get("script") or job.saved_files or latest_name(folder) or not again:
        return ""
    if _uses_distributon(job.project_dir / own_script(program)):
        return ""
    is_function = program["script"] == FUNCTION_CALL
    name = program["args"][1] if is_function else own_script(program)
    return (
        f"name the files that {name} saves with program.checkpoints=PATH, unless Distributon "
        f"saves them: after {counted(most + 1, 'time limit')} without a newer checkpoint the run ends."
    )


def _uses_distributon(script: Path) -> bool:
    """Return whether a script names Distributon, which saves in the run folder."""
    try:
        return "Distributon" in script.read_text(encoding="utf-8", errors="replace")
    except OSError:  # A module or a command.
        return False


def remove(folder: RunFolder) -> None:
    """Remove the folder of a refused run, and the folder of runs if it is empty."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):
        folder.path.parent.rmdir()


def _how_to_follow(name: str) -> str:
    return f"follow  slurmddp status {name}\n        slurmddp logs -f {name}"


def gpus_here(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of visible GPUs of this machine, without torch."""
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return present if chosen is None else min(present, len([one for one in chosen.split(",") if one.strip()]))


def _train_here(job: Job, lock: RunLock, *, is_new: bool) -> int:
    from slurmddp.cli.live_view import RunView
    from slurmddp.launchers.local import run as local
    from slurmddp.launchers.local.allocation import current
    from slurmddp.runs.folder.create import prepare
    from slurmddp.runs.index import remember
    from slurmddp.spec import total_steps

    folder = RunFolder(job.run_dir) if is_new else prepare(job, script_of(job))
    remember(folder)
    allocation = current(os.environ)
    nodes = f"{counted(job.resources.all_nodes, 'node')} of job"
    where = f"{nodes} {allocation.job_id}" if allocation else "this machine"
    print(f"run     {folder.name}  ({counted(job.resources.world_size, 'rank')} on {where})")
    print(_places(folder), flush=True)
    if allocation and allocation.nodes > job.resources.all_nodes:
        print(f"note    job {allocation.job_id} holds {allocation.nodes} nodes; nodes=N uses more of them.")
    if job.resources.gpus_per_node and not allocation and not gpus_here(os.environ):
        print("This machine shows no GPU: the training runs on its CPUs.")
    # Another program than the trainer may only print. Its logs hold that, if nobody looks at this output.
    shows_output = not job.program.is_own_trainer and DETACHED_VARIABLE not in os.environ
    with RunView(folder, total_steps(job.program.config), output=shows_output) as view:
        training = local.LocalRun(job, folder, lock, view.say, allocation=allocation)
        training.start()
        code = training.wait(view.tick)
    return _conclude(job, code)


def _conclude(job: Job, code: int) -> int:
    """Print the end of a local run and the paths of its results."""
    from slurmddp.batch.progress import latest_name
    from slurmddp.runs.report.html import with_report
    from slurmddp.runs.status.run_status import status

    folder = RunFolder(job.run_dir)
    stands = with_report(folder, status(folder, None))
    saved = bool(latest_name(folder)) or not job.program.config["program"].get("script")
    if code == EXIT_FINISHED:
        print("\n".join(_results(folder, stands)))
    elif not saved:
        print(f"{'Stopped' if code == EXIT_STOPPED else 'Killed'}. {_next_start(job, folder)}")
    elif code == EXIT_STOPPED:
        at = f" at step {stands.saved_step}" if stands.saved_step is not None else ""
        print(f"Stopped{at}; the same command resumes from there.")
    else:
        print("Killed; the same command resumes from the last checkpoint.")
    return code


def _next_start(job: Job, folder: RunFolder) -> str:
    """Return what the same command does with a script that has no checkpoint in `checkpoints`."""
    from slurmddp.batch.progress import saved

    again = "The same command starts the script again"
    named = job.program.config["program"].get("checkpoints")
    if not named:
        return f"{again}; its own checkpoints are known only if program.checkpoints=PATH names them."
    if saved(folder, job.project_dir, job.saved_files).files:
        # Whether such a file is whole, only the script knows: it may have been stopped in its middle.
        return (
            f"{again}; files that fit program.checkpoints are there, but are not checked: {job.saved_files}"
        )
    return f"{again}; it has saved nothing that fits program.checkpoints={named}."


def _results(folder: RunFolder, stands: RunStatus) -> Sequence[str]:
    from slurmddp.batch.progress import latest_name
    from slurmddp.runs.status.curves import curve_commands
    from slurmddp.runs.status.metrics import read

    losses = read(folder).held_out.values
    change = f", held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    lines = ["Finished." if stands.step is None else f"Finished: {stands.step} steps{change}."]
    if sample := read_text(folder.sample_file):
        lines += ["", "What the model writes:", *(f"    {line}" for line in sample.strip().splitlines()), ""]
    if stands.report is not None:
        lines.append(f"report      {stands.report}")
    lines += [f"curves      {command}" for command in curve_commands(folder)]
    if latest := latest_name(folder):
        lines.append(f"checkpoint  {folder.checkpoints_dir / latest}")
    return lines
