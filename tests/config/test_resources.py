"""The size of a job: nodes, ranks, GPUs, CPUs, memory, and the samples of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError
from slurmddp.settings.schema import Cluster
from slurmddp.settings.spec import GlobalBatch, Resources
from support.runs.projects import job_of


def test_a_laptop_gets_two_ranks(project: Path) -> None:
    job = job_of(project)
    assert job.resources == Resources(nodes=1, ranks_per_node=2)
    assert (job.launcher, job.cluster.name, job.name) == ("local", "local", "gpt")
    assert job.run_dir == project / "runs" / job.run_name
    assert job.run_name.startswith("gpt-") and len(job.run_name) == len("gpt-") + 12


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
    assert GlobalBatch(16 * 2 * 24).share(24, max_batch_size=16) == (16, 2)
    assert GlobalBatch(16 * 2 * 24).share(16, max_batch_size=16) == (16, 3)
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


@pytest.mark.parametrize(
    ("settings", "nodes", "on_each"),
    [
        (["gpus=24"], 3, 8),
        (["gpus=8"], 1, 8),
        (["gpus=5"], 1, 5),
        (["gpus=24", "nodes=4"], 4, 6),
        (["gpus=24", "gpus_per_node=4"], 6, 4),
        (["gpus=24", "nodes=6", "gpus_per_node=4"], 6, 4),
        (["gpus=24", "gpus_per_node=8", "nodes=3"], 3, 8),
    ],
)
def test_t13_gpus_are_planned_on_the_fewest_nodes(
    project: Path, settings: list[str], nodes: int, on_each: int
) -> None:
    job = job_of(project, "+cluster=big", *settings)
    assert (job.resources.nodes, job.resources.gpus_per_node, job.resources.world_size) == (
        nodes, on_each, nodes * on_each
    )  # fmt: skip
    plain = job_of(project, "+cluster=big", f"nodes={nodes}", f"gpus_per_node={on_each}")
    assert job.run_name == plain.run_name


@pytest.mark.parametrize(
    ("settings", "problem", "remedy"),
    [
        (["+cluster=big", "gpus=20"], "evenly by 3 node", "Use gpus=18 or gpus=21 or nodes=4 for 5 on each"),
        (
            ["+cluster=big", "gpus=24", "nodes=1"],
            "24 on each of 1 node.*has 8",
            "gpus=8 or fewer, or omit nodes=",
        ),
        (
            ["+cluster=big", "gpus=12", "nodes=2", "gpus_per_node=8"],
            "by 2 node.*gpus_per_node=8",
            "Use gpus=16.",
        ),
        (["+cluster=big", "gpus=13", "nodes=2"], "evenly by 2 node", "Use gpus=12 or gpus=14."),
        (["+cluster=big", "gpus=23", "gpus_per_node=8"], "evenly by 3 node", "gpus=16 or gpus=24"),
        (["+cluster=big", "gpus=1024"], "more than max_nodes=16", "nodes=16 or fewer"),
        (["gpus=8"], "this machine has no GPUs", "Omit gpus="),
    ],
)
def test_t13_gpus_that_no_nodes_share_evenly_are_refused(
    project: Path, settings: list[str], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        job_of(project, *settings)
    assert remedy in refused.value.hint


def test_t13_gpus_of_this_machine(project: Path) -> None:
    assert job_of(project, "gpus=2", gpus_here=4).resources.gpus_per_node == 2
    with pytest.raises(ConfigError, match=r"8 on each of 1 node.*this machine has 4"):
        job_of(project, "gpus=8", gpus_here=4)
