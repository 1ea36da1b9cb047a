"""The size of a job: nodes, ranks, GPUs, CPUs, memory, and the samples of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmddp.config.schema import Cluster
from slurmddp.errors import ConfigError
from slurmddp.spec import GlobalBatch, Resources
from support.runs.projects import job_of


def test_a_laptop_gets_two_ranks(project: Path) -> None:
    job = job_of(project)
    assert job.resources == Resources(nodes=1, ranks_per_node=2)
    assert (job.launcher, job.cluster.name, job.name) == ("local", "local", "gpt")
    assert job.run_dir == project / "runs" / job.run_name
    assert job.run_name.startswith("gpt-") and len(job.run_name) == len("gpt-") + 8


def test_a_machine_with_gpus_gets_one_rank_for_each(project: Path) -> None:
    assert job_of(project, gpus_here=4).resources == Resources(nodes=1, ranks_per_node=4, gpus_per_node=4)
    assert job_of(project, "ranks_per_node=1", gpus_here=4).resources.gpus_per_node == 1
    assert job_of(project, "gpus_per_node=0", gpus_here=4).resources.ranks_per_node == 2


def test_a_cluster_says_what_the_command_line_leaves_open(project: Path) -> None:
    job = job_of(project, "+cluster=big", "nodes=3")
    assert job.launcher == "slurm"
    assert job.resources == Resources(
        nodes=3, ranks_per_node=8, gpus_per_node=8, cpus_per_node=96, mem_gb=960, time_limit_min=1440
    )
    assert job.cluster == Cluster(
        name="big", partition="gpu", gpus_per_node=8, cpus_per_node=96, mem_gb=960, max_nodes=16,
        time_limit="24:00:00", setup=("module load cuda",), env={"A": "1"}, sbatch={"exclusive": True},
    )  # fmt: skip
    assert job_of(project, "+cluster=small", "nodes=2").resources.world_size == 8


def test_the_command_line_wins_over_the_cluster(project: Path) -> None:
    job = job_of(project, "+cluster=big", "partition=low", "account=me", "time_limit=90m", "mem_gb=12.5")
    assert (job.cluster.partition, job.cluster.account, job.cluster.qos) == ("low", "me", None)
    assert (job.resources.time_limit_min, job.resources.mem_gb) == (90, 12.5)
    job = job_of(
        project, "+cluster=big", "cluster.partition=x", "cluster.sbatch.comment=hi", "cluster.env.B='a b'"
    )
    assert job.cluster.partition == "x"
    assert job.cluster.sbatch == {"exclusive": True, "comment": "hi"}
    assert job.cluster.env == {"A": "1", "B": "a b"}


def test_part_of_a_node_takes_part_of_its_cpus_and_memory(project: Path) -> None:
    resources = job_of(project, "+cluster=big", "gpus_per_node=2").resources
    assert (resources.cpus_per_node, resources.mem_gb, resources.ranks_per_node) == (24, 240, 2)
    whole = job_of(project, "+cluster=big", "gpus_per_node=2", "cpus_per_node=96").resources
    assert whole.cpus_per_node == 96
    assert job_of(project, "+cluster=big", "ranks_per_node=4").resources.gpus_per_node == 4


def test_a_cluster_job_can_be_tried_here(project: Path) -> None:
    job = job_of(project, "+cluster=big", "nodes=2", "gpus_per_node=2", "launcher=local")
    assert (job.launcher, job.resources.nodes, job.resources.ranks_per_node) == ("local", 2, 2)
    assert job.python == sys.executable


def test_an_elastic_run_holds_the_samples_of_its_steps(project: Path) -> None:
    """On fewer nodes each step is as large as before, and its name and numbers are those of a plain run."""
    job = job_of(project, "+cluster=big", "nodes=3", "train.accumulate=2", "elastic=true")
    assert job.program.config["train"]["global_batch"] == 16 * 2 * 24
    assert GlobalBatch(16 * 2 * 24).share(24, most=16) == (16, 2)
    assert GlobalBatch(16 * 2 * 24).share(16, most=16) == (16, 3)
    given = job_of(project, "+cluster=big", "nodes=3", "train.global_batch=48", "elastic=true")
    assert given.program.config["train"]["global_batch"] == 48
    assert given.tolerates_node_loss and not job_of(project).tolerates_node_loss


@pytest.mark.parametrize(
    ("samples", "nodes", "ranks_per_node", "most"), [(48, 3, 8, 3), (48, 5, 2, 4), (6, 4, 2, 3), (5, 3, 2, 0)]
)
def test_so_many_nodes_share_a_step(samples: int, nodes: int, ranks_per_node: int, most: int) -> None:
    assert GlobalBatch(samples).most_nodes(nodes, ranks_per_node) == most


def test_a_global_batch_that_the_ranks_cannot_share_is_refused(project: Path) -> None:
    settings = ["nodes=3", "ranks_per_node=2"]
    with pytest.raises(ConfigError, match=r"Each optimizer step has 32 samples.*6 ranks.*1, 2, 4, 8, 16, 32"):
        job_of(project, *settings, "train.global_batch=32")
    assert job_of(project, *settings, "train.global_batch=36").resources.nodes == 3
