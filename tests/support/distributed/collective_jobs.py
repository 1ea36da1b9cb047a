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
"""The dtypes for which tensors longer than a slot are reduced, too."""
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
    """Return the weights after four steps of DDP, for each backend and each algorithm as a hook."""
    trained_weights = []
    with Distributon(seed=0) as d:
        d.launch()
        hierarchical_link._host_of_this_rank = lambda: str(d.rank)  # Each rank counts as a host.
        for way in ways:
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
            group = None if way in ALGORITHMS else distributed.new_group(backend=register(way))
            model = DistributedDataParallel(net, bucket_cap_mb=0.0002, process_group=group)
            if way in ALGORITHMS:
                model.register_comm_hook(GroupLink(distributed.new_group()), ddp_hook(way))
            trained_weights.append(weights_after_steps(model, d.rank))

    return trained_weights


def wrong_reductions(link: SharedMemoryLink | HierarchicalLink, slot: int) -> list[str]:
    """Return the reductions whose bits differ from a local reduction in the order of ranks.

    `slot` is the size of a slot in bytes.
    """
    wrong = []
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
                reduced = tensors[link.rank].clone()

                try:
                    for tensor in tensors[1:]:
                        combine(tensors[0], tensor)
                except (RuntimeError, TypeError):
                    continue  # torch has no such reduction of this type.

                link.all_reduce(reduced, name)
                if not torch.equal(reduced.view(torch.uint8), tensors[0].view(torch.uint8)):
                    wrong.append(f"{name} of {length} {dtype}")

    return wrong


def wrong_copies(link: SharedMemoryLink) -> list[str]:
    """Return the broadcasts, all-gathers and means over shared memory that give wrong values."""
    wrong = []
    size = link.world_size
    for length in (0, 1, 5, link._slot_bytes // 4 + 3):
        values = torch.arange(length, dtype=torch.int32) + link.rank
        for source in range(size):
            link.broadcast(received := values.clone(), source)
            if not torch.equal(received, values - link.rank + source):
                wrong.append(f"broadcast of {length} from {source}")

        link.all_gather(out := torch.empty(size * length, dtype=torch.int32), values)
        if not torch.equal(out, torch.cat([values - link.rank + rank for rank in range(size)])):
            wrong.append(f"all_gather of {length}")
        link.all_reduce(mean := values.double(), ReduceOp.AVG)
        if not torch.allclose(mean, values.double() - link.rank + (size - 1) / 2):
            wrong.append(f"mean of {length}")

    link.barrier()
    return wrong


def over_shared_memory(file: str) -> tuple[list[str], list[str]]:
    """Return the wrong results of collectives between processes, and the open paths of their memory."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    link = SharedMemoryLink(FileStore(file, world_size), rank, world_size, timedelta(seconds=60))
    descriptors = [
        str(descriptor.readlink())
        for descriptor in Path("/proc/self/fd").iterdir()
        if descriptor.is_symlink()
    ]
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    named = [path for path in (*descriptors, *maps) if "slurmddp-collectives" in path]
    return wrong_reductions(link, link._slot_bytes) + wrong_copies(link), named


def after_a_death(file: str) -> str:
    """Return the error of a collective whose third rank was killed. Rank 1 forks the third rank."""
    rank = int(os.environ["RANK"])
    store = FileStore(file, 3)
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
