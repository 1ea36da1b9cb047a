"""Frozen values that describe a job, with no behaviour beyond arithmetic.

`config/` builds a `Job`. `slurm/script.py` renders its script. `launchers/` start it.
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
"""Length of the hash at the end of a run's name."""
OLD_RUN_DIGITS = 8
"""Its length in the names of runs of earlier versions."""
END_OF_RUN_NAME = rf"-(?:[0-9a-f]{{{OLD_RUN_DIGITS}}}|[0-9a-f]{{{RUN_DIGITS}}})"
"""The end of a run's name, as a regular expression."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The share of a cluster that one job takes."""

    nodes: int
    spare_nodes: int = 0
    """Further nodes that wait, and replace lost ones."""
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
        """The nodes that SLURM is asked for: training nodes and spares."""
        return self.nodes + self.spare_nodes


SPECIAL_KEYS: Mapping[str, str] = {
    "_target_": "an import path",
    "_args_": "a list",
    "_partial_": "true or false",
    "_recursive_": "true or false",
    "_convert_": "none, partial, object or all",
}
"""Keys that control how Hydra's `instantiate` builds an object, each with the value that it takes."""


MODULE = "-m "
"""`program.script` begins so if it names a module instead of a file, as after `python`."""


def is_command(script: str) -> bool:
    """Return whether a `program.script` is a command, not a Python script (`*.py`) or a module."""
    return bool(script) and not script.startswith(MODULE) and not script.endswith(".py")


CONTROLLER = f"{MODULE}slurmddp.remote.job"
"""The program of `slurmddp controller`, the workers; the script that controls them is its first argument."""


FUNCTION_CALL = f"{MODULE}slurmddp.function_call"
"""The program of `slurmddp.submit`; its arguments: the run folder, the function, its arguments."""


def is_foreign(program: Mapping[str, Any]) -> bool:
    """Return whether the section `program` names a person's script, module or command.

    It starts as a program of its own, as under torchrun. The functions and programs of slurmddp are forked.
    """
    return bool(program.get("script")) and program["script"] not in (CONTROLLER, FUNCTION_CALL)


def own_script(program: Mapping[str, Any]) -> str:
    """Return a person's script, command or `-m MODULE` in the section `program`; empty without one."""
    script = program.get("script") or ""
    return first_script(program["args"]) if script == CONTROLLER else str(script)


def first_script(words: Sequence[str]) -> str:
    """Return the script of a command line `SCRIPT ARGUMENT...` or `-m MODULE ARGUMENT...`."""
    return " ".join(words[:2] if words[0] == MODULE.strip() else words[:1])


@dataclass(frozen=True, kw_only=True)
class Program:
    """The function that every rank runs, and the whole resolved configuration."""

    target: str
    config: Mapping[str, Any]

    @property
    def is_own_trainer(self) -> bool:
        """Whether the function is slurmddp's trainer, which records its steps."""
        return self.target == OWN_TRAINER and is_own_trainer(self.config.get("program"))


BACKENDS = ("auto", "gloo", "hierarchical", "mpi", "nccl", "shm", "ucc", "xccl")
"""The names for `backend`: torch's own, and slurmddp's `shm` and `hierarchical`. Others are import paths."""
BEST_MODES = ("min", "max")
"""Whether the least or the greatest value of a metric is the best."""


def parse_best(text: str) -> tuple[str, str]:
    """Return the name and the mode of a text such as "max accuracy"; `eval_loss` alone is "min eval_loss".

    Raises:
        ConfigError: the text has another form.
    """
    words = ["min", "eval_loss"] if text.strip() == "eval_loss" else text.split()
    if len(words) != 2 or words[0] not in BEST_MODES:
        raise ConfigError(
            f"The best checkpoint can't be chosen by {text!r}.",
            hint='Write eval_loss, or "min" or "max" and the name of a metric: "max accuracy".',
        )
    return words[1], words[0]


