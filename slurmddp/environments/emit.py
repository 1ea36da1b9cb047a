"""Build the environment variables of processes that slurmddp starts; pure.

A forked rank finds the variables that srun sets for one task per rank, so that a script reads its rank in one
way under every launcher. Local runs emulate the SLURM step of a node, and use the same code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from os import PathLike

from slurmddp.environments.hostlist import compress, render_counts
from slurmddp.environments.names import (
    ATTEMPT_VARIABLE,
    EMULATED_VARIABLE,
    LAUNCH_ID_VARIABLE,
    RUN_DIR_VARIABLE,
)
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError

LOCAL_JOB_IDS = range(0xFC000000, 0xFFFFFF00)
"""SLURM_JOB_ID of local runs. Libraries expect a number; SLURM uses numbers below 0x04000000."""


def emulated_step(
    nodes: int,
    node_rank: int,
    job_id: str,
    run_dir: str | PathLike[str],
    attempt: int,
    cpus_per_node: int | None = None,
) -> dict[str, str]:
    """Return the variables of srun for one task on each of `nodes` nodes, all emulated on this machine."""
    if not 0 <= node_rank < nodes:
        raise ConfigError(f"node_rank={node_rank} with nodes={nodes}.", hint="It runs from 0 to nodes - 1.")
    hosts = ["localhost"] * nodes
    launch = hashlib.sha256(f"{run_dir}\0{attempt}".encode()).hexdigest()[:16]
    values = {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOBID": job_id,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": compress(hosts),
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURMD_NODENAME": hosts[node_rank],
        EMULATED_VARIABLE: "1",
        LAUNCH_ID_VARIABLE: launch,
        RUN_DIR_VARIABLE: str(run_dir),
        ATTEMPT_VARIABLE: str(attempt),
        **_task(hosts, (1,) * nodes, node_rank, 0, node_rank),
    }
    if attempt > 0:
        values["SLURM_RESTART_COUNT"] = str(attempt)
    if cpus_per_node is not None:
        values["SLURM_CPUS_PER_TASK"] = values["SLURM_CPUS_ON_NODE"] = str(cpus_per_node)
    return values


def rank_environment(
    node: RankInfo, local_rank: int, ranks_per_node: int, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that an agent adds to its environment for one of its ranks.

    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and NODE_RANK are always set. Under SLURM, real or
    emulated, the result also describes a step with one task per rank.

    Args:
        node: the agent's own info: one task on each node.
        local_rank: the number of the rank on the node, from 0.
        ranks_per_node: the number of ranks on each node.
        inherited: the agent's environment. Each variable with the CPUs of a task gets the rank's share,
            because srun refuses two that differ.
    """
    if not 0 <= local_rank < ranks_per_node:
        raise ConfigError(
            f"local_rank={local_rank} with ranks_per_node={ranks_per_node}.",
            hint="It runs from 0 to ranks_per_node - 1.",
        )
    rank = node.node_rank * ranks_per_node + local_rank
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(node.nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "NODE_RANK": str(node.node_rank),
    }
    if node.environment == "slurm":
        values.update(_task(node.hosts, (ranks_per_node,) * node.nodes, node.node_rank, local_rank, rank))
        if node.cpus is not None:
            values.update(_cpus_per_task(max(1, node.cpus // ranks_per_node), inherited or {}))
    return values


def _cpus_per_task(cpus: int, inherited: Mapping[str, str]) -> dict[str, str]:
    values = {"SLURM_CPUS_PER_TASK": str(cpus)}
    if "SRUN_CPUS_PER_TASK" in inherited:
        values["SRUN_CPUS_PER_TASK"] = str(cpus)
    tres = inherited.get("SLURM_TRES_PER_TASK", "")
    changed = re.sub(r"(?<![^,])cpu([=:])\d+", rf"cpu\g<1>{cpus}", tres)
    return values | ({"SLURM_TRES_PER_TASK": changed} if changed != tres else {})


def _task(
    hosts: tuple[str, ...] | list[str], counts: tuple[int, ...], node_rank: int, local_rank: int, rank: int
) -> dict[str, str]:
    """Return the variables with which srun describes its step to a task, ranks in blocks of nodes."""
    nodes, tasks, layout = str(len(counts)), str(sum(counts)), render_counts(counts)
    first = sum(counts[:node_rank])
    return {
        "SLURM_STEP_NODELIST": compress(hosts),
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": layout,
        "SLURM_NNODES": nodes,
        "SLURM_NODELIST": compress(hosts),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": str(counts[node_rank]),
        "SLURM_TASKS_PER_NODE": layout,
        "SLURM_DISTRIBUTION": "block",
        "SLURM_NODEID": str(node_rank),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_GTIDS": ",".join(str(first + index) for index in range(counts[node_rank])),
    }
