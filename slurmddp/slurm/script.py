"""Render a job as the batch script that SLURM runs, with its settings; pure: equal jobs give equal bytes.

The text of the script is in `templates/job.sbatch.j2`. Values of the configuration are quoted: for sbatch in
the header, and for the shell in the lines after it. Only `setup` lines are shell code and are written
unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from slurmddp.environments.names import (
    ATTEMPT_VARIABLE,
    PYTHON_VARIABLE,
    RUN_DIR_VARIABLE,
    SECRET_VARIABLE,
)
from slurmddp.environments.srun_options import STEP_OPTIONS
from slurmddp.errors import ConfigError
from slurmddp.settings.spec import Job
from slurmddp.slurm.job_script import job_name
from slurmddp.slurm.sbatch_options import Option, lists_gpus, sbatch_options, srun_options
from slurmddp.templates import template

_OF_A_TASK = (
    "cpus-per-gpu", "cpus-per-task", "gpus-per-socket", "gpus-per-task", "mem-per-cpu", "mem-per-gpu",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "tres-per-task",
)  # fmt: skip
"""Options of sbatch that srun also reads from environment variables, such as `SLURM_CPUS_PER_GPU`."""
_SCRIPT_VARIABLES = frozenset({RUN_DIR_VARIABLE, ATTEMPT_VARIABLE, SECRET_VARIABLE, PYTHON_VARIABLE})
"""Variables that the batch script sets itself."""


def render(job: Job) -> str:
    """Return the batch script of `job`; raise ConfigError for values that no script can hold."""
    # The title is written into a comment, which a line break in the name would end.
    title = job.run_name if re.fullmatch(r"[\w.+=-]+", job.run_name) else ""
    return template("job.sbatch.j2").render(
        title=title,
        header=_header(job),
        run=_shell("run_dir", str(job.run_dir)),
        logs=_shell("run_dir", f"{job.run_dir}/logs/attempt-"),
        # srun replaces patterns such as %n in the name of an output file, so each % is doubled.
        output=_shell("run_dir", f"{job.run_dir}/logs/attempt-".replace("%", "%%")),
        project=_shell("project_dir", str(job.project_dir)),
        python=_shell("python", job.python),
        tolerates_node_loss=job.tolerates_node_loss,
        cpus=job.resources.cpus_per_node,
        step=_step(job),
        setup=[_setup_line(line) for line in job.cluster.setup],
        env=_exports(job),
        srun=[_argument(name, value) for name, value in srun_options(job).items()],
        every_step=" ".join(STEP_OPTIONS),
        is_staged=_is_staged(job),
    )


def render_array(jobs: Sequence[Job], folder: Path) -> str:
    """Return the batch script of an array; each element runs the batch script in its run folder.

    Args:
        jobs: the jobs of the elements, in the order of their indexes; all have the same options.
        folder: the folder of the script, beside the run folders.
    """
    indexes = f"0-{len(jobs) - 1}"
    if jobs[0].array_parallelism:
        indexes += f"%{jobs[0].array_parallelism}"
    options = {
        **sbatch_options(jobs[0]),
        "array": indexes,
        "job-name": job_name(folder.name.removeprefix(".")),
        "output": str(folder).replace("%", "%%") + "/slurm-%A_%a.out",
    }
    return template("array.sbatch.j2").render(
        header=[_directive(name, value) for name, value in sorted(options.items())],
        array=_shell("runs_dir", str(folder)),
        runs=_shell("runs_dir", str(folder.parent)),
    )


def settings(job: Job) -> dict[str, object]:
    """Return a job's settings for the batch step: the fields of `slurmddp.batch.attempt.BatchSettings`."""
    policy = job.policy
    return {
        "name": job_name(job.run_name),
        "project": str(job.project_dir),
        "nodes": job.resources.all_nodes,
        "setup": bool(job.cluster.setup),
        "checkpoints": job.saved_files,
        "exclude": str(job.cluster.sbatch.get("exclude") or ""),
        "exclude_failed_h": policy.exclude_failed_h,
        "saves_at_stop": job.program.is_own_trainer,
        "tolerates_node_loss": job.tolerates_node_loss,
        "signal_lead_s": policy.signal_lead_s,
        "grace_s": policy.grace_s,
        "requeue": policy.requeue,
        "max_restarts": policy.max_restarts,
        "max_requeues_without_progress": policy.max_requeues_without_progress,
        "on_event": [*policy.on_event],
        "python": job.python,
        "stage": job.cluster.stage or "",
        "unset": _misleading(job),
    }