def is_own_trainer(program: Any) -> bool:
    """Return whether the section `program` of a configuration names slurmddp's trainer."""
    if not isinstance(program, Mapping):
        return True
    return program.get("_target_", OWN_TRAINER) == OWN_TRAINER and not program.get("script")


def total_steps(config: Mapping[str, Any]) -> int | None:
    """Return the optimizer steps of a run; None for a script, which need not follow `train.steps`."""
    train, program = config.get("train"), config.get("program")
    if isinstance(program, Mapping) and program.get("script"):
        return None
    steps = train.get("steps") if isinstance(train, Mapping) else None
    return steps if isinstance(steps, int) else None


def saved_files(program: Any, run_dir: str | Path) -> str:
    """Return the glob of `program.checkpoints` with the run folder in it; empty if not configured."""
    named = program.get("checkpoints") if isinstance(program, Mapping) else None
    return str(named or "").replace("{run_dir}", glob.escape(str(run_dir)))


@dataclass(frozen=True)
class GlobalBatch:
    """The number of samples of one optimizer step, over all ranks."""

    samples: int

    def world_sizes(self, near: int, shown: int = 12) -> str:
        """Return the numbers of ranks that can share a step, as text: at most `shown`, closest to `near`."""
        sizes = [ranks for ranks in range(1, self.samples + 1) if self.samples % ranks == 0]
        closest = sorted(sorted(sizes, key=lambda size: abs(size - near))[:shown])
        return ", ".join(map(str, closest)) + (", ..." if len(sizes) > shown else "")

    def most_nodes(self, nodes: int, ranks_per_node: int) -> int:
        """Return the largest number of nodes, up to `nodes`, that can share a step evenly, or 0."""
        sizes = range(nodes, 0, -1)
        return next((size for size in sizes if self.samples % (size * ranks_per_node) == 0), 0)

    def share(self, world_size: int, most: int) -> tuple[int, int]:
        """Split a step among `world_size` ranks: as few batches per rank as possible, all of one size.

        Args:
            world_size: the number of ranks.
            most: the largest number of samples in a batch.

        Returns:
            Samples per batch, and batches per step, of each rank.

        Raises:
            MismatchError: the ranks can't share the step evenly.
        """
        own, rest = divmod(self.samples, world_size)
        if rest or not own:
            raise MismatchError(
                f"A step of {self.samples} samples can't be shared evenly by {world_size} ranks.",
                hint=f"World sizes that work: {self.world_sizes(world_size)}.",
            )
        batches = next(count for count in range(-(-own // most), own + 1) if own % count == 0)
        return own // batches, batches


@dataclass(frozen=True, kw_only=True)
class Job:
    """A complete training job. Equal jobs give the same script, byte for byte."""

    name: str
    run_name: str
    """`<name>-<12 hex digits>`; the digits hash the keys that decide the computation."""
    run_dir: Path
    project_dir: Path
    """The folder of the command: it holds `conf/` and modules, and relative paths start there."""
    launcher: str
    """`slurm` or `local`."""
    submitter: str
    """`sbatch` or `submitit`; read only if the launcher is `slurm`."""
    python: str
    cluster: Cluster
    resources: Resources
    policy: PolicySettings
    program: Program
    overrides: tuple[str, ...] = ()
    """The command line as typed."""
    snapshot: bool = True
    elastic: bool = False
    """Whether the job continues with fewer nodes if a node is lost and no spare is left."""
    after: tuple[str, ...] = ()
    """Ids of the jobs that must finish before the job starts."""
    array_parallelism: int | None = None
    """The number of points of a sweep that SLURM runs at once, at most; None: no bound."""

    @property
    def saved_files(self) -> str:
        """The glob of the program's own checkpoints, from the project folder; empty if not configured."""
        return saved_files(self.program.config.get("program"), self.run_dir)

    @property
    def tolerates_node_loss(self) -> bool:
        """Whether the job continues after the loss of a node."""
        return self.elastic or self.resources.spare_nodes > 0
