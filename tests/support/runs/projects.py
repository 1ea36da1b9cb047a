"""A project folder with its own configuration for every group.

So the tests of composing, of the command line and of submission don't change with what slurmddp ships.
"""

from __future__ import annotations

from pathlib import Path

from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.settings.spec import Job

GROUPS = {
    "model/gpt_small": (
        "_target_: slurmddp.training.builtin.gpt.GPT\nvocab_size: ${data.vocab_size}\nwidth: 64\n"
    ),
    "data/stdlib": "_target_: slurmddp.training.builtin.text.SourceText\nvocab_size: 99\n",
    "optimizer/adamw": "_target_: torch.optim.AdamW\nlr: 1e-3\nbetas: [0.9, 0.95]\n",
    "scheduler/cosine": "_target_: slurmddp.training.builtin.schedules.cosine\nwarmup_steps: 10\n",
    "strategy/ddp": "name: ddp\n",
    "cluster/big": (
        "partition: gpu\ngpus_per_node: 8\ncpus_per_node: 96\nmem_gb: 960\nmax_nodes: 16\n"
        'time_limit: "24:00:00"\nsetup: [module load cuda]\nenv: {A: 1}\nsbatch: {exclusive: true}\n'
    ),
    "cluster/small": "ranks_per_node: 4\ncpus_per_node: 8\n",
}


def make_project(folder: Path, **files: str) -> Path:
    """Write a project into `folder`; `files` are added under conf/, `__` in a name standing for a slash."""
    folder.mkdir(parents=True, exist_ok=True)
    added = {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in {**GROUPS, **added}.items():
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return folder


def job_of(project: Path, *overrides: str, gpus_here: int = 0) -> Job:
    composed = compose(overrides, project)
    return build_job(composed, project_dir=project, overrides=overrides, gpus_here=gpus_here)
