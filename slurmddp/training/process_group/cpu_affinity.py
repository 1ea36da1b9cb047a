"""A rank takes its share of the node's processors, and computes with as many threads as these have cores."""

from __future__ import annotations

import contextlib
import logging
import os

import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.cpus import may_bind, numa_node_of, read_cpus, share_of, shortage, threads_on
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.process_group.device import choose_threads
from slurmddp.training.process_group.variable import set_variable

_log = logging.getLogger(__name__)


def take_cpus(info: RankInfo, undo: contextlib.ExitStack) -> None:
    """Bind this rank, if an agent has started it, and set the number of its threads until `undo` is closed.

    OMP_NUM_THREADS stays as it is where a person has set it.
    """
    cpus, together = read_cpus(), RunContext.read(os.environ).by_agent
    if info.local_rank == 0 and (line := shortage(info, cpus, together)):
        _log.warning(line)
    threads = choose_threads(info, cpus.usable)
    if may_bind(info, os.environ, cpus):
        own = share_of(cpus, info.local_rank, info.local_world_size, _gpu_numa_nodes(info))
        undo.callback(os.sched_setaffinity, 0, cpus.allowed)
        os.sched_setaffinity(0, own)
        threads = min(threads, threads_on(cpus, own))
    alone = info.world_size == 1 and info.cpus is None
    if alone or os.environ.get("OMP_NUM_THREADS"):
        return
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    set_variable("OMP_NUM_THREADS", str(threads), undo)


def share_threads(info: RankInfo) -> None:
    """Let this rank compute with its share of the node's cores, unless OMP_NUM_THREADS is set.

    It is for programs that never call `take_cpus`; neither CUDA nor the rank's binding is touched.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        cpus = read_cpus()
        ranks = info.world_size if info.emulated else info.local_world_size
        torch.set_num_threads(max(1, min(choose_threads(info, cpus.usable), len(cpus.cores()) // ranks)))


def _gpu_numa_nodes(info: RankInfo) -> list[int | None]:
    """Return the NUMA nodes of the GPUs of this node's ranks, where each takes the one of its own number."""
    if torch.cuda.device_count() < info.local_world_size:
        return []
    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(info.local_world_size)]
    except RuntimeError:
        return []  # One does not answer: its own rank tells of it.
    found = []
    for gpu in gpus:
        place = [getattr(gpu, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        found.append(numa_node_of("{:04x}:{:02x}:{:02x}.0".format(*place)) if min(place) >= 0 else None)
    return found
