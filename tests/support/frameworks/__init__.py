"""Small scripts of other frameworks, each with its own checkpoint; tests run copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Framework:
    """A script and its arguments."""

    script: str
    arguments: tuple[str, ...] = ()
    starts_own_ranks: int = 1
    """Ranks that each process of the script starts."""
    checkpoints: str = "saved.pt"
    """The glob of the script's checkpoints in its folder."""

    @property
    def words(self) -> list[str]:
        """The end of a `slurmddp run` command, with the setting that names the checkpoints."""
        return [f"program.checkpoints='{{run_dir}}/own/{self.checkpoints}'", self.script, *self.arguments]


FRAMEWORKS: Mapping[str, Framework] = {
    "torch": Framework("plain_torch.py"),
    "spawn": Framework("own_spawn.py", starts_own_ranks=2),
    "hydra": Framework("hydra_app.py", ("rate=0.2", "hydra.run.dir={run_dir}/hydra")),
    "fabric": Framework("fabric.py", checkpoints="saved.ckpt"),
    "lightning": Framework("lightning_trainer.py", checkpoints="last.ckpt"),
    "accelerate": Framework("accelerate_loop.py", checkpoints="step-*"),
    "transformers": Framework("hf_trainer.py", checkpoints="checkpoint-*"),
}


def write_scripts(project: Path) -> None:
    """Copy all scripts into a project folder."""
    shutil.copytree(Path(__file__).parent, project, ignore=shutil.ignore_patterns("__*"), dirs_exist_ok=True)


def places(run: Path) -> list[list[int]]:
    """Return rank, local rank, world size, first and last step of the ranks that have finished."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("own/rank-*"))]
