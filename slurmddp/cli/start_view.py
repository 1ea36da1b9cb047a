"""Print the start of runs, and the progress and end of trainings on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from slurmddp.batch.progress import latest_name, saved
from slurmddp.cli import messages
from slurmddp.cli.live_view import RunView
from slurmddp.control import jobs
from slurmddp.control.events import Info
from slurmddp.control.local_training import TrainingBegins, TrainingEnded, TrainingLeft, TrainingRuns
from slurmddp.control.resume import SizeChanges
from slurmddp.control.start import (
    AlreadyActive,
    AlreadyFinished,
    PointBegins,
    PointFailed,
    PointsLeft,
    RunContinues,
    Started,
)
from slurmddp.control.submission import AdoptedJob, EarlierRunRenamed, SubmittedArray, SubmittedJob
from slurmddp.control.sweep import SweepBegins
from slurmddp.environments.names import DETACHED_VARIABLE
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED
from slurmddp.host.regular_file import read_regular
from slurmddp.runs.folder import git
from slurmddp.runs.folder.late_files import is_there, read_text
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import counted, shorter
from slurmddp.settings.spec import own_script, total_steps

if TYPE_CHECKING:
    from slurmddp.launchers.local.allocation import Allocation
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.settings.spec import Job


class StartView:
    """Prints each event of the start of runs; an instance is the `report` argument of the actions."""

    def __init__(self) -> None:
        self._training: RunView | None = None
        """The view of the run that trains on this machine now."""
        self._screen = ExitStack()

    def __call__(self, event: object) -> None:
        """Print an event."""
        match event:
            case TrainingRuns() if self._training is not None:
                self._training.tick()
            case Info(text) if self._training is not None:
                self._training.print(text)
            case TrainingBegins(job, allocation):
                self._begin_training(job, allocation)
            case TrainingLeft() if self._training is not None:
                self._training = None
                self._screen.close()
            case TrainingEnded(job, exit_code, status):
                print("\n".join(_end(job, exit_code, status)))
            case SweepBegins() | PointBegins() | PointFailed() | PointsLeft() | Started():
                _print_of_sweep(event)
            case SubmittedJob() | SubmittedArray() | AdoptedJob():
                _print_submission(event)
            case EarlierRunRenamed(path):
                print(f"The earlier run is kept as {path}.")
            case AlreadyActive(status, code_changes):
                print(f"{status.name} is {status.state} already: {status.detail}. Nothing was started.")
                print(_how_to_follow(status.name))
                if code_changes:
                    print(code_changes)
            case AlreadyFinished():
                _print_finished(event)
            case SizeChanges(run, ranks, samples):
                print(
                    f"{run} resumes with {counted(ranks, 'rank')}; "
                    f"each optimizer step keeps its {samples} samples."
                )
            case RunContinues(status):
                action = f"resumes from step {status.saved_step}" if status.saved_step else "starts again"
                print(f"{status.name} exists already ({status.state}); it {action}.")
            case _:
                messages.print_event(event)

    def _begin_training(self, job: Job, allocation: Allocation | None) -> None:
        """Print the machine or nodes on which a run trains, and open the view that shows its progress.

        Args:
            job: the job of the run.
            allocation: the SLURM allocation in which the command runs; None on this machine.
        """
        folder = RunFolder(job.run_dir)
        place = "this machine"
        if allocation:
            place = f"{counted(job.resources.all_nodes, 'node')} of job {allocation.job_id}"

        print(f"run     {folder.name}  ({counted(job.resources.world_size, 'rank')} on {place})")
        _print_places(job)
        if allocation and allocation.nodes > job.resources.all_nodes:
            print(
                f"note    job {allocation.job_id} holds {allocation.nodes} nodes; to use more, set nodes=N."
            )

        if job.resources.gpus_per_node and not allocation and not jobs.visible_gpus(os.environ):
            print("This machine has no visible GPU: the training runs on its CPUs.")

        sys.stdout.flush()

        # A program other than the trainer may report no steps, so its output is shown. A detached
        # run has no terminal to show it on; the logs of the run hold the output.
        shows_output = not job.program.is_own_trainer and DETACHED_VARIABLE not in os.environ
        view = RunView(folder, total_steps(job.program.config), output=shows_output)
        self._training = self._screen.enter_context(view)


def _print_of_sweep(event: SweepBegins | PointBegins | PointFailed | PointsLeft | Started) -> None:
    """Print an event of a sweep or a search."""
    match event:
        case SweepBegins(sweep=sweep, runs=runs, to_resume=to_resume, is_search=is_search):
            count = counted(runs, "trial" if is_search else "run")
            if to_resume is not None:
                count = f"{to_resume} of {count} to resume"
            print(f"sweep   {sweep}  ({count})")
        case PointBegins(run=run, number=number, total=total, in_array=in_array):
            if not in_array:
                print()
            if event.is_trial:
                print(f"trial   {number} of {total}  {run}  {shorter(event.settings)}", flush=True)
            else:
                print(f"point   {number} of {total}  {run}  {event.settings}", flush=True)
        case PointFailed(_, error):
            messages.report(error)
        case PointsLeft(count, error):
            if error is not None:
                messages.report(error)
            points = counted(count, "point")
            print(f"slurmddp: {points} not started; the same command starts them.", file=sys.stderr)
        case Started(sweep=sweep) if sweep is not None:
            print(f"\n{how_to_show(sweep)}")


def how_to_show(sweep: str) -> str:
    """Return two lines with the commands that show the report and the runs of a sweep or search."""
    return f"report  slurmddp report {sweep}\nsweep   slurmddp list {sweep}"


def _print_submission(event: SubmittedJob | SubmittedArray | AdoptedJob) -> None:
    """Print the ids of jobs that SLURM has queued, with their sizes and the commands to follow them."""
    match event:
        case SubmittedJob(job, job_id, notes):
            folder = RunFolder(job.run_dir)
            print(f"run     {folder.name}  ({counted(job.resources.world_size, 'rank')} on {_nodes(job)})")
            print(f"job     {job_id}")
            _print_places(job)
            for note in notes:
                print(f"note    {note}")

            print(_how_to_follow(folder.name))
        case SubmittedArray(elements, job_ids, array_folder):
            array_id = job_ids[0].partition("_")[0]
            size = f"{counted(len(elements), 'job')} on {_nodes(elements[0])} each"
            if elements[0].array_parallelism:
                size += f", {elements[0].array_parallelism} at once"
            print(f"\narray   {array_id}  ({size})")
            print(f"script  {array_folder}/{RunFolder.script_file}")
        case AdoptedJob(run, job_id, is_element):
            print(
                f"SLURM already has job {job_id} of {run}, which the run folder did not record. "
                "It is recorded now, and no other job was submitted for this run."
            )
            if not is_element:
                print(_how_to_follow(run))


def _nodes(job: Job) -> str:
    """Return the nodes of a job as a phrase: `3 nodes and 1 spare of a100x8`."""
    nodes = counted(job.resources.nodes, "node")
    if job.resources.spare_nodes:
        nodes += f" and {counted(job.resources.spare_nodes, 'spare')}"

    return f"{nodes} of {job.cluster.name}"


def _print_places(job: Job) -> None:
    """Print the folder of a run and the version of its code, or a tip if the project is not in git."""
    folder = RunFolder(job.run_dir)
    print(f"folder  {folder.path}")
    # With snapshot=false, the run has no file with the version of its code.
    with suppress(OSError):
        note = read_regular(folder.code_note_file).decode().strip()
        if is_there(folder.code_dir) or not _lacks_repository(job):
            print(f"code    {note}")
        elif not _has_other_runs(folder):
            print("tip     run `git init` in the project: then each run keeps a copy of its code.")


def _lacks_repository(job: Job) -> bool:
    """Return whether the project of a job is not in a git repository."""
    trouble = git.trouble_of(job.project_dir)
    return trouble is not None and trouble.kind == "no_repository"


def _has_other_runs(folder: RunFolder) -> bool:
    """Return whether there is another run beside this run folder."""
    others = [path for path in folder.path.parent.iterdir() if path != folder.path]
    return any(RunFolder(path).config_file.is_file() for path in others)


def _how_to_follow(name: str) -> str:
    """Return two lines with the commands that show the status and the logs of a run."""
    return f"follow  slurmddp status {name}\n        slurmddp logs -f {name}"


def _print_finished(event: AlreadyFinished) -> None:
    """Print that a run has finished, and how to start it again from step 0 or to train it longer."""
    status = event.status
    print(f"{status.name} is finished: {status.detail}.")
    if status.report is not None:
        print(f"report  {status.report}")

    # For a script the whole command is shown: after the name of the script, `--again` would be the script's.
    again = "--again"
    script = own_script(event.job.program.config["program"])
    if script:
        again = f"`slurmddp run --again {script} ...`"

    if event.code_changes:
        print(f"{event.code_changes} {again} runs the new code.")
    elif script:
        print(f"{again} starts it once more; with other arguments, the script is another run.")
    else:
        print(f"{again} starts it once more from step 0; another seed, model or train.steps is another run.")
        print(f"`slurmddp resume {status.name} train.steps=...` trains this one further.")


def _end(job: Job, exit_code: int, status: RunStatus) -> Sequence[str]:
    """Return the lines about the end of a run on this machine: its results, or how to start it again."""
    folder = RunFolder(job.run_dir)
    if exit_code == EXIT_FINISHED:
        return _results(folder, status)

    outcome = "Stopped" if exit_code == EXIT_STOPPED else "Killed"
    if not latest_name(folder) and job.program.config["program"].get("script"):
        return [f"{outcome}. {_next_start(job, folder)}"]
    if exit_code == EXIT_STOPPED:
        step = f" at step {status.saved_step}" if status.saved_step is not None else ""
        return [f"Stopped{step}; the same command resumes from there."]
    return ["Killed; the same command resumes from the last checkpoint."]


def _next_start(job: Job, folder: RunFolder) -> str:
    """Return a sentence about the next start of a script that has saved nothing in the run folder."""
    again = "The same command starts the script again"
    pattern = job.program.config["program"].get("checkpoints")
    if not pattern:
        return f"{again}; slurmddp knows its checkpoints only if program.checkpoints=PATH names them."
    if saved(folder, job.project_dir, job.saved_files).files:
        # slurmddp promises no resume here: the script may have been stopped while it wrote such a file.
        return f"{again}. Files match program.checkpoints, but slurmddp can't check them: {job.saved_files}"

    return f"{again}; no saved file matches program.checkpoints={pattern}."


def _results(folder: RunFolder, status: RunStatus) -> Sequence[str]:
    """Return the lines about a finished run: steps, losses, a sample, and the paths of its results."""
    from slurmddp.runs.status.curve_viewers import curve_commands
    from slurmddp.runs.status.metrics import read

    line = "Finished."
    if status.step is not None:
        line = f"Finished: {status.step} steps"
        losses = read(folder).held_out.values
        if len(losses) > 1:
            line += f", held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        line += "."

    lines = [line]
    sample = read_text(folder.sample_file)
    if sample:
        lines += [
            "",
            "What the model writes:",
            *(f"    {line}" for line in sample.strip().splitlines()),
            "",
        ]
    if status.report is not None:
        lines.append(f"report      {status.report}")

    lines += [f"curves      {command}" for command in curve_commands(folder)]
    latest = latest_name(folder)
    if latest:
        lines.append(f"checkpoint  {folder.checkpoints_dir / latest}")

    return lines
