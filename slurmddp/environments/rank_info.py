"""Define `RankInfo`, the facts of a process about its launch, and read their numbers from variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.errors import MismatchError


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


def integer(environ: Mapping[str, str], *names: str, least: int = 0) -> int | None:
    """Return the first set variable of `names` as a number of at least `least`; None if all are unset."""
    for name in names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if text.isascii() and text.isdigit() and int(text) >= least:
            return int(text)
        raise MismatchError(
            f"{name}={text!r} is not a whole number of at least {least}.",
            hint=f"A launcher sets it, and something has changed it. Unset {name} or start the job again.",
        )
    return None


def needed(environ: Mapping[str, str], *names: str, least: int = 0) -> int:
    """Return the first set variable of `names` as a number; raises MismatchError if all are unset."""
    value = integer(environ, *names, least=least)
    if value is None:
        raise MismatchError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set.",
            hint="Start with srun, torchrun or mpirun, or set SLURMDDP_ENVIRONMENT=single for one process.",
        )
    return value
