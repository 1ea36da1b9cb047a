"""The frozen values that describe a job; they hold no behaviour beyond arithmetic on themselves.

`config/` builds a `Job` from Hydra configs. `slurm/script.py` turns it into text. `launchers/` start it.
Nothing here reads files, the environment or the clock.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.config.schema import OWN_TRAINER, Cluster, Policy
from slurmddp.errors import MismatchError


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


SPECIAL_KEYS: Mapping[str, str] = {
    "_target_": "an import path",
    "_args_": "a list",
    "_partial_": "true or false",
    "_recursive_": "true or false",
    "_convert_": "none, partial, object or all",
}
"""Keys of Hydra's `instantiate`, which control how an object is built, with the value that each takes."""


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
