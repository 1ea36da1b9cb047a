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
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.states import TERMINAL, parse_state


@dataclass(frozen=True)
class Allocation:
    """The allocation around this process."""

    job_id: str
    nodes: int
    cpus: int | None
    """The CPUs of the job on the node with the fewest; None if SLURM does not give them."""
    hosts: str
    """The names of the nodes, as SLURM writes them."""

    def require(self, nodes: int, setting: str) -> None:
        """Raise an error unless the allocation has the `nodes` of a `setting`, and srun is on PATH."""
        if nodes > self.nodes:
            raise ConfigError(
                f"{setting} is more than the {self.nodes} node(s) of this allocation (job {self.job_id}).",
                hint=f"Use {self.nodes} or fewer, or a larger allocation.",
            )
        if shutil.which("srun") is None:
            raise SlurmError(
                "This is an allocation of SLURM, but there is no srun on PATH.",
                hint="Load SLURM's commands, for example by `module load slurm`.",
            )

    def agents(self, nodes: int, logs: Path, tolerates_node_loss: bool) -> list[str]:
        """Return the srun that starts an agent on each of the first `nodes` nodes, with all CPUs of the job.

        Args:
            nodes: the number of nodes.
            logs: the folder for the output of each agent, `node-N.log`.
            tolerates_node_loss: whether the other agents stay when an agent fails.
        """
        cpus = [] if self.cpus is None else [f"--cpus-per-task={self.cpus}"]
        return [
            *("srun", *STEP_OPTIONS, "--open-mode=append"),
            # Without this option srun would wait in silence for the end of a step that runs already.
            "--overlap",
            *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *cpus),
            f"--kill-on-bad-exit={0 if tolerates_node_loss else 1}",
            f"--output={str(logs).replace('%', '%%')}/node-%n.log",
        ]


def around(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation around this process; None outside of one, and inside a step."""
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
    """Return the allocation around this process, and ask SLURM for facts that the variables don't hold.

    A shell that came by ssh to a node of a job may have only SLURM_JOB_ID.

    Raises:
        ConfigError: the job is over. A shell may outlive its job.
    """
    allocation = around(environ)
    if allocation is None or shutil.which("scontrol") is None:
        return allocation

    try:
        facts = SlurmClient().facts(allocation.job_id)
    except SlurmError:
        # The variables are enough for srun, whose error says more.
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
    """Return the CPUs of a job on each node if all nodes have equally many, else None."""
    cpus = facts.get("NumCPUs", "")
    nodes = facts.get("NumNodes", "")
    if not (cpus.isdigit() and nodes.isdigit()) or int(cpus) % max(int(nodes), 1):
        return None
    return int(cpus) // max(int(nodes), 1)


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun: it has the variables of the job, but of no step, run or rank."""
    job_variables = {
        name: value
        for name, value in environ.items()
        if name.startswith("SLURM") and not name.startswith(("SLURM_STEP", "SLURM_CPU_BIND", "SLURMDDP_"))
    }
    return {**scrub(environ), **job_variables}