def outline(job: Job) -> list[str]:
    """Return the lines of the script that depend on settings: header, `export`, `setup` lines, and srun."""
    srun = [_argument(name, value) for name, value in srun_options(job).items()]
    python = _shell("python", job.python)
    agent = f"... {'job.pyz stage' if _is_staged(job) else f'{python} -m slurmddp.launchers.agent'} ..."
    return [
        *_header(job),
        *(f"export {line}" for line in _exports(job)),
        *map(_setup_line, job.cluster.setup),
        " ".join(["srun", _step(job), *srun, agent]),
    ]


def _is_staged(job: Job) -> bool:
    """Return whether nodes copy the Python environment (`cluster.stage`); raise ConfigError if they can't."""
    folder = job.cluster.stage
    if not folder:
        return False

    if not folder.startswith(("/", "$")):
        raise ConfigError(
            f"cluster.stage={folder!r} is neither an absolute path nor a variable.",
            hint="Give an absolute path, such as /tmp, or a variable of the node, such as $SLURM_TMPDIR.",
        )

    images = [name for name in srun_options(job) if name.startswith("container")]
    if images:
        raise ConfigError(
            f"cluster.stage={folder} copies an environment of the host, but cluster.srun.{images[0]} runs "
            "the ranks in a container.",
            hint="Remove cluster.stage: the container brings its own Python.",
        )
    return True


def _header(job: Job) -> list[str]:
    return [_directive(name, value) for name, value in sbatch_options(job).items()]


def _exports(job: Job) -> list[str]:
    return [_export(name, value) for name, value in sorted(job.cluster.env.items())]


def _misleading(job: Job) -> list[str]:
    """Return the variables that the batch script must unset, because srun would read options from them.

    A job that is submitted inside another job inherits the other job's variables. SLURM overwrites the
    variables of options that this job has; the others are returned.
    """
    options = sbatch_options(job)
    names = [name for name in _OF_A_TASK if name not in options]
    variables = [f"SLURM_{name.upper().replace('-', '_')}" for name in names]
    if "mem" not in options:
        variables.append("SLURM_MEM_PER_NODE")
    # SLURM sets SLURM_GPUS_PER_NODE itself, but with it srun of SLURM 26.05 accepts no --gres with GPUs.
    if lists_gpus(srun_options(job).get("gres")):
        variables.append("SLURM_GPUS_PER_NODE")
    return variables


def _step(job: Job) -> str:
    """Return srun's options for the size of the step: one agent on each node, with all CPUs of the job."""
    nodes = job.resources.all_nodes
    cpus = job.resources.cpus_per_node
    shape = f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"
    # The option is repeated, because srun of SLURM 22.05 and 23.02 ignores the job's --cpus-per-task.
    if cpus is not None:
        shape += f" --cpus-per-task={cpus}"
    return shape


def _directive(name: str, value: Option) -> str:
    """Return the line of the script's header for an option of sbatch."""
    if value is True:
        return f"#SBATCH --{name}"
    return f"#SBATCH --{name}={_quote_for_sbatch(str(value))}"


def _quote_for_sbatch(value: str) -> str:
    """Quote a value for the header, in which sbatch reads double quotes and backslashes, but no variables."""
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\[\]&|*()-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _argument(name: str, value: Option) -> str:
    """Return an option of srun, quoted for the shell."""
    return f"--{name}" if value is True else shlex.quote(f"--{name}={value}")


def _export(name: str, value: str) -> str:
    """Return the assignment of a variable of the cluster file, quoted for the shell."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
        raise ConfigError(
            f"cluster.env has the variable {name!r}, which is not a valid name for the shell.",
            hint="Use letters, digits and underscores, and no digit at the beginning.",
        )
    if name in _SCRIPT_VARIABLES:
        raise ConfigError(
            f"cluster.env sets {name}, which the batch script sets itself.", hint="Remove it there."
        )
    return f"{name}={_shell(f'cluster.env.{name}', str(value))}"


def _shell(what: str, value: str) -> str:
    """Quote the value of a key for the shell."""
    if "\0" in value:
        raise ConfigError(f"{what} is {value!r}; the shell takes no NUL.", hint="Remove the NUL character.")
    return shlex.quote(value)


def _setup_line(line: str) -> str:
    """Return a setup line unchanged; raise ConfigError if the batch script can't contain it."""
    if "\0" in line or re.match(r"\s*#SBATCH", line):
        raise ConfigError(
            f"cluster.setup has the line {line!r}, which can't be part of the batch script.",
            hint="Move options of sbatch to `sbatch:` in the cluster file, and remove NUL characters.",
        )
    return line
