"""Jobs of ranks that call the all-reduce algorithms."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import FileStore, ReduceOp
from torch.nn.parallel import DistributedDataParallel

from slurmddp.collectives import ALGORITHMS, GroupLink, all_reduce
from slurmddp.errors import RankFailure
from slurmddp.strategies.ring import ddp_hook
from slurmddp.training.distributon import Distributon
from slurmddp.transports import hierarchical_link
from slurmddp.transports.hierarchical_link import HierarchicalLink
from slurmddp.transports.link_group import COMBINE
from slurmddp.transports.registry import register
from slurmddp.transports.shared_memory import WHOLE_BYTES, SharedMemoryLink
from support.distributed.group_jobs import weights_after_steps

LONG = (torch.float32, torch.bfloat16)
"""Types of which tensors longer than a slot are reduced as well."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.float64, torch.complex64, torch.complex128, *LONG),
)


def sums(copied_devices: set[str]) -> dict[str, list[list[float]]]:
    """Return the sums of all algorithms, of tensors of one, two and seven elements.

    Args:
        copied_devices: the link copies tensors on these types of devices, as it copies tensors on GPUs.
    """
    with Distributon() as d:
        d.launch()
        link = GroupLink()
        link._copied_devices = copied_devices
        tensors = [torch.full((length,), float(value)) for length, value in ((1, 1), (2, 2), (7, 3))]
        return {
            name: [all_reduce(tensor, link, algorithm=name).tolist() for tensor in tensors]
            for name in ALGORITHMS
        }


def trained(ways: list[str]) -> list[list[float]]:
    """Return the weights after four steps of DDP each way: over a backend, or an algorithm as a hook."""
    found = []
    with Distributon(seed=0) as d:
        d.launch()
        hierarchical_link._host_of_this_rank = lambda: str(d.rank)  # As if each rank had a host of its own.
        for way in ways:
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
            group = None if way in ALGORITHMS else distributed.new_group(backend=register(way))
            model = DistributedDataParallel(net, bucket_cap_mb=0.0002, process_group=group)
            if way in ALGORITHMS:
                model.register_comm_hook(GroupLink(distributed.new_group()), ddp_hook(way))
            found.append(weights_after_steps(model, d.rank))
    return found


def wrong_reductions(link: SharedMemoryLink | HierarchicalLink, slot: int) -> list[str]:
    """Return the reductions whose bits differ from a reduction in the order of ranks; `slot` is in bytes."""
    found = []
    for dtype in DTYPES:
        small = {0, 1, link.world_size - 1, link.world_size, 2 * link.world_size + 1}
        long = {WHOLE_BYTES // dtype.itemsize, 3 * slot // dtype.itemsize + 1} if dtype in LONG else set()
        for length in sorted(small | long):
            for name, combine in COMBINE.items():
                generator = torch.Generator().manual_seed(length)
                tensors = [
                    torch.randint(0, 4, (length,), generator=generator).to(dtype)
                    for _ in range(link.world_size)
                ]
                own = tensors[link.rank].clone()
                try:
                    for tensor in tensors[1:]:
                        combine(tensors[0], tensor)
                except (RuntimeError, NotImplementedError):
                    continue  # torch has no such reduction of this type.
                link.all_reduce(own, name)
                if not torch.equal(own.view(torch.uint8), tensors[0].view(torch.uint8)):
                    found.append(f"{name} of {length} {dtype}")
    return found


def wrong_copies(link: SharedMemoryLink) -> list[str]:
    """Return the broadcasts, all-gathers and means over shared memory that give wrong values."""
    found, size = [], link.world_size
    for length in (0, 1, 5, link._slot_bytes // 4 + 3):
        own = torch.arange(length, dtype=torch.int32) + link.rank
        for source in range(size):
            link.broadcast(told := own.clone(), source)
            if not torch.equal(told, own - link.rank + source):
                found.append(f"broadcast of {length} from {source}")
        link.all_gather(out := torch.empty(size * length, dtype=torch.int32), own)
        if not torch.equal(out, torch.cat([own - link.rank + rank for rank in range(size)])):
            found.append(f"all_gather of {length}")
        link.all_reduce(mean := own.double(), ReduceOp.AVG)
        if not torch.allclose(mean, own.double() - link.rank + (size - 1) / 2):
            found.append(f"mean of {length}")
    link.barrier()
    return found


def over_shared_memory(file: str) -> tuple[list[str], list[str]]:
    """Return what is wrong with collectives of processes, and where their memory can be found by a name."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    link = SharedMemoryLink(FileStore(file, world_size), rank, world_size, timedelta(seconds=60))
    descriptors = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    named = [one for one in (*descriptors, *maps) if "slurmddp-collectives" in one]
    return wrong_reductions(link, link._slot_bytes) + wrong_copies(link), named


def after_a_death(file: str) -> str:
    """Return the error of a collective whose third rank was killed. Rank 1 forks the third rank."""
    rank, store = int(os.environ["RANK"]), FileStore(file, 3)
    if rank == 1 and os.fork() == 0:
        SharedMemoryLink(store, 2, 3, timedelta(seconds=60)).barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    link = SharedMemoryLink(store, rank, 3, timedelta(seconds=60))
    link.barrier()
    try:
        link.all_reduce(torch.ones(3), ReduceOp.SUM)
    except RankFailure as error:
        return str(error)
    return "none"
