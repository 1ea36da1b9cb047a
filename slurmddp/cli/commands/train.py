"""Train here, or submit to a cluster with +cluster=NAME.

Settings are written key=value. A group (model, data, loss, optimizer, scheduler, strategy, cluster) chooses a
file of your project's conf/, or of slurmddp's: model=NAME. An import path names code of your own:
model._target_=package.module.Name. The same command finds the same run and resumes it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli import hydra_flags, start_run
from slurmddp.cli.messages import EXIT_CODES
from slurmddp.errors import EXIT_FINISHED
from slurmddp.host.working_folder import working_folder
from slurmddp.runs import ssh_runs
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import own_script

if TYPE_CHECKING:
    from slurmddp.cli.start_array import ArrayStart
    from slurmddp.config.composition.sources import Sources
    from slurmddp.runs.status.run_status import RunStatus
    from slurmddp.spec import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp train`, and list the settings in its help."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings; see below")
    hydra_flags.add_multirun(parser, "-m")
    add_flags(parser)
    parser.epilog = f"{_settings()}\n\n{EXIT_CODES}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `slurmddp train` and `slurmddp run` share."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script that would be submitted; submit nothing"
    )
    add_check(parser)
    parser.add_argument(
        "--again",
        action="store_true",
        help="put an existing run folder aside (NAME.old-1, ...) and start at step 0; not for an active run",
    )
    hydra_flags.add_arguments(parser)


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--check` of the commands that submit a job."""
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the job with the limits of this SLURM and ask sbatch; submit nothing",
    )


def run(args: argparse.Namespace, check: Callable[[Job], object] = lambda job: None) -> int:
    """Train, submit, or print the script or configuration; return the exit code.

    Args:
        args: the words and flags of the command line.
        check: raises ConfigError if the job can't be started.
    """
    from slurmddp.cli import check_job

    project_dir = working_folder()
    sources = hydra_flags.sources(args)
    if args.info:
        return hydra_flags.show_info(args, project_dir, sources)
    if not getattr(args, "multirun", False):
        (job,) = jobs_of([args.overrides], sources, check)
        if args.cfg:
            return hydra_flags.show_config(args, job, sources)
        if args.dry_run:
            return _show_script(job)
        return check_job.show([[job]]) if args.check else begin(job, again=args.again)
    from slurmddp.cli import start_sweep
    from slurmddp.config.composition import search_space
    from slurmddp.config.composition.sweep import points

    jobs_of_points = partial(jobs_of, sources=sources, check=check, printed=set())
    begin_each = partial(begin, again=args.again)
    if search_space.is_search(args.overrides):
        from slurmddp.cli import start_search  # Optuna is optional.

        search = search_space.read(args.overrides, project_dir, sources)
        if not (args.cfg or args.dry_run or args.check):
            return start_search.start(search, jobs_of_points, begin_each, again=args.again)
        jobs, name = start_search.first_jobs(search, jobs_of_points)
    else:
        jobs = jobs_of_points(points(args.overrides, project_dir, sources))
        name = start_sweep.name_of(jobs)
    if args.cfg:
        return max(hydra_flags.show_config(args, job, sources, many=True) for job in jobs)
    if args.dry_run:
        return start_sweep.show(jobs, name, _show_script)
    if args.check:
        return check_job.show(start_sweep.groups(jobs))
    return start_sweep.start(jobs, begin_each)


def jobs_of(
    points: Iterable[Sequence[str]],
    sources: Sources | None = None,
    check: Callable[[Job], object] = lambda job: None,
    printed: set[str] | None = None,
) -> list[Job]:
    """Return the job of each command line, and print notes about settings without effect.

    Args:
        points: the settings of each job.
        sources: the flags that name other places of files.
        check: raises ConfigError if a job can't be started.
        printed: notes that were printed before; new ones are added.
    """
    from slurmddp.config.checks.nccl_variables import misspelled
    from slurmddp.config.checks.sbatch_environment import unused
    from slurmddp.config.checks.sbatch_options import misspelled_options
    from slurmddp.config.composition.compose import Shared, are_independent, compose, unread
    from slurmddp.config.composition.sources import DEFAULT
    from slurmddp.config.job import build_job
    from slurmddp.config.variants import Variants
    from slurmddp.slurm.limits.nodes import beyond_nodelist

    project_dir = working_folder()
    sources, jobs = sources or DEFAULT, []
    notes: list[str] = []
    lines = list(points)
    shared: Shared = {}
    variants = Variants(lambda words, keys: are_independent(words, keys, project_dir, sources, shared))
    for words in lines:
        job = variants.derive(words)
        if job is None:
            composed = compose(words, project_dir, sources, shared=shared if len(lines) > 1 else None)
            here = 0 if composed["cluster"] else start_run.gpus_here(os.environ)
            job = build_job(composed, project_dir=project_dir, overrides=words, gpus_here=here)
            if len(lines) > 1:
                variants.add(words, job)
            notes += unread(composed, project_dir, sources)
            notes += [*unused(composed, os.environ), *misspelled(composed, os.environ)]
            notes += [*beyond_nodelist(job), *misspelled_options(composed)]
        check(job)
        jobs.append(job)
    printed = set() if printed is None else printed
    for note in dict.fromkeys(notes):
        if note not in printed:
            print(f"slurmddp: note: {note}", file=sys.stderr)
    printed.update(notes)
    return jobs


