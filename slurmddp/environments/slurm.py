"""Read the rank of a process from the variables of its SLURM step.

Only the variables SLURM_STEP_* describe the step. SLURM_JOB_NODELIST names all nodes of the job, even in a
step on one node. SLURM_NTASKS_PER_NODE is often missing. The batch script has SLURM_PROCID=0 without srun.
So a variable of the job is used only if the variable of the step is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.environments.hostlist import expand, parse_counts
from slurmddp.environments.job_id import job_id
from slurmddp.environments.names import (
    EMULATED_VARIABLE,
    LAUNCH_ID_VARIABLE,
    MASTER_ADDR_VARIABLE,
    RESTART_COUNT_VARIABLE,
)
from slurmddp.environments.rank_info import RankInfo, integer, needed
from slurmddp.errors import MismatchError
from slurmddp.short_text import first_items

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""The first id of steps that srun does not start: interactive (salloc's shell), batch, extern."""

_SINGLE_HINT = "For one process that ignores SLURM, set SLURMDDP_ENVIRONMENT=single."


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs inside a SLURM job, in a step or outside of steps."""
    return bool(environ.get("SLURM_JOB_ID"))


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task; False in a batch script and in salloc's shell."""
    step = environ.get("SLURM_STEP_ID", "")
    # The batch script and salloc's shell have SLURM_PROCID as well, but the id of a special step.
    is_of_srun = step.isascii() and step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    return is_of_srun and in_allocation(environ) and "SLURM_PROCID" in environ


