"""Detect the rank, world size and node of this process from environment variables; pure.

The innermost launcher wins. The order is: `SLURMDDP_ENVIRONMENT`, `Distributon.launch` or torchrun, the
SLURM step, MPI, a single process. A function of your own may take the place of all of these. Variables that
contradict each other are refused at once. Otherwise a wrong world size would show up minutes later, as a
rendezvous that no rank joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slurmddp import plugins
from slurmddp.environments import mpi, slurm, torchrun
from slurmddp.environments.names import (
    ENVIRONMENT_VARIABLE,
    LAUNCH_ID_VARIABLE,
    LAUNCHER_VARIABLE,
    RESTART_COUNT_VARIABLE,
)
from slurmddp.environments.rank_info import RankInfo, integer
from slurmddp.errors import ConfigError, MismatchError, SlurmddpError


class Environment(Protocol):
    """A source of the rank, such as another scheduler: a function of the environment variables."""

    def __call__(self, environ: Mapping[str, str], /) -> RankInfo:
        """Return rank, world size and node of the process that has these variables; read nothing else.

        `environ` lacks `SLURMDDP_ENVIRONMENT`, so that the function may leave other cases to `detect`.
        """


def detect(
    environ: Mapping[str, str], environment: str | Environment | type[Environment] | None = None
) -> RankInfo:
    """Return rank, world size and node of this process.

    Args:
        environ: the environment variables.
        environment: the launcher, as `SLURMDDP_ENVIRONMENT` names it, or a function or class of your own.
            `SLURMDDP_ENVIRONMENT`, `launch()` and the agents of slurmddp come first.

    Raises:
        MismatchError: the variables contradict each other.
        ConfigError: there is no such launcher, or the function of your own fails.

    Example:
        info = detect(os.environ, "my_package.lsf.rank_info")
    """
    forced = environ.get(ENVIRONMENT_VARIABLE, "")
    if forced:
        return _chosen(forced, environ, ENVIRONMENT_VARIABLE)
    if environment is not None and not (LAUNCHER_VARIABLE in environ or RESTART_COUNT_VARIABLE in environ):
        return _chosen(environment, environ, "environment")
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


ENVIRONMENTS: dict[str, Environment] = {
    "slurm": slurm.rank_info,
    "torchrun": torchrun.rank_info,
    "mpi": mpi.rank_info,
    "single": _single,
}


def _chosen(given: str | Environment | type[Environment], environ: Mapping[str, str], key: str) -> RankInfo:
    """Return the info by the environment that a person has chosen."""
    environment: Environment = plugins.build(given, ENVIRONMENTS, Environment, key=key)
    others = {name: value for name, value in environ.items() if name != ENVIRONMENT_VARIABLE}
    try:
        info = environment(others)
    except SlurmddpError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} {given!r} failed: {type(error).__name__}: {error}.",
            hint="Return a RankInfo, or raise a SlurmddpError that says which variable is missing.",
        ) from error
    if problem := _problem_of(info):
        raise MismatchError(
            f"{key} {given!r} gave {info!r}: {problem}.",
            hint="slurmddp/environments/rank_info.py describes each field.",
        )
    return info


def _problem_of(info: RankInfo) -> str:
    """Return the first contradiction in the numbers of an environment, or an empty text."""
    if not isinstance(info, RankInfo):
        return "it must be a RankInfo"
    if not (
        0 <= info.rank < info.world_size
        and 0 <= info.local_rank < info.local_world_size <= info.world_size
        and 0 <= info.node_rank < info.nodes
    ):
        return "rank, local_rank and node_rank count from 0 and stay below their size"
    if info.tasks and sum(info.tasks) != info.world_size:
        return "tasks must add up to world_size"
    if info.world_size > 1 and info.launch_id == "single" and info.master_port is None:
        return "several ranks need a launch_id that they share, or master_addr and master_port"
    return ""


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
