"""Bind a rank to its share of the node's processors, and set one thread per core."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping

import torch

from slurmddp.environments.names import THREADS_BY_AGENT_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.cpus import may_bind, numa_node_of, read_cpus, share_of, shortage, threads_on
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.device.choice import choose_threads, ranks_on_machine

_log = logging.getLogger(__name__)
THREADS_VARIABLE = "OMP_NUM_THREADS"


def take_cpus(info: RankInfo, undo: contextlib.ExitStack) -> None:
    """Bind this rank, if an agent has started it, and set its number of threads.

    Closing `undo` restores both. OMP_NUM_THREADS is set too, for libraries that torch does not control. A
    value that the user has set stays.
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

    # A single rank without an allocation keeps torch's choice.
    is_alone = info.world_size == 1 and info.cpus is None
    if is_alone or _is_chosen(os.environ):
        return

    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    os.environ[THREADS_VARIABLE] = str(threads)


def _is_chosen(environ: Mapping[str, str]) -> bool:
    """Decide whether the user has chosen the number of threads."""
    return bool(environ.get(THREADS_VARIABLE)) and not environ.get(THREADS_BY_AGENT_VARIABLE)


def share_threads(info: RankInfo) -> None:
    """Set as many threads as this rank's share of the node's cores, unless OMP_NUM_THREADS is set.

    Functions without `Distributon` run with this number. The rank stays unbound, and CUDA is not touched.
    """
    if _is_chosen(os.environ):
        return

    cpus = read_cpus()
    cores = len(cpus.cores()) // ranks_on_machine(info)
    torch.set_num_threads(max(1, min(choose_threads(info, cpus.usable), cores)))


def _gpu_numa_nodes(info: RankInfo) -> list[int | None]:
    """Return the NUMA node of each local rank's GPU; empty if a rank has no GPU or a GPU does not answer."""
    if torch.cuda.device_count() < info.local_world_size:
        return []

    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(info.local_world_size)]
    except RuntimeError:
        # The rank of the broken GPU reports it.
        return []

    numa_nodes: list[int | None] = []
    for gpu in gpus:
        address = [getattr(gpu, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        # Some versions of torch don't know the PCI address.
        if min(address) < 0:
            numa_nodes.append(None)
        else:
            numa_nodes.append(numa_node_of("{:04x}:{:02x}:{:02x}.0".format(*address)))

    return numa_nodes
