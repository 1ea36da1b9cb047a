"""Detect the rank, world size and node of this process from environment variables; pure.

The innermost launcher wins. The order is: `SLURMDDP_ENVIRONMENT`, `Distributon.launch` or torchrun, the
SLURM step, MPI, a single process. A function of your own may replace all of these. Variables that contradict
each other are refused at once. Otherwise a wrong world size would show only minutes later, as a rendezvous
that not all ranks join.
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
    """A function that reads the rank from environment variables, such as those of another scheduler."""

    def __call__(self, environ: Mapping[str, str], /) -> RankInfo:
        """Return rank, world size and node of the process that has these variables; read nothing else.

        `environ` lacks `SLURMDDP_ENVIRONMENT`, so that the function may call `detect` for other cases.
        """


def detect(
    environ: Mapping[str, str], environment: str | Environment | type[Environment] | None = None
) -> RankInfo:
    """Return rank, world size and node of this process.

    Args:
        environ: the environment variables.
        environment: a launcher by name, as in `SLURMDDP_ENVIRONMENT`, or a function or class of your own. It
            is ignored if `SLURMDDP_ENVIRONMENT` is set, or if `launch()` or an agent started the process.

    Raises:
        MismatchError: the variables contradict each other.
        ConfigError: the launcher is unknown, or your function fails.

    Example:
        info = detect(os.environ, "my_package.lsf.rank_info")
    """
    forced = environ.get(ENVIRONMENT_VARIABLE, "")
    if forced:
        return _chosen(forced, environ, ENVIRONMENT_VARIABLE)

    # If a launcher of slurmddp started the process, its variables hold the rank, so `environment` is ignored.
    if environment is not None and not (LAUNCHER_VARIABLE in environ or RESTART_COUNT_VARIABLE in environ):
        return _chosen(environment, environ, "environment")
    if environ.get(LAUNCHER_VARIABLE) == "local":
        return torchrun.local_rank_info(environ)

    # torchrun comes before the step: a torchrun in a step passes the variables of the step on to its ranks.
    if "TORCHELASTIC_RUN_ID" in environ:
        return torchrun.rank_info(environ)

    # The step comes before RANK and WORLD_SIZE: srun may have passed values from its shell on to all tasks.
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
    """Return rank 0 of 1, with the CPUs and GPUs of the SLURM job in which the process runs, if any."""
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
"""The launchers that `SLURMDDP_ENVIRONMENT` may name."""


def _chosen(given: str | Environment | type[Environment], environ: Mapping[str, str], key: str) -> RankInfo:
    """Return the rank by the launcher or function that the user has chosen.

    Args:
        given: the name of the launcher, or the function or class.
        environ: the environment variables.
        key: the setting that holds `given`, for messages.

    Raises:
        ConfigError: there is no such launcher, or the function fails.
        MismatchError: the numbers that the function returns contradict each other.
    """
    environment: Environment = plugins.build(given, ENVIRONMENTS, Environment, key=key)
    # The variable is left out: with it, a function that calls `detect` would be called again, without end.
    others = {name: value for name, value in environ.items() if name != ENVIRONMENT_VARIABLE}
    try:
        info = environment(others)
    except SlurmddpError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} {given!r} failed: {type(error).__name__}: {error}.",
            hint="Return a RankInfo, or raise a SlurmddpError that names the missing variable.",
        ) from error

    problem = _problem_of(info)
    if problem:
        raise MismatchError(
            f"{key} {given!r} returned {info!r}: {problem}.",
            hint="slurmddp/environments/rank_info.py describes each field.",
        )
    return info


def _problem_of(info: RankInfo) -> str:
    """Return a clause about the first contradiction in a `RankInfo`; empty if there is none."""
    if not isinstance(info, RankInfo):
        return "it must be a RankInfo"

    is_inside = (
        0 <= info.rank < info.world_size
        and 0 <= info.local_rank < info.local_world_size <= info.world_size
        and 0 <= info.node_rank < info.nodes
    )
    if not is_inside:
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
    """Raise MismatchError unless the launch has the configured size; a number that is None is not checked.

    Args:
        info: the rank of this process.
        nodes: the number of nodes.
        ranks_per_node: the number of tasks on each node, which is 1 if the tasks are agents.
        gpus_per_node: the number of GPUs that this node needs at least.
    """
    launcher = "step" if info.environment == "slurm" else info.environment
    launch = f"{launcher} {info.launch_id}"
    if nodes is not None and info.nodes != nodes:
        raise MismatchError(
            f"The job is configured for nodes={nodes}, but {launch} runs on {info.nodes}.",
            hint=f"Start it with `srun --nodes={nodes}`, or configure nodes={info.nodes}.",
        )
    if ranks_per_node is not None:
        _require_ranks(info, ranks_per_node, launch)
    if gpus_per_node and info.gpus_on_node is not None and info.gpus_on_node < gpus_per_node:
        raise MismatchError(
            f"The job is configured for gpus_per_node={gpus_per_node}, but SLURM granted {info.gpus_on_node} "
            f"GPU(s) on this node to {launch}.",
            hint=f"Request them with `--gpus-per-node={gpus_per_node}`, or configure "
            f"gpus_per_node={info.gpus_on_node}.",
        )


def _require_ranks(info: RankInfo, ranks_per_node: int, launch: str) -> None:
    """Raise MismatchError unless each node has the configured number of tasks."""
    total = info.nodes * ranks_per_node
    if info.local_world_size == ranks_per_node and info.world_size == total:
        return

    raise MismatchError(
        f"The job is configured for {ranks_per_node} task(s) on each of {info.nodes} node(s), {total} in "
        f"all, but {launch} has {info.local_world_size} on this node and {info.world_size} in all.",
        hint=f"Start it with `srun --ntasks={total} --ntasks-per-node={ranks_per_node}`.",
    )
