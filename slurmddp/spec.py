"""The frozen values that describe a job; they hold no behaviour beyond arithmetic on themselves.

`config/` builds a `Job` from Hydra configs. `slurm/script.py` turns it into text. `launchers/` start it.
Nothing here reads files, the environment or the clock.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmddp.errors import MismatchError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a site gives and how it wants to be asked; None means: leave the flag out."""

    name: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus_per_node: int = 0
    gpu_type: str | None = None
    gpu_request: str = "gpus-per-node"
    """The site's dialect: `gpus-per-node`, `gres`, or `none` where GPUs come with the partition."""
    ranks_per_node: int | None = None
    """Ranks per node on clusters without GPUs; with GPUs it is one rank per GPU."""
    max_nodes: int | None = None
    cpus_per_node: int | None = None
    mem_gb: float | None = None
    """Host memory per node in GiB; 0 asks for all of it."""
    mem_request: str = "mem"
    """The site's dialect: `mem` (per node), `mem-per-cpu`, or `none`."""
    time_limit: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines that run in the batch script before the training (module load, source venv)."""
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Any other sbatch option by its long name; `true` writes a bare flag."""
    srun: Mapping[str, str | int | bool] = field(default_factory=dict)
    python: str | None = None
    """The interpreter on the compute nodes; None means the one that submits."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """How much of a cluster one job takes."""

    nodes: int
    spare_nodes: int = 0
    """Nodes beyond `nodes` that wait, and take the place of lost ones."""
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
        """What SLURM is asked for: the nodes that train and those that wait."""
        return self.nodes + self.spare_nodes


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What happens when the job is stopped or fails."""

    max_restarts: int = 3
    """Failures after which the job is tried again; preemptions and time limits don't count."""
    max_restarts_in_place: int = 10
    """Failures of one attempt after which its ranks start again within the job; 0: never."""
    max_requeues_without_progress: int = 3
    """Time limits in a row without a newer checkpoint after which the job is requeued; 0: never."""
    requeue: bool = True
    signal_lead_s: int = 120
    """Seconds before the time limit at which SLURM sends USR2 to the ranks."""
    grace_s: int | None = None
    """Seconds from SIGTERM to SIGKILL; None: as SLURM says (its KillWait and the partition's GraceTime)."""
    exclude_failed_h: int = 24
    """Hours for which a node that failed under the run is kept out of its next attempts; 0: not at all."""
    stall_timeout_s: float | None = None
    """Seconds in which a rank has to get on; None: learnt from what its steps take; 0: for ever."""
    join_timeout_s: float = 300
    """Seconds for which the nodes of a job wait for each other."""


COMPUTED = ("seed", "model", "data", "loss", "optimizer", "scheduler", "strategy", "train", "program")
"""The keys of the configuration that decide what is computed."""
NOT_COMPUTED = (
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.memory_save_every",
    "train.keep_last",
    "train.sample_chars",
    "train.workers",
    "program.checkpoints",
)
"""Keys that change no number. A run's name and a checkpoint's identity leave them out."""
EXTENT = ("train.steps", "train.eval_batches", "train.global_batch")
"""Keys that a run's name holds, while a checkpoint fits any value of them.

A run may grow longer, or be evaluated on more. A run of another size sets `global_batch`; the data order in
the checkpoint says which value is right.
"""


TRAINER_KEYS = ("model", "data", "loss", "optimizer", "scheduler", "strategy", "train")
"""Keys that slurmddp's trainer and programs of a person's own read; a script never sees them."""


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that its program never sees."""
    program = config.get("program")
    has_script = isinstance(program, Mapping) and program.get("script")
    return {key: value for key, value in config.items() if not has_script or key not in TRAINER_KEYS}


def computed(config: Mapping[str, Any], without: Sequence[str] = NOT_COMPUTED) -> dict[str, Any]:
    """Return the part of a configuration that decides what is computed, without the keys in `without`."""
    return {
        key: {name: inner for name, inner in value.items() if f"{key}.{name}" not in without}
        if isinstance(value, Mapping)
        else value
        for key, value in relevant(config).items()
        if key in COMPUTED
    }


SPECIAL_KEYS: Mapping[str, str] = {
    "_target_": "an import path",
    "_args_": "a list",
    "_partial_": "true or false",
    "_recursive_": "true or false",
    "_convert_": "none, partial, object or all",
}
"""Keys of Hydra's `instantiate`, which control how an object is built, with the value that each takes."""

OWN_TRAINER = "slurmddp.training.trainer.train"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every rank runs: the import path of a function, and the whole resolved configuration."""

    target: str
    config: Mapping[str, Any]

    @property
    def is_own_trainer(self) -> bool:
        """Whether it is slurmddp's, which records its steps; of any other program nothing is known."""
        return self.target == OWN_TRAINER and is_own_trainer(self.config.get("program"))


def is_own_trainer(program: Any) -> bool:
    """Tell the same from what a configuration holds under `program`."""
    if not isinstance(program, Mapping):
        return True
    return program.get("_target_", OWN_TRAINER) == OWN_TRAINER and not program.get("script")


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks."""

    samples: int

    def world_sizes(self, near: int, shown: int = 12) -> str:
        """Return the numbers of ranks that can share it evenly, as text; of many those closest to `near`."""
        sizes = [ranks for ranks in range(1, self.samples + 1) if self.samples % ranks == 0]
        closest = sorted(sorted(sizes, key=lambda size: abs(size - near))[:shown])
        return ", ".join(map(str, closest)) + (", ..." if len(sizes) > shown else "")

    def most_nodes(self, nodes: int, ranks_per_node: int) -> int:
        """Return how many of `nodes` can share it evenly, all with `ranks_per_node`; 0: none can."""
        sizes = range(nodes, 0, -1)
        return next((size for size in sizes if self.samples % (size * ranks_per_node) == 0), 0)

    def share(self, world_size: int, most: int) -> tuple[int, int]:
        """Split the step among `world_size` ranks, each in as few batches as possible, all of one size.

        Args:
            world_size: the number of ranks.
            most: the samples that a rank can take at once.

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
    """One training job, complete: the same Job always gives the same script, byte for byte."""

    name: str
    run_name: str
    """`<name>-<8 hex digits>`; the digits are a hash of what is computed, not of where."""
    run_dir: Path
    project_dir: Path
    """The folder the person stood in: its `conf/` and modules are found there, relative paths start there."""
    launcher: str
    """`slurm` or `local`."""
    submitter: str
    """`sbatch` or `submitit`; only read when the launcher is `slurm`."""
    python: str
    cluster: Cluster
    resources: Resources
    policy: Policy
    program: Program
    overrides: tuple[str, ...] = ()
    """The command line as typed."""
    snapshot: bool = True
    elastic: bool = False
    """Whether it goes on with fewer nodes when one is lost and no spare is left."""

    @property
    def saved_files(self) -> str:
        """The glob of the files that the program saves, from the project folder; empty: none is named."""
        program = self.program.config.get("program")
        named = program.get("checkpoints") if isinstance(program, Mapping) else None
        return str(named or "").replace("{run_dir}", glob.escape(str(self.run_dir)))

    @property
    def outlives_nodes(self) -> bool:
        """Whether a node can be lost and the job goes on."""
        return self.elastic or self.resources.spare_nodes > 0
