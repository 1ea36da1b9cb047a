"""Detect the rank, world size and node of this process from environment variables; pure.

The innermost launcher wins. The order is: `SLURMDDP_ENVIRONMENT`, `Distributon.launch` or torchrun, the
SLURM step, MPI, a single process. Variables that contradict each other are refused at once.
Otherwise a wrong world size would show up minutes later, as a rendezvous that no rank joins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurmddp.environments import mpi, slurm, torchrun
from slurmddp.environments.names import ENVIRONMENT_VARIABLE, LAUNCH_ID_VARIABLE, LAUNCHER_VARIABLE
from slurmddp.environments.rank_info import RankInfo, integer
from slurmddp.errors import ConfigError, MismatchError, near_matches


def detect(environ: Mapping[str, str]) -> RankInfo:
    """Return rank, world size and node of this process.

    Args:
        environ: the environment variables.

    Raises:
        MismatchError: the variables contradict each other.
    """
    forced = environ.get(ENVIRONMENT_VARIABLE, "")
    if forced:
        return _forced(forced, environ)
    if environ.get(LAUNCHER_VARIABLE) == "local":
        return torchrun.local_rank_info(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return torchrun.rank_info(environ)
    if slurm.in_step(environ):
        info = slurm.rank_info(environ)
        slurm.refuse_leaked_step(environ)
        mpi.refuse_inside_step(environ)
        return info
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return torchrun.rank_info(environ)
    if mpi.started_by_mpirun(environ):
        return mpi.rank_info(environ)
    if slurm.in_allocation(environ):
        slurm.refuse_tasks_without_srun(environ)
    return _single(environ)


def _single(environ: Mapping[str, str]) -> RankInfo:
    """Return the info of a single process, with the CPUs and GPUs of an allocation around it."""
    return RankInfo(
        environment="single",
        launch_id=environ.get(LAUNCH_ID_VARIABLE, "single"),
        cpus=integer(environ, "SLURM_CPUS_PER_TASK", least=1),
        gpus_on_node=integer(environ, "SLURM_GPUS_ON_NODE"),
    )


_FORCED: dict[str, Callable[[Mapping[str, str]], RankInfo]] = {
    "slurm": slurm.rank_info,
    "torchrun": torchrun.rank_info,
    "mpi": mpi.rank_info,
    "single": _single,
}


def _forced(name: str, environ: Mapping[str, str]) -> RankInfo:
    if name not in _FORCED:
        raise ConfigError(
            f"SLURMDDP_ENVIRONMENT={name!r} is not a known launcher.", hint=near_matches(name, _FORCED)
        )
    return _FORCED[name](environ)


def require(
    info: RankInfo,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    gpus_per_node: int | None = None,
) -> None:
    """Raise MismatchError unless the launch has the configured size; None leaves a number unchecked.

    Args:
        info: the rank of this process.
        nodes: the number of nodes.
        ranks_per_node: the number of tasks on this node, which is 1 for an agent.
        gpus_per_node: the least number of GPUs on this node.
    """
    where = f"{'step' if info.environment == 'slurm' else info.environment} {info.launch_id}"
    if nodes is not None and info.nodes != nodes:
        raise MismatchError(
            f"The job is configured for nodes={nodes}, but {where} runs on {info.nodes}.",
            hint=f"Start it with `srun --nodes={nodes}`, or configure nodes={info.nodes}.",
        )
    if ranks_per_node is not None:
        _require_ranks(info, ranks_per_node, where)
    if gpus_per_node and info.gpus_on_node is not None and info.gpus_on_node < gpus_per_node:
        raise MismatchError(
            f"The job is configured for gpus_per_node={gpus_per_node}, but SLURM granted {info.gpus_on_node} "
            f"GPU(s) on this node to {where}.",
            hint=f"Ask for them with `--gpus-per-node={gpus_per_node}`, or configure "
            f"gpus_per_node={info.gpus_on_node}.",
        )


def _require_ranks(info: RankInfo, ranks_per_node: int, where: str) -> None:
    total = info.nodes * ranks_per_node
    if info.local_world_size == ranks_per_node and info.world_size == total:
        return
    raise MismatchError(
        f"The job is configured for {ranks_per_node} task(s) on each of {info.nodes} node(s), {total} in "
        f"all, but {where} has {info.local_world_size} on this node and {info.world_size} in all.",
        hint=f"Start it with `srun --ntasks={total} --ntasks-per-node={ranks_per_node}`.",
    )
