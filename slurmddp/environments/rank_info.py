"""Define `RankInfo`: the facts that a process needs about its launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank, world size and node of one process; the words mean the same as in torch.

    Invariants (checked by `detect`): 0 <= rank < world_size, 0 <= local_rank < local_world_size,
    0 <= node_rank < nodes, sum of tasks over nodes == world_size.
    """

    environment: str
    """The launcher: `slurm`, `torchrun`, `mpi`, `local` (`Distributon.launch`) or `single`."""
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    """Names of the nodes in rank order; the rendezvous needs only the first one."""
    tasks: tuple[int, ...] = ()
    """The number of ranks of each node, if the scheduler says so; else all nodes have as many as this one."""
    master_addr: str | None = None
    """The rendezvous address, if the launcher names one; otherwise `hosts[0]`."""
    master_port: int | None = None
    """The rendezvous port, if the launcher has chosen one; otherwise the ranks find a port."""
    launch_id: str = "single"
    """An id that all ranks of one launch share, and no others: job, step and restart under SLURM."""
    emulated: bool = False
    """Whether the nodes are emulated on this machine, so that loopback between them is right."""
    cpus: int | None = None
    """CPUs of each task, if the scheduler says so."""
    gpus_on_node: int | None = None
    """GPUs that the scheduler granted on this node, if it says so."""
