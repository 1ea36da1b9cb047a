"""Describe the allocation of `salloc` or of a batch script around this process, and srun on its nodes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.environments import slurm
from slurmddp.environments.hostlist import expand, parse_counts
from slurmddp.environments.names import EMULATED_VARIABLE
from slurmddp.environments.scrub import scrub
from slurmddp.environments.srun_options import STEP_OPTIONS
from slurmddp.errors import ConfigError, SlurmError
from slurmddp.runs.text_format import counted
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.states import TERMINAL, parse_state


@dataclass(frozen=True)
class Allocation:
    """The SLURM allocation in which this process runs, outside of any step."""

    job_id: str
    nodes: int
    cpus: int | None
    """The CPUs of the job on the node with the fewest; None if SLURM does not give them."""
    hosts: str
    """The names of the nodes, as SLURM writes them."""

    def require(self, nodes: int, setting: str) -> None:
        """Check that the allocation has enough nodes, and that srun is on PATH.

        Args:
            nodes: the number of nodes that are needed.
            setting: the key or option that asks for the nodes, for the error message.

        Raises:
            ConfigError: the allocation has fewer nodes.
            SlurmError: there is no srun.
        """
        if nodes > self.nodes:
            raise ConfigError(
                f"{setting} is more than the {counted(self.nodes, 'node')} of this allocation "
                f"(job {self.job_id}).",
                hint=f"Use {self.nodes} or fewer, or a larger allocation.",
            )
        if shutil.which("srun") is None:
            raise SlurmError(
                f"This is an allocation of SLURM (job {self.job_id}), but there is no srun on PATH.",
                hint="Load SLURM's commands, for example by `module load slurm`.",
            )

    def agents(self, nodes: int, logs: Path, tolerates_node_loss: bool) -> list[str]:
        """Return the srun command that starts a program on each of the first `nodes` nodes.

        The caller appends the command of the agent. The agent gets all CPUs that the job has on its node.

        Args:
            nodes: the number of nodes.
            logs: the folder for the output of each agent, `node-N.log`.
            tolerates_node_loss: whether the other agents continue when an agent fails.
        """
        cpus = [] if self.cpus is None else [f"--cpus-per-task={self.cpus}"]
        return [
            *("srun", *STEP_OPTIONS, "--open-mode=append"),
            # Without this option srun would wait, without a message, until a step that runs already ends.
            "--overlap",
            *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *cpus),
            f"--kill-on-bad-exit={0 if tolerates_node_loss else 1}",
            f"--output={str(logs).replace('%', '%%')}/node-%n.log",
        ]


def around(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation in which this process runs, by the environment variables.

    The result is None outside of an allocation, inside a step, and on an emulated node.
    """
    if EMULATED_VARIABLE in environ or not slurm.in_allocation(environ) or slurm.in_step(environ):
        return None

    counts = environ.get("SLURM_JOB_CPUS_PER_NODE")
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        nodes=int(environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))),
        cpus=min(parse_counts(counts)) if counts else None,
        hosts=environ.get("SLURM_JOB_NODELIST", ""),
    )


def current(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation in which this process runs, from its variables and from SLURM's answer.

    A shell that was started by ssh on a node of a job may have no variable but SLURM_JOB_ID. Without
    `scontrol`, or without an answer, only the variables count. The result is None where `around` returns
    None.

    Raises:
        ConfigError: the job is over; a shell may outlive its job.
    """
    allocation = around(environ)
    if allocation is None or shutil.which("scontrol") is None:
        return allocation

    try:
        facts = SlurmClient().facts(allocation.job_id)
    except SlurmError:
        # Continue with the variables. If SLURM is at fault, srun reports a more precise error.
        return allocation

    state = "" if facts is None else parse_state(facts.get("JobState", ""))
    if facts is None or state in TERMINAL:
        reason = state or "SLURM does not know it"
        raise ConfigError(
            f"SLURM_JOB_ID is {allocation.job_id}, and this job is over ({reason}).",
            hint="Leave its shell, or `unset SLURM_JOB_ID` to use this machine alone.",
        )

    hosts = facts.get("NodeList", "")
    if allocation.hosts or not hosts.strip("()").replace("null", ""):
        return allocation
    return replace(allocation, nodes=len(expand(hosts)), cpus=_cpus_of_each(facts), hosts=hosts)


def _cpus_of_each(facts: Mapping[str, str]) -> int | None:
    """Return the number of CPUs of a job on each node; None if they don't divide evenly by the nodes.

    Args:
        facts: the fields of the job, as `scontrol show job` prints them.
    """
    cpus = facts.get("NumCPUs", "")
    nodes = facts.get("NumNodes", "")
    if not (cpus.isdigit() and nodes.isdigit()) or int(cpus) % max(int(nodes), 1):
        return None
    return int(cpus) // max(int(nodes), 1)


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun: `environ` without the variables of a step, a run or a rank."""
    job_variables = {
        name: value
        for name, value in environ.items()
        if name.startswith("SLURM") and not name.startswith(("SLURM_STEP", "SLURM_CPU_BIND", "SLURMDDP_"))
    }
    return {**scrub(environ), **job_variables}
