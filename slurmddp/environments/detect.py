"""Who am I? One pure function from environment variables to a `RankInfo`.

The innermost launcher wins: a person's own word first, then processes that `Distributon.launch` or torchrun
started, then the SLURM step, then MPI, then a process of its own. What does not fit together is refused
here, in the first milliseconds, with the flag to change: a wrong world size otherwise shows up as a
rendezvous that nobody joins, minutes later on every GPU of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurmddp.environments import mpi, slurm, torchrun
from slurmddp.environments.env_numbers import integer
from slurmddp.environments.names import ENVIRONMENT_VARIABLE, LAUNCH_ID_VARIABLE, LAUNCHER_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError, near_matches


def detect(environ: Mapping[str, str]) -> RankInfo:
    """Return this process's place; raises MismatchError when the variables contradict each other."""
    forced = environ.get(ENVIRONMENT_VARIABLE, "")
    if forced:
        return _forced(forced, environ)
    if environ.get(LAUNCHER_VARIABLE) == "local":
        return torchrun.local_place(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return torchrun.place(environ)
    if slurm.in_step(environ):
        info = slurm.place(environ)
        slurm.refuse_leaked_step(environ)
        mpi.refuse_inside_step(environ)
        return info
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return torchrun.place(environ)
    if mpi.started_by_mpirun(environ):
        return mpi.place(environ)
    if slurm.in_allocation(environ):
        slurm.refuse_tasks_without_srun(environ)
    return _single(environ)


def _single(environ: Mapping[str, str]) -> RankInfo:
    """Return the place of a process on its own, with what SLURM says about the allocation around it."""
    return RankInfo(
        environment="single",
        launch_id=environ.get(LAUNCH_ID_VARIABLE, "single"),
        cpus=integer(environ, "SLURM_CPUS_PER_TASK", least=1),
        gpus_on_node=integer(environ, "SLURM_GPUS_ON_NODE"),
    )


_FORCED: dict[str, Callable[[Mapping[str, str]], RankInfo]] = {
    "slurm": slurm.place,
    "torchrun": torchrun.place,
    "mpi": mpi.place,
    "single": _single,
}


def _forced(name: str, environ: Mapping[str, str]) -> RankInfo:
    if name not in _FORCED:
        raise ConfigError(
            f"SLURMDDP_ENVIRONMENT={name!r} is no environment that I know.", hint=near_matches(name, _FORCED)
        )
    return _FORCED[name](environ)


def require(
    info: RankInfo,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    gpus_per_node: int | None = None,
) -> None:
    """Raise MismatchError unless this place is as large as configured; None leaves a number unchecked.

    `ranks_per_node` counts the tasks on this node, which is 1 for an agent. More GPUs than configured are
    no mistake; fewer are.
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
