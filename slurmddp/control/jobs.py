"""Make jobs from typed settings, and settings from the command line of a program."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.control.events import Note, Report, ignore
from slurmddp.errors import ConfigError, UsageError
from slurmddp.host.working_folder import working_folder

if TYPE_CHECKING:
    from slurmddp.config.composition.sources import Sources
    from slurmddp.settings.spec import Job


def jobs_of(
    points: Iterable[Sequence[str]],
    sources: Sources | None = None,
    check: Callable[[Job], object] = lambda job: None,
    *,
    report: Report = ignore,
    noted: set[str] | None = None,
) -> list[Job]:
    """Compose and check the configuration of each job.

    Args:
        points: the typed settings of each job.
        sources: the config files and folders; None: conf/slurmddp.yaml of the project.
        check: raises ConfigError if a job must not be started.
        report: called with a `Note` for each setting without effect.
        noted: the notes that earlier calls have reported. They are not reported again, and the notes of this
            call are added to the set.

    Returns:
        The jobs, in the order of `points`.

    Raises:
        ConfigError: a setting is unknown or has a wrong value.

    Example:
        (job,) = jobs_of([["+cluster=a100x8", "nodes=3"]])
    """
    from slurmddp.config.checks.misspelled_options import misspelled_options
    from slurmddp.config.checks.nccl_variables import misspelled
    from slurmddp.config.checks.sbatch_environment import unused
    from slurmddp.config.composition.compose import CompositionCache, are_independent, compose, unread
    from slurmddp.config.composition.sources import DEFAULT
    from slurmddp.config.job import build_job
    from slurmddp.config.variants import Variants
    from slurmddp.slurm.limits.nodes import beyond_nodelist

    project_dir = working_folder()
    sources = sources or DEFAULT
    all_overrides = list(points)
    is_sweep = len(all_overrides) > 1
    cache: CompositionCache = {}
    variants = Variants(lambda overrides, keys: are_independent(overrides, keys, project_dir, sources, cache))

    jobs: list[Job] = []
    notes: list[str] = []
    for overrides in all_overrides:
        # A composition by Hydra is slow. Points that differ from an earlier one only in values that no check
        # reads get a copy of its job with these values.
        job = variants.derive(overrides)
        if job is None:
            config = compose(overrides, project_dir, sources, cache=cache if is_sweep else None)
            gpus = 0 if config["cluster"] else visible_gpus(os.environ)
            job = build_job(config, project_dir=project_dir, overrides=overrides, gpus_here=gpus)
            if is_sweep:
                variants.add(overrides, job)

            notes += unread(config, project_dir, sources)
            notes += [*unused(config, os.environ), *misspelled(config, os.environ)]
            notes += [*beyond_nodelist(job), *misspelled_options(config)]

        check(job)
        jobs.append(job)

    noted = set() if noted is None else noted
    for note in dict.fromkeys(notes):
        if note not in noted:
            report(Note(note))

    noted.update(notes)
    return jobs


def settings_of_program(program: Sequence[str], keys: Collection[str] = ()) -> list[str]:
    """Return the settings `program.script` and `program.args` of a job that runs a command line.

    Args:
        program: the command line of the program: `[-m] PROGRAM ARGUMENT...`.
        keys: keys of the configuration to which an argument may refer as `${KEY}`.

    Raises:
        UsageError: the program is missing.
        ConfigError: an argument is `???`.
    """
    # Imported here, because the import of Hydra's grammar, which `arguments` uses, is slow.
    from slurmddp.settings.arguments import literal
    from slurmddp.settings.spec import MODULE

    if program[:1] == ["-m"]:
        program = [MODULE + program[1], *program[2:]] if program[1:] else []

    if not program:
        raise UsageError(
            "slurmddp run needs a script, a command, or -m with a module: slurmddp run train.py --lr 1e-3"
        )
    if "???" in program[1:]:
        raise ConfigError(
            "The program has the argument ???, which means a missing value in a configuration, so it "
            "can't be passed on.",
            hint="Start the program from a shell script that passes ???, or set the value in the program.",
        )

    items = ",".join(literal(word, keys) for word in program[1:])
    return [f"program.script={literal(program[0])}", f"program.args=[{items}]"]


def own_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys of settings that slurmddp does not have, such as `lr` for `+lr=0.1`.

    Arguments of the program may refer to them: `${lr}`.
    """
    from slurmddp.settings.arguments import key_of
    from slurmddp.settings.keys import TOP

    return {key for key in map(key_of, overrides) if key.partition(".")[0] not in TOP}


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs of this machine that a program may use, without importing torch.

    The count is the number of device files /dev/nvidiaN, or of the devices in `CUDA_VISIBLE_DEVICES` if these
    are fewer.

    Args:
        environ: the environment of the program.
        devices: the folder of device files.
    """
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([device for device in chosen.split(",") if device.strip()]))