def _show_script(job: Job) -> int:
    from slurmddp.cli.dry_run import show

    if job.launcher == "local":
        start_run.fits_here(job)
    return show(job)


def _settings() -> str:
    from slurmddp.config.keys import every_key

    shown = [one for one in every_key().values() if not one.name.startswith(("cluster.", "strategy."))]
    width = max(len(one.name) for one in shown)
    lines = [f"  {one.name:<{width}}  {one.doc} ({one.shown_default})".removesuffix(" ()") for one in shown]
    return "\n".join(["settings, with their defaults (`slurmddp train --cfg` shows all):", *lines])


def begin(job: Job, *, again: bool = False, array: ArrayStart | None = None) -> int:
    """Create the run folder or take the one that is there, and start the job unless the run has one.

    If there is an `array`, the job becomes an element of it, and `array.submit` starts it.
    """
    from slurmddp.control.refusals import refuse_extended, refuse_other_run
    from slurmddp.control.status import status_of
    from slurmddp.runs.folder.code_changes import changed_since
    from slurmddp.runs.folder.history import is_unanswered

    folder = RunFolder(job.run_dir)
    create = array.create if array else start_run.create
    is_new = not folder.path.exists() and create(job)
    start = array.add if array else start_run.start_job
    with start_run.hold(folder) as lock:
        if is_new and lock.fileno >= 0 and folder.is_untouched:
            return start(job, lock, is_new=True)
        refuse_other_run(job)
        found = status_of(folder)
        if again and not is_new:
            refuse_put_aside(folder, found, is_held_elsewhere=lock.fileno < 0)
            print(f"The run so far is kept as {put_aside(folder)}.")
            return begin(job, array=array)
        if lock.fileno < 0 or (found.active and not is_unanswered(folder)):
            code = start_run.already_active(found)
            if changed := changed_since(folder, job):
                print(changed)
            return code
        if found.state == "finished":
            return _already_finished(found, job)
        refuse_extended(job)
        if found.attempts:
            print(_goes_on(found))
        return start(job, lock, is_new=is_new)


def refuse_put_aside(folder: RunFolder, found: RunStatus, *, is_held_elsewhere: bool = False) -> None:
    """Raise an error if a run that is to be put aside has, or may have, a job or process."""
    from slurmddp.control.refusals import refuse_active
    from slurmddp.control.status import status_of
    from slurmddp.launchers.submit import sbatch
    from slurmddp.runs.folder.history import is_unanswered
    from slurmddp.slurm import client

    if is_unanswered(folder) and sbatch.settle(folder, client.SlurmClient(), print) is not None:
        found = status_of(folder)
    is_unreadable = found.state == "unknown" and found.job_id is None
    if is_held_elsewhere or not (is_unreadable or is_unanswered(folder)):
        refuse_active(
            found,
            unchanged="An active run can't be put aside; nothing was changed.",
            hint=f"First `slurmddp cancel {found.name}`, then start it with --again.",
        )


def _goes_on(found: RunStatus) -> str:
    where = f"resumes from step {found.saved_step}" if found.saved_step else "starts again"
    return f"{found.name} exists already ({found.state}); it {where}."


def _already_finished(found: RunStatus, job: Job) -> int:
    from slurmddp.runs.folder.code_changes import changed_since

    ssh_runs.report_started([found.name])
    print(f"{found.name} is finished: {found.detail}.")
    if found.report is not None:
        print(f"report  {found.report}")

    again = _again(job)
    if changed := changed_since(RunFolder(found.path), job):
        print(f"{changed} {again} runs the new code.")
    elif own_script(job.program.config["program"]):
        print(f"{again} starts it once more; other arguments of the script are another run.")
    else:
        print(f"{again} starts it once more from step 0; another seed, model or train.steps is another run.")
        print(f"`slurmddp resume {found.name} train.steps=...` trains this one further.")
    return EXIT_FINISHED


def _again(job: Job) -> str:
    """Return how to start a finished run once more; after a script, `--again` would be its argument."""
    script = own_script(job.program.config["program"])
    return f"`slurmddp run --again {script} ...`" if script else "--again"


def put_aside(folder: RunFolder) -> Path:
    """Move a run folder to the first free `NAME.old-N` beside it and return its new place."""
    from slurmddp.runs.folder.create import free_name
    from slurmddp.runs.folder.owner import refuse_foreign

    refuse_foreign(folder.path)
    aside = free_name(folder.path)
    folder.path.rename(aside)
    return aside
