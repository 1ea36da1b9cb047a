"""Describe a job by frozen values, with no behaviour beyond arithmetic.

`config/` builds a `Job`, `slurm/script.py` renders its batch script, and `launchers/` start it.
This module reads no files, no environment and no clock.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.errors import ConfigError, MismatchError
from slurmddp.settings.schema import OWN_TRAINER, Cluster, PolicySettings

RUN_DIGITS = 12
"""Number of hex digits of the hash at the end of a run's name."""
OLD_RUN_DIGITS = 8
"""Number of hex digits in the names of runs of earlier versions."""
END_OF_RUN_NAME = rf"-(?:[0-9a-f]{{{OLD_RUN_DIGITS}}}|[0-9a-f]{{{RUN_DIGITS}}})"
"""Regular expression for the hash at the end of a run's name, with its dash."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The number of nodes of one job, and the ranks, GPUs, CPUs and memory (GiB) on each node."""

    nodes: int
    spare_nodes: int = 0
    """Extra nodes that wait and replace lost nodes."""
    ranks_per_node: int
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    mem_gb: float | None = None
    time_limit_min: int | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def all_nodes(self) -> int:
        """The number of nodes that the job requests: training nodes and spares."""
        return self.nodes + self.spare_nodes


SPECIAL_KEYS: Mapping[str, str] = {
    "_target_": "an import path",
    "_args_": "a list",
    "_partial_": "true or false",
    "_recursive_": "true or false",
    "_convert_": "none, partial, object or all",
}
"""Keys that control how Hydra's `instantiate` builds an object, with a description of their values."""


MODULE = "-m "
"""The beginning of a `program.script` that names a module, as in `python -m MODULE`, instead of a file."""


def is_command(script: str) -> bool:
    """Return whether a `program.script` is a command, and neither a Python script (`*.py`) nor a module."""
    return bool(script) and not script.startswith(MODULE) and not script.endswith(".py")


CONTROLLER = f"{MODULE}slurmddp.remote.job"
"""The program of `slurmddp controller`, which runs the workers; its first argument is the user's script."""


FUNCTION_CALL = f"{MODULE}slurmddp.function_call"
"""The program of `slurmddp.submit`; it takes the run folder, the function and the function's arguments."""


def is_foreign(program: Mapping[str, Any]) -> bool:
    """Return whether the section `program` names a script, module or command of the user.

    If so, each rank is a newly started program, as under torchrun. Otherwise the ranks are forked processes.
    """
    return bool(program.get("script")) and program["script"] not in (CONTROLLER, FUNCTION_CALL)


def own_script(program: Mapping[str, Any]) -> str:
    """Return the user's script, command or `-m MODULE` in the section `program`; empty if there is none.

    For `slurmddp controller`, it is the script that controls the workers.
    """
    script = program.get("script") or ""
    if script == CONTROLLER:
        return first_script(program["args"])
    return str(script)


def first_script(command: Sequence[str]) -> str:
    """Return `SCRIPT` or `-m MODULE` from `SCRIPT ARGUMENT...` or `-m MODULE ARGUMENT...`."""
    length = 2 if command[0] == MODULE.strip() else 1
    return " ".join(command[:length])


@dataclass(frozen=True, kw_only=True)
class Program:
    """The import path of the function that every rank runs, and the whole resolved configuration."""

    target: str
    config: Mapping[str, Any]

    @property
    def is_own_trainer(self) -> bool:
        """Whether every rank runs slurmddp's trainer, which records its steps."""
        return self.target == OWN_TRAINER and is_own_trainer(self.config.get("program"))


BACKENDS = ("auto", "gloo", "hierarchical", "mpi", "nccl", "shm", "ucc", "xccl")
"""Names for the key `backend`: torch's, and slurmddp's `shm` and `hierarchical`; others are import paths."""
BEST_MODES = ("min", "max")
"""The words that name the best value of a metric: `min` for the smallest, `max` for the largest."""


def parse_best(text: str) -> tuple[str, str]:
    """Return the metric and the mode of a `train.best`: ("accuracy", "max") for "max accuracy".

    `eval_loss` without a mode means "min eval_loss".

    Raises:
        ConfigError: the text has another form.
    """
    if text.strip() == "eval_loss":
        return "eval_loss", "min"

    parts = text.split()
    if len(parts) != 2 or parts[0] not in BEST_MODES:
        raise ConfigError(
            f"The best checkpoint can't be chosen by {text!r}.",
            hint='Write eval_loss, or "min" or "max" and the name of a metric: "max accuracy".',
        )
    mode, name = parts
    return name, mode