def refuse_tasks_without_srun(environ: Mapping[str, str]) -> None:
    """Raise MismatchError if the job requests several tasks but srun has not started this process."""
    # SLURM_NTASKS is missing if the job requests nodes alone; srun then starts a task on each node.
    tasks = integer(environ, "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = integer(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    if (tasks or nodes) <= 1:
        return

    request = f"--ntasks={tasks}" if tasks else f"--nodes={nodes}"
    raise MismatchError(
        f"Job {job_id(environ)} requests {request} ({nodes} node(s), {tasks or nodes} tasks), but this "
        "process was not started by srun, so it would train alone.",
        hint=f"Put srun before the command (`srun python ...`). {_SINGLE_HINT}",
    )


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank of this task in its step; raise MismatchError if variables contradict each other."""
    _refuse_het_job(environ)
    world_size = needed(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    rank = needed(environ, "SLURM_PROCID")
    node_rank = needed(environ, "SLURM_NODEID")
    local_rank = needed(environ, "SLURM_LOCALID")

    counts = parse_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    hosts = _hosts(environ)
    _check_layout(environ, counts, hosts, world_size)
    _check_position(counts, rank, node_rank, local_rank, world_size)

    # Emulated nodes are all this machine: their ranks meet on loopback, whatever SLURMDDP_MASTER_ADDR holds.
    emulated = environ.get(EMULATED_VARIABLE) == "1"
    address = None if emulated else environ.get(MASTER_ADDR_VARIABLE)
    return RankInfo(
        environment="slurm",
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        nodes=len(counts),
        hosts=hosts,
        tasks=counts,
        master_addr=address or None,
        launch_id=_launch_id(environ),
        emulated=emulated,
        cpus=_cpus(environ, counts[node_rank]),
        gpus_on_node=integer(environ, "SLURM_GPUS_ON_NODE"),
    )


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of the step in rank order."""
    return expand(_text(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))


def _text(environ: Mapping[str, str], *names: str) -> str:
    """Return the first variable of `names` that is set; raise MismatchError if all are unset."""
    for name in names:
        if environ.get(name):
            return environ[name]
    raise MismatchError(f"{' and '.join(names)} are not set.", hint=f"Start with srun. {_SINGLE_HINT}")


def _check_layout(
    environ: Mapping[str, str], counts: tuple[int, ...], hosts: tuple[str, ...], world_size: int
) -> None:
    """Raise MismatchError unless the variables agree on the numbers of nodes and tasks."""
    nodes = integer(environ, "SLURM_STEP_NUM_NODES", least=1)
    if len(counts) != len(hosts) or nodes not in (None, len(hosts)):
        number = "" if nodes is None else f", SLURM_STEP_NUM_NODES={nodes}"
        raise MismatchError(
            f"SLURM's variables contradict each other: {len(hosts)} host(s), task counts for {len(counts)} "
            f"node(s){number}.",
            hint=f"Start the step with `srun --nodes=N --ntasks-per-node=R`. {_SINGLE_HINT}",
        )

    if sum(counts) != world_size:
        raise MismatchError(
            f"The tasks on the nodes ({', '.join(map(str, counts))}) add up to {sum(counts)}, but the step "
            f"has {world_size} tasks.",
            hint=f"Give srun `--ntasks` and `--ntasks-per-node`, and no `--preserve-env`. {_SINGLE_HINT}",
        )


def _check_position(
    counts: tuple[int, ...], rank: int, node_rank: int, local_rank: int, world_size: int
) -> None:
    """Raise MismatchError unless rank, node rank and local rank are below their sizes in the step."""
    for name, value, bound, flag in (
        ("SLURM_PROCID", rank, world_size, "--ntasks"),
        ("SLURM_NODEID", node_rank, len(counts), "--nodes"),
        ("SLURM_LOCALID", local_rank, counts[min(node_rank, len(counts) - 1)], "--ntasks-per-node"),
    ):
        if value >= bound:
            raise MismatchError(
                f"{name}={value}, but in this step the value must be below {bound}.",
                hint=f"Start the step with the right `srun {flag}=...`. Variables of another step may have "
                f"leaked into this one. {_SINGLE_HINT}",
            )


def _refuse_het_job(environ: Mapping[str, str]) -> None:
    """Raise MismatchError inside a heterogeneous job of several components."""
    # Older versions of SLURM call such a job a pack job.
    size = integer(environ, "SLURM_HET_SIZE", "SLURM_PACK_SIZE")
    if size is not None and size > 1:
        raise MismatchError(
            f"This is a heterogeneous job of {size} components; slurmddp supports only one.",
            hint="Request one kind of node: no ` : ` on the command line and no `#SBATCH hetjob` line.",
        )


def refuse_leaked_step(environ: Mapping[str, str]) -> None:
    """Raise MismatchError if the variables of the step do not belong to the job around this process.

    A job that is submitted inside a step inherits SLURM_STEP_*. Without this check, a batch script of eight
    tasks would train alone, as a world of one rank.
    """
    hosts = _hosts(environ)
    # SLURM sets SLURMD_NODENAME for every process that it starts, so no other job's value remains.
    node = environ.get("SLURMD_NODENAME")
    if node and node not in hosts:
        raise _leaked(
            f"this process runs on node {node}, which is not in SLURM_STEP_NODELIST={_first(hosts)}"
        )

    job_hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    if job_hosts and not set(hosts) <= set(job_hosts):
        raise _leaked(f"the job has the nodes {_first(job_hosts)}, the step has {_first(hosts)}")

    # If both jobs run on the same nodes, only their numbers of tasks can differ.
    job_tasks = integer(environ, "SLURM_NTASKS")
    tasks = integer(environ, "SLURM_STEP_NUM_TASKS")
    if job_tasks is not None and tasks is not None and job_tasks != tasks:
        raise _leaked(f"SLURM_NTASKS={job_tasks}, but SLURM_STEP_NUM_TASKS={tasks}")


def _leaked(contradiction: str) -> MismatchError:
    """Return the error for variables of another step."""
    return MismatchError(
        f"The SLURM_STEP_* variables belong to another step: {contradiction}.",
        hint="A job submitted from inside a job inherits them. Put srun before the command, or unset SLURM_* "
        "before the submission. If srun started this process (`--preserve-env`), set "
        "SLURMDDP_ENVIRONMENT=slurm.",
    )


def _first(hosts: tuple[str, ...]) -> str:
    """Return the first hosts of a list, for a message."""
    return first_items(hosts, 4, separator=",", rest=",...")


def _launch_id(environ: Mapping[str, str]) -> str:
    """Return an id that only the ranks of this launch share.

    A requeue, a new step, and a restart of the worker group each give another id.
    """
    restart = integer(environ, "SLURM_RESTART_COUNT") or 0
    parts = [environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0"), str(restart)]
    restart_count = environ.get(RESTART_COUNT_VARIABLE)
    if environ.get(LAUNCH_ID_VARIABLE):
        parts.append(environ[LAUNCH_ID_VARIABLE])
    # The letter keeps the restart count of the worker group apart from SLURM's count of requeues.
    if restart_count:
        parts.append(f"g{restart_count}")
    return ".".join(parts)


def _cpus(environ: Mapping[str, str], tasks: int) -> int | None:
    """Return the number of CPUs of one task; None if it is not known."""
    # SLURM sets this variable only if the job requested CPUs by --cpus-per-task. In other jobs the tasks of a
    # node share its CPUs.
    per_task = integer(environ, "SLURM_CPUS_PER_TASK", least=1)
    if per_task is not None:
        return per_task

    on_node = integer(environ, "SLURM_CPUS_ON_NODE", least=1)
    return None if on_node is None else max(1, on_node // tasks)
