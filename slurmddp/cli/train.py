"""Train here, or submit to a cluster with +cluster=NAME.

Settings are written key=value. Groups (model, data, optimizer, scheduler, strategy, cluster) choose a file of
your project's conf/ or of slurmddp's own: model=NAME. Code of your own comes in by its import path:
model._target_=package.module.Name. The same command finds the same run and goes on with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli.errors_text import EXIT_CODES
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError, SlurmError
from slurmddp.runs.folder import RunFolder
from slurmddp.runs.table import counted
from slurmddp.spec import GlobalBatch

if TYPE_CHECKING:
    from slurmddp.runs.status import RunStatus
    from slurmddp.spec import Job

OWN_TRAINER = "slurmddp.training.trainer.train"
"""The program whose progress is in its metrics; of any other a local run shows what rank 0 prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slurmddp train`, and what the settings mean to its help."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings; see below")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script that would be sent, send nothing"
    )
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration, start nothing")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="put an existing run folder aside (NAME.old-1, ...) and start anew",
    )
    parser.epilog = f"{_settings()}\n\n{EXIT_CODES}"


def run(args: argparse.Namespace) -> int:
    """Train, submit, or show what would be done; return the exit code."""
    from slurmddp import config

    project_dir = Path.cwd()
    composed = config.compose(args.overrides, project_dir)
    here = 0 if composed["cluster"] else gpus_here(os.environ)
    job = config.build_job(composed, project_dir=project_dir, overrides=args.overrides, gpus_here=here)
    if args.cfg:
        print(_yaml(job.program.config), end="")
        return EXIT_FINISHED
    if args.dry_run:
        return _dry_run(job)
    return _begin(job, fresh=args.fresh)


def _settings() -> str:
    from slurmddp.config_schema import POLICY, TOP, TRAIN

    lines = ["settings (what a key is set to by default: slurmddp train --cfg):"]
    for prefix, fields in (("", TOP), ("train.", TRAIN), ("policy.", POLICY)):
        lines += [f"  {prefix + key:<29} {field.doc}" for key, field in fields.items()]
    return "\n".join(lines)


def gpus_here(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs this machine shows, without asking torch."""
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return present if chosen is None else min(present, len([one for one in chosen.split(",") if one.strip()]))


def _yaml(config: Mapping[str, object]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def _dry_run(job: Job) -> int:
    if job.launcher == "local":
        _fits_here(job)
        print(_local_commands(job))
        return EXIT_FINISHED
    from slurmddp.slurm.script import render

    sys.stdout.write(render(job))
    for note in [*_left_idle(job), *_limits(job)]:
        print(f"slurmddp: note: {note}", file=sys.stderr)
    return EXIT_FINISHED


def _left_idle(job: Job) -> list[str]:
    """Return what is to be known of an elastic job whose steps one node less could not share."""
    left, samples = job.resources.nodes - 1, job.program.config["train"]["global_batch"]
    if not job.elastic or not left:
        return []
    used = GlobalBatch(samples).most_nodes(left, job.resources.ranks_per_node)
    if used == left:
        return []
    return [
        f"When this job loses a node, {used} of the other {left} go on: {left} nodes can't share the "
        f"{samples} samples of a step evenly. Another train.global_batch may let them."
    ]


def _fits_here(job: Job) -> None:
    """Refuse a local run of far more ranks than this machine can carry, before anything is written."""
    from slurmddp.launchers import linux, local

    local.check_size(job.resources.world_size, linux.usable_cpus())


def _limits(job: Job) -> list[str]:
    """Return whether the SLURM at hand would take the job, in sentences; nothing where there is none."""
    from slurmddp.slurm import client, limits

    if not client.on_path():
        return []
    try:
        found = limits.check(job, client.SlurmClient(timeout_s=10).limits())
    except SlurmError:
        return ["SLURM does not answer here, so nobody knows whether it would take this job."]
    return [f"This SLURM would never start the job: {problem}" for problem in found]


def _local_commands(job: Job) -> str:
    """Return the shell lines that do what a local run does: one agent per pretended node."""
    from slurmddp.environments.present import emulated_step

    nodes = job.resources.all_nodes
    lines = [
        f"# {job.run_name}: {counted(job.resources.world_size, 'rank')} on this machine, "
        f"{counted(nodes, 'agent')} of {counted(job.resources.ranks_per_node, 'rank')} each",
        f"cd {shlex.quote(str(job.project_dir))}",
    ]
    for node in range(nodes):
        step = {**job.cluster.env, **emulated_step(nodes, node, "local", job.run_dir, 0)}
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(step.items())]
        command = shlex.join([job.python, "-m", "slurmddp.launchers.agent", str(job.run_dir)])
        lines.append(" \\\n  ".join([*settings, f"{command} &" if node < nodes - 1 else command]))
    return "\n".join(lines)


def _begin(job: Job, *, fresh: bool) -> int:
    folder = RunFolder(job.run_dir)
    if folder.path.exists():
        status = _status(folder)
        untold = status.state == "unknown" and status.job_id is None
        if status.active and not (fresh and untold):
            return _already_active(status)
        if fresh:
            aside = put_aside(folder)
            print(f"The run so far is kept as {aside}.")
        elif status.state == "finished":
            return _already_finished(status)
        elif status.attempts:
            print(_goes_on(status))
    return start_job(job)


def start_job(job: Job) -> int:
    """Submit a job, or run it on this machine to its end, and return the exit code."""
    return _submit(job) if job.launcher == "slurm" else _train_here(job)


def _status(folder: RunFolder) -> RunStatus:
    from slurmddp.runs.status import status
    from slurmddp.slurm import client

    if not folder.config_file.is_file():
        raise ConfigError(
            f"{folder.path} is there but is no run folder: it has no config.yaml.",
            hint="Remove it, or choose another name= or runs_dir=.",
        )
    return status(folder, client.SlurmClient() if client.on_path() else None)


def _goes_on(status: RunStatus) -> str:
    where = f"goes on from step {status.saved_step}" if status.saved_step else "starts again"
    return f"{status.name} is there already ({status.state}); it {where}."


def _already_active(status: RunStatus) -> int:
    if status.state == "unknown" and status.job_id is None:
        raise ConfigError(
            f"How {status.name} stands can't be told: {status.detail}.",
            hint="Mend that file, or start the run anew with --fresh.",
        )
    if status.state == "unknown":
        raise SlurmError(
            f"Whether job {status.job_id} of {status.name} still runs can't be seen: {status.detail}.",
            hint="Try again when SLURM answers; nothing was submitted.",
        )
    if status.state == "cancelled":
        raise ConfigError(
            f"{status.name} is cancelled: {status.detail}.",
            hint="Try again in a moment; nothing was submitted.",
        )
    print(f"{status.name} is {status.state} already: {status.detail}. Nothing was started twice.")
    print(_how_to_follow(status.name))
    return EXIT_FINISHED


def _already_finished(status: RunStatus) -> int:
    print(f"{status.name} is finished: {status.detail}.")
    if status.report is not None:
        print(f"report  {status.report}")
    print("Start it anew with --fresh, or change a setting for another run.")
    return EXIT_FINISHED


def put_aside(folder: RunFolder) -> Path:
    """Move a run folder to the first free `NAME.old-N` beside it and return its new place."""
    from slurmddp.runs.owner import refuse_foreign

    refuse_foreign(folder.path)
    number = 1
    while (aside := folder.path.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.path.rename(aside)
    return aside


def _submit(job: Job) -> int:
    from slurmddp.launchers import submission, submitter
    from slurmddp.runs.index import remember
    from slurmddp.runs.prepare import prepare
    from slurmddp.slurm import client
    from slurmddp.slurm.script import render

    script = render(job)
    if not client.on_path():
        raise SlurmError(
            "There is no sbatch on this machine's PATH, so the job can't be submitted from here.",
            hint="Go to a login node of the cluster, start a SLURM here with `slurmddp sandbox up`, or train "
            "here with launcher=local. Nothing was written.",
        )
    slurm = client.SlurmClient()
    submission.refuse_misfit(job, slurm)
    is_new = not job.run_dir.exists()
    folder = prepare(job, script)
    try:
        job_id = submitter.build(job.submitter, slurm).submit(job)
    except (SlurmError, ConfigError) as error:
        if is_new and not getattr(error, "may_be_queued", False):
            _take_away(folder)
        raise
    remember(folder)
    spares = f" and {counted(job.resources.spare_nodes, 'spare')}" if job.resources.spare_nodes else ""
    where = f"{counted(job.resources.nodes, 'node')}{spares} of {job.cluster.name}"
    print(f"run     {folder.name}  ({counted(job.resources.world_size, 'rank')} on {where})")
    print(f"job     {job_id}")
    print(f"folder  {folder.path}")
    print(_how_to_follow(folder.name))
    return EXIT_FINISHED


def _take_away(folder: RunFolder) -> None:
    """Leave nothing of a run that was refused, nor the folder of runs if it was made for it."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):
        folder.path.parent.rmdir()


def _how_to_follow(name: str) -> str:
    return f"follow  slurmddp status {name}\n        slurmddp logs -f {name}"


def _train_here(job: Job) -> int:
    from slurmddp.cli.display import RunView
    from slurmddp.launchers import local
    from slurmddp.runs.index import remember
    from slurmddp.runs.prepare import prepare

    _fits_here(job)
    folder = prepare(job, None)
    remember(folder)
    print(f"run     {folder.name}  ({counted(job.resources.world_size, 'rank')} on this machine)")
    print(f"folder  {folder.path}", flush=True)
    config = job.program.config
    own = bool(config["program"].get("script")) or job.program.target != OWN_TRAINER
    with RunView(folder, config["train"]["steps"], output=own) as view:
        training = local.LocalRun(job, folder, say=view.say)
        training.start()
        code = training.wait(view.tick)
    return _conclude(folder, code)


def _conclude(folder: RunFolder, code: int) -> int:
    """Say how a local run ended and where its results are."""
    from slurmddp.runs.status import status

    stands = status(folder, None)
    if code == EXIT_STOPPED:
        at = f" at step {stands.saved_step}" if stands.saved_step is not None else ""
        print(f"Stopped{at}; the same command goes on from there.")
    elif code == EXIT_FINISHED:
        print("\n".join(_results(folder, stands)))
    else:
        print("Killed; the same command goes on from the last checkpoint.")
    return code


def _results(folder: RunFolder, stands: RunStatus) -> Sequence[str]:
    from slurmddp.runs.metrics import read

    held_out = read(folder).held_out.values
    fell = f", held-out loss {held_out[0]:.3f} -> {held_out[-1]:.3f}" if len(held_out) > 1 else ""
    lines = ["Finished." if stands.step is None else f"Finished: {stands.step} steps{fell}."]
    if folder.sample_file.exists():
        sample = folder.sample_file.read_text(encoding="utf-8", errors="replace").strip()
        lines += ["", "What the model writes:", *(f"    {line}" for line in sample.splitlines()), ""]
    if stands.report is not None:
        lines.append(f"report      {stands.report}")
    latest = folder.checkpoints_dir / "latest"
    if latest.exists():
        lines.append(f"checkpoint  {folder.checkpoints_dir / latest.read_text(encoding='utf-8').strip()}")
    return lines
