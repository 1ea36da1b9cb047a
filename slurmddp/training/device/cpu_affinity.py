"""Bind a rank to its share of the node's processors, and set one thread per core."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping

import torch

from slurmddp.environments.names import THREADS_BY_AGENT_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.cpu_shares import may_bind, numa_node_of, read_cpus, share_of, shortage, threads_on
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.device.choice import choose_threads, ranks_on_machine

_log = logging.getLogger(__name__)
THREADS_VARIABLE = "OMP_NUM_THREADS"


def take_cpus(info: RankInfo, undo: contextlib.ExitStack) -> None:
    """Bind this rank to its share of the processors, and set its number of threads.

    The rank is bound only if `may_bind` allows it. The number of threads is set in torch and in
    OMP_NUM_THREADS, which other libraries read; if the user has set OMP_NUM_THREADS, both stay as they are.

    Args:
        info: this rank.
        undo: gets callbacks that restore the binding and torch's number of threads.
    """
    cpus = read_cpus()
    if info.local_rank == 0:
        warning = shortage(info, cpus, RunContext.read(os.environ).by_agent)
        if warning:
            _log.warning(warning)

    threads = choose_threads(info, cpus.usable)
    if may_bind(info, os.environ, cpus):
        share = share_of(cpus, info.local_rank, info.local_world_size, _gpu_numa_nodes(info))
        undo.callback(os.sched_setaffinity, 0, cpus.allowed)
        os.sched_setaffinity(0, share)
        threads = min(threads, threads_on(cpus, share))

    # A single rank outside of an allocation may use the whole machine, so torch's own number stays.
    is_alone = info.world_size == 1 and info.cpus is None
    if is_alone or _is_chosen(os.environ):
        return

    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    os.environ[THREADS_VARIABLE] = str(threads)


def _is_chosen(environ: Mapping[str, str]) -> bool:
    """Decide whether the user, and not the agent, has set OMP_NUM_THREADS."""
    return bool(environ.get(THREADS_VARIABLE)) and not environ.get(THREADS_BY_AGENT_VARIABLE)


def share_threads(info: RankInfo) -> None:
    """Set torch's number of threads to this rank's share of the cores, unless the user set OMP_NUM_THREADS.

    It is for functions that run as ranks without a `Distributon`. The rank is not bound to processors, and
    CUDA is not initialised.
    """
    if _is_chosen(os.environ):
        return

    cpus = read_cpus()
    cores = len(cpus.cores()) // ranks_on_machine(info)
    torch.set_num_threads(max(1, min(choose_threads(info, cpus.usable), cores)))


def _gpu_numa_nodes(info: RankInfo) -> list[int | None]:
    """Return the NUMA node of each local rank's GPU, None if it is unknown.

    The list is empty if there are fewer GPUs than ranks, or CUDA raises an error for a GPU.
    """
    if torch.cuda.device_count() < info.local_world_size:
        return []

    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(info.local_world_size)]
    except RuntimeError:
        # A GPU is broken. The rank that takes it raises the error later; here, only report no NUMA nodes.
        return []

    numa_nodes: list[int | None] = []
    for gpu in gpus:
        address = [getattr(gpu, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        # In some versions of torch the properties of a GPU lack its PCI address.
        if min(address) < 0:
            numa_nodes.append(None)
        else:
            numa_nodes.append(numa_node_of("{:04x}:{:02x}:{:02x}.0".format(*address)))

    return numa_nodes