def is_own_trainer(program: Any) -> bool:
    """Return whether the section `program` names slurmddp's trainer, as it does by default."""
    if not isinstance(program, Mapping):
        return True
    return program.get("_target_", OWN_TRAINER) == OWN_TRAINER and not program.get("script")


def total_steps(config: Mapping[str, Any]) -> int | None:
    """Return the number of optimizer steps of a run; None for a script, which decides its length itself."""
    program = config.get("program")
    if isinstance(program, Mapping) and program.get("script"):
        return None

    train = config.get("train")
    if not isinstance(train, Mapping):
        return None
    steps = train.get("steps")
    return steps if isinstance(steps, int) else None


def saved_files(program: Any, run_dir: str | Path) -> str:
    """Return the glob `program.checkpoints`, with the run folder for `{run_dir}`; empty if it is not set."""
    if not isinstance(program, Mapping):
        return ""
    pattern = str(program.get("checkpoints") or "")
    return pattern.replace("{run_dir}", glob.escape(str(run_dir)))


@dataclass(frozen=True)
class GlobalBatch:
    """The number of samples of one optimizer step, over all ranks."""

    samples: int

    def world_sizes(self, near: int, shown: int = 12) -> str:
        """Return a list, as text, of numbers of ranks that can share the samples of a step evenly.

        Args:
            near: the number of ranks to which the shown numbers are closest.
            shown: the largest number of numbers to show.
        """
        sizes = [ranks for ranks in range(1, self.samples + 1) if self.samples % ranks == 0]
        closest = sorted(sorted(sizes, key=lambda size: abs(size - near))[:shown])
        text = ", ".join(map(str, closest))
        return f"{text}, ..." if len(sizes) > shown else text

    def most_nodes(self, nodes: int, ranks_per_node: int) -> int:
        """Return the most nodes, up to `nodes`, whose ranks can share a step evenly; 0 if none can."""
        sizes = range(nodes, 0, -1)
        return next((size for size in sizes if self.samples % (size * ranks_per_node) == 0), 0)

    def share(self, world_size: int, max_batch_size: int) -> tuple[int, int]:
        """Split the samples of a step evenly among ranks, and each rank's samples into equal batches.

        The number of batches is the smallest that `max_batch_size` permits.

        Args:
            world_size: the number of ranks.
            max_batch_size: the largest number of samples in a batch.

        Returns:
            The number of samples in a batch, and the number of batches of each rank in a step.

        Raises:
            MismatchError: the ranks can't share the step evenly.
        """
        per_rank, rest = divmod(self.samples, world_size)
        if rest or not per_rank:
            raise MismatchError(
                f"A step of {self.samples} samples can't be shared evenly by {world_size} ranks.",
                hint=f"World sizes that work: {self.world_sizes(world_size)}.",
            )

        fewest = -(-per_rank // max_batch_size)
        batches = next(count for count in range(fewest, per_rank + 1) if per_rank % count == 0)
        return per_rank // batches, batches


@dataclass(frozen=True, kw_only=True)
class Job:
    """A complete training job. Equal jobs give equal batch scripts, byte for byte."""

    name: str
    run_name: str
    """`<name>-<12 hex digits>`; the digits are a hash of the keys that decide the computation."""
    run_dir: Path
    project_dir: Path
    """The folder in which the command ran; it holds `conf/` and modules, and relative paths start there."""
    launcher: str
    """`slurm` or `local`."""
    submitter: str
    """`sbatch` or `submitit`; used only if the launcher is `slurm`."""
    python: str
    cluster: Cluster
    resources: Resources
    policy: PolicySettings
    program: Program
    overrides: tuple[str, ...] = ()
    """The settings of the command line as typed."""
    snapshot: bool = True
    elastic: bool = False
    """Whether the job continues with fewer nodes if a node is lost and no spare is left."""
    after: tuple[str, ...] = ()
    """Ids of the SLURM jobs that must finish before this job starts."""
    array_parallelism: int | None = None
    """The largest number of points of a sweep that SLURM runs at once; None means no limit."""

    @property
    def saved_files(self) -> str:
        """The glob of the program's checkpoints, relative to the project folder; empty if it is not set."""
        return saved_files(self.program.config.get("program"), self.run_dir)

    @property
    def tolerates_node_loss(self) -> bool:
        """Whether the job continues after the loss of a node, with a spare node or fewer nodes."""
        return self.elastic or self.resources.spare_nodes > 0
