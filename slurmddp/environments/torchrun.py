"""Read the rank of a process from the variables of torchrun, or of `Distributon.launch`."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.environments.names import LAUNCH_ID_VARIABLE
from slurmddp.environments.rank_info import RankInfo, integer, needed
from slurmddp.errors import MismatchError

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank of a process of torchrun; raise MismatchError if a needed variable is missing."""
    rank, world_size, local_rank, local_world_size = _numbers(environ)
    address = environ.get("MASTER_ADDR")
    port = integer(environ, "MASTER_PORT", least=1)
    if world_size > 1 and (not address or port is None):
        raise MismatchError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but not both MASTER_ADDR and MASTER_PORT.",
            hint="Start with torchrun or srun. If you set the variables by hand, set these two as well.",
        )

    # Without LOCAL_WORLD_SIZE all ranks would count as ranks of this machine.
    if world_size > 1 and address not in _THIS_MACHINE and not environ.get("LOCAL_WORLD_SIZE"):
        raise MismatchError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but not LOCAL_WORLD_SIZE, the "
            "number of ranks on this machine.",
            hint="Set LOCAL_WORLD_SIZE (1 for one process on each machine), and LOCAL_RANK if ranks don't "
            "fill one machine after the other. Or start with torchrun.",
        )

    # torchrun has one agent on each machine, and GROUP_RANK is the rank of the agent.
    node_rank = integer(environ, "GROUP_RANK", "NODE_RANK")
    if node_rank is None:
        node_rank = rank // local_world_size
    nodes = integer(environ, "GROUP_WORLD_SIZE", least=1) or -(-world_size // local_world_size)
    return RankInfo(
        environment="torchrun",
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=max(nodes, node_rank + 1),
        hosts=(address or "localhost",),
        master_addr=address,
        master_port=port,
        # torchrun's restart count is not part of the id: after a failure, the counts of the nodes differ.
        launch_id=environ.get(LAUNCH_ID_VARIABLE)
        or environ.get("TORCHELASTIC_RUN_ID")
        or f"{address}:{port}",
        gpus_on_node=integer(environ, "SLURM_GPUS_ON_NODE"),
    )


def local_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank of a process that `Distributon.launch` has started on this machine."""
    rank, world_size, local_rank, local_world_size = _numbers(environ)
    launch_id = environ.get(LAUNCH_ID_VARIABLE)
    if not launch_id:
        raise MismatchError(
            "SLURMDDP_LAUNCHER=local is set, but not SLURMDDP_LAUNCH_ID.",
            hint="Distributon.launch sets both. Unset SLURMDDP_LAUNCHER in a process that it did not start.",
        )

    return RankInfo(
        environment="local",
        rank=rank,
        local_rank=local_rank,
        node_rank=integer(environ, "NODE_RANK") or 0,
        world_size=world_size,
        local_world_size=local_world_size,
        launch_id=launch_id,
        emulated=True,
    )


def _numbers(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return rank, world size, local rank and local world size; raise MismatchError for a contradiction."""
    rank = needed(environ, "RANK")
    world_size = needed(environ, "WORLD_SIZE", least=1)

    # A person who sets the variables by hand may omit LOCAL_WORLD_SIZE and LOCAL_RANK.
    local_world_size = integer(environ, "LOCAL_WORLD_SIZE", least=1) or world_size
    local_rank = integer(environ, "LOCAL_RANK")
    if local_rank is None:
        local_rank = rank % local_world_size

    if rank >= world_size or local_rank >= local_world_size or local_world_size > world_size:
        raise MismatchError(
            f"RANK={rank} of WORLD_SIZE={world_size} with LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_world_size} contradict each other.",
            hint="Start with torchrun, or set all four: ranks count from 0 and stay below their size.",
        )

    return rank, world_size, local_rank, local_world_size
