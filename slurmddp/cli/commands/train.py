"""Train on this machine, or submit to a cluster with +cluster=NAME.

Type settings as key=value. A group (model, data, loss, optimizer, scheduler, strategy, cluster) chooses a
file of your project's conf/ or of slurmddp: model=NAME. An import path chooses your own code:
model._target_=package.module.Name. The same command finds the same run and resumes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from slurmddp.cli import hydra_flags
from slurmddp.cli.json_output import add_json, refuse_json_of_text, start_and_print
from slurmddp.cli.messages import EXIT_CODES_HELP, print_event
from slurmddp.control.jobs import jobs_of
from slurmddp.host.working_folder import working_folder

if TYPE_CHECKING:
    from slurmddp.config.composition.sources import Sources
    from slurmddp.settings.spec import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp train`, and list the settings in its help."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, listed below")
    hydra_flags.add_multirun(parser, "-m")
    add_flags(parser)
    add_json(parser)
    parser.epilog = f"{_settings()}\n\n{EXIT_CODES_HELP}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `slurmddp train` and `slurmddp run` share."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the batch script, or the commands of a local run; start nothing",
    )
    add_check(parser)
    parser.add_argument(
        "--again",
        action="store_true",
        help="rename an existing run folder to NAME.old-N, and start at step 0; refused for an active run",
    )
    hydra_flags.add_arguments(parser)


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--check` of the commands that submit a job."""
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the job by the limits of this SLURM and by `sbatch --test-only`; submit nothing",
    )


def run(args: argparse.Namespace, check: Callable[[Job], object] = lambda job: None) -> int:
    """Train, submit, or print the script or configuration; return the exit code.

    Args:
        args: the parsed command line.
        check: called with each job before it starts; raises ConfigError if the job must not be started.
    """
    refuse_json_of_text(args)
    sources = hydra_flags.sources(args)
    if args.info:
        return hydra_flags.show_info(args, working_folder(), sources)

    jobs_of_points = partial(jobs_of, sources=sources, check=check, report=print_event, noted=set())
    if getattr(args, "multirun", False):
        return _run_many(args, jobs_of_points, sources)

    (job,) = jobs_of_points([args.overrides])
    if args.cfg:
        return hydra_flags.show_config(args, job, sources)
    if args.dry_run:
        from slurmddp.cli import dry_run

        return dry_run.show([job], as_json=args.json)
    if args.check:
        from slurmddp.cli import check_job

        return check_job.show([[job]], as_json=args.json)

    from slurmddp.cli.start_view import StartView
    from slurmddp.control.start import start

    return start_and_print(args, lambda: start(job, again=args.again, report=StartView()))


def _run_many(args: argparse.Namespace, jobs_of_points: Callable[..., list[Job]], sources: Sources) -> int:
    """Start a sweep or a search, or print or check its jobs; return the exit code.

    Args:
        args: the parsed command line.
        jobs_of_points: returns the jobs of points, each given by its settings.
        sources: the config files and folders.
    """
    from slurmddp.cli import check_job, dry_run
    from slurmddp.cli.start_view import StartView
    from slurmddp.config.composition import search_space
    from slurmddp.config.composition.sweep import points
    from slurmddp.control import sweep
    from slurmddp.control.start import groups

    if search_space.is_search(args.overrides):
        from slurmddp.cli.search_view import SearchView

        # Imported here, because only a search needs this module.
        from slurmddp.control import search as trials

        search = search_space.read(args.overrides, working_folder(), sources)
        if not (args.cfg or args.dry_run or args.check):
            return start_and_print(
                args,
                lambda: trials.search_best(search, jobs_of_points, again=args.again, report=SearchView()),
            )

        jobs, name = trials.first_jobs(search, jobs_of_points)
    else:
        jobs = jobs_of_points(points(args.overrides, working_folder(), sources))
        name = sweep.name_of(jobs)

    if args.cfg:
        return max(hydra_flags.show_config(args, job, sources, many=True) for job in jobs)
    if args.dry_run:
        return dry_run.show(jobs, name, as_json=args.json)
    if args.check:
        return check_job.show(groups(jobs), as_json=args.json)
    return start_and_print(args, lambda: sweep.start_sweep(jobs, again=args.again, report=StartView()))


def _settings() -> str:
    """Return the table of settings for `slurmddp train --help`: keys, meanings and defaults."""
    from slurmddp.settings.keys import every_key

    keys = [key for key in every_key().values() if not key.name.startswith(("cluster.", "strategy."))]
    width = max(len(key.name) for key in keys)
    lines = [f"  {key.name:<{width}}  {key.doc} ({key.shown_default})".removesuffix(" ()") for key in keys]

    return "\n".join(
        ["settings, with their defaults (`slurmddp train --cfg` prints the values of all):", *lines]
    )
