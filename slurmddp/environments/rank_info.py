"""The facts that a process needs about its place in a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where one process stands; rank words mean what they mean in torch.

    Invariants (checked by `detect`): 0 <= rank < world_size, 0 <= local_rank < local_world_size,
    0 <= node_rank < nodes, sum of tasks over nodes == world_size.
    """

    environment: str
    """Who started this process: `slurm`, `torchrun`, `mpi`, `local` (`Distributon.launch`) or `single`."""
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nodes: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    """Names of the nodes in rank order; only the first is needed to meet the others."""
    tasks: tuple[int, ...] = ()
    """How many ranks each node has, where the scheduler says so; else all have as many as this one."""
    master_addr: str | None = None
    """Set when the launcher names the meeting point itself; otherwise `hosts[0]`."""
    master_port: int | None = None
    """Set when the launcher has already chosen a port; otherwise the ranks find one (see `rendezvous`)."""
    launch_id: str = "single"
    """The same text on all ranks of one launch, and on no other: job, step and restart under SLURM."""
    emulated: bool = False
    """The nodes are pretended on this machine, so loopback between them is right."""
    cpus: int | None = None
    """CPUs that the scheduler gives each task, where it says so."""
    gpus_on_node: int | None = None
    """GPUs that the scheduler granted on this node, where it says so."""
