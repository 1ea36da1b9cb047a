"""Define `RankInfo`, the place of a process in its launch, and read numbers from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmddp.errors import MismatchError


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank, world size and node of one process; these terms mean the same as in torch.

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
    """Names of the nodes in rank order; the rendezvous needs only the first name."""
    tasks: tuple[int, ...] = ()
    """The number of ranks on each node; if empty, all nodes have as many ranks as this node."""
    master_addr: str | None = None
    """The address for the rendezvous; None means `hosts[0]`."""
    master_port: int | None = None
    """The port for the rendezvous; None means that the ranks choose a port."""
    launch_id: str = "single"
    """An id that only the ranks of one launch share; under SLURM it holds job, step and restart."""
    emulated: bool = False
    """Whether the nodes are emulated on this machine, so that they meet on loopback."""
    cpus: int | None = None
    """The number of CPUs of each task; None if the scheduler does not report it."""
    gpus_on_node: int | None = None
    """The number of GPUs that the scheduler granted on this node; None if it does not report it."""


def integer(environ: Mapping[str, str], *names: str, least: int = 0) -> int | None:
    """Return the first variable of `names` that is set, as a whole number; None if all are unset.

    Raises:
        MismatchError: the value is not a whole number of at least `least`.
    """
    for name in names:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if text.isascii() and text.isdigit() and int(text) >= least:
            return int(text)
        raise MismatchError(
            f"{name}={text!r} is not a whole number of at least {least}.",
            hint=f"A launcher sets it, but something has changed it. Unset {name} or start the job again.",
        )
    return None


def needed(environ: Mapping[str, str], *names: str, least: int = 0) -> int:
    """Return the first variable of `names` that is set, as `integer` does; raise MismatchError if none is."""
    value = integer(environ, *names, least=least)
    if value is None:
        raise MismatchError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set.",
            hint="Start with srun, torchrun or mpirun, or set SLURMDDP_ENVIRONMENT=single for one process.",
        )
    return value
