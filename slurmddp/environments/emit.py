"""Build the environment variables of processes that slurmddp starts; pure.

A forked rank gets the variables that srun would set with one task per rank, so that a script reads its rank
in the same way under every launcher. Local runs emulate a step of SLURM on each node, and use the same code.
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
"""Values of SLURM_JOB_ID in local runs. Libraries expect a number; SLURM uses numbers below 0x04000000."""


def emulated_step(
    nodes: int,
    node_rank: int,
    job_id: str,
    run_dir: str | PathLike[str],
    attempt: int,
    cpus_per_node: int | None = None,
) -> dict[str, str]:
    """Return the variables that srun would set for the task on one of several emulated nodes.

    Each node has one task, and all nodes are this machine.

    Args:
        nodes: the number of nodes.
        node_rank: the rank of the node, from 0.
        job_id: the value of SLURM_JOB_ID.
        run_dir: the run folder.
        attempt: the number of the attempt.
        cpus_per_node: the CPUs of each task; None if they are not limited.
    """
    if not 0 <= node_rank < nodes:
        raise ConfigError(
            f"node_rank={node_rank} is not possible with nodes={nodes}.",
            hint="Node ranks run from 0 to nodes - 1.",
        )

    hosts = ["localhost"] * nodes
    # By this hash all nodes of an attempt derive the same id, and each attempt has another id.
    launch_id = hashlib.sha256(f"{run_dir}\0{attempt}".encode()).hexdigest()[:16]
    values = {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOBID": job_id,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": compress(hosts),
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURMD_NODENAME": hosts[node_rank],
        EMULATED_VARIABLE: "1",
        LAUNCH_ID_VARIABLE: launch_id,
        RUN_DIR_VARIABLE: str(run_dir),
        ATTEMPT_VARIABLE: str(attempt),
        **_task(hosts, (1,) * nodes, node_rank, 0, node_rank),
    }
    # SLURM sets the count only in a job that was requeued.
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
        node: the info of the agent, which is the only task on its node.
        local_rank: the number of the rank on the node, from 0.
        ranks_per_node: the number of ranks on each node.
        inherited: the agent's environment; its variables with the CPUs of a task are overridden.
    """
    if not 0 <= local_rank < ranks_per_node:
        raise ConfigError(
            f"local_rank={local_rank} is not possible with ranks_per_node={ranks_per_node}.",
            hint="Local ranks run from 0 to ranks_per_node - 1.",
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
        # Libraries such as Lightning compare the task counts of the step with the configured number of ranks,
        # so the counts describe one task per rank.
        values.update(_task(node.hosts, (ranks_per_node,) * node.nodes, node.node_rank, local_rank, rank))
        if node.cpus is not None:
            values.update(_cpus_per_task(max(1, node.cpus // ranks_per_node), inherited or {}))
    return values


def _cpus_per_task(cpus: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return SLURM's variables for the CPUs of a task, changed to `cpus`."""
    # srun refuses to start a step inside the rank if two of these variables differ, so all are changed.
    values = {"SLURM_CPUS_PER_TASK": str(cpus)}
    if "SRUN_CPUS_PER_TASK" in inherited:
        values["SRUN_CPUS_PER_TASK"] = str(cpus)
    tres = inherited.get("SLURM_TRES_PER_TASK", "")
    changed = re.sub(r"(?<![^,])cpu([=:])\d+", rf"cpu\g<1>{cpus}", tres)
    if changed != tres:
        values["SLURM_TRES_PER_TASK"] = changed
    return values


def _task(
    hosts: tuple[str, ...] | list[str], counts: tuple[int, ...], node_rank: int, local_rank: int, rank: int
) -> dict[str, str]:
    """Return the variables by which srun describes a step to a task; tasks fill one node after the other."""
    nodes = str(len(counts))
    tasks = str(sum(counts))
    layout = render_counts(counts)
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
