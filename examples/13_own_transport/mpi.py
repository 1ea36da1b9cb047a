"""A transport over MPI, by mpi4py, for ranks that mpiexec started: backend=mpi.Mpi"""

from collections.abc import Callable
from datetime import timedelta

import torch
from mpi4py import MPI
from torch import distributed


class Mpi:
    """MPI messages between the ranks of a group; mpiexec started the ranks."""

    def __init__(self, store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size

        store.set(f"mpi-{rank}", str(MPI.COMM_WORLD.rank))
        members = [int(store.get(f"mpi-{other}")) for other in range(world_size)]
        if len(set(members)) < world_size:
            raise RuntimeError("MPI has a single rank; start the program with mpiexec -n RANKS")

        # With a communicator of its own, a group never receives messages of another group.
        self.ranks = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(members))

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        return self.ranks.Isend(_bytes(tensor), to).Wait

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self.ranks.Recv(_bytes(tensor), source)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor of any dtype."""
    return memoryview(tensor.view(torch.uint8).numpy())
