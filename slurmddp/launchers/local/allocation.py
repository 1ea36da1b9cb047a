"""The nodes that `salloc` or a batch script of one's own holds: srun starts processes on them, in a step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.environments import slurm
from slurmddp.environments.hostlist import parse_counts
from slurmddp.environments.names import EMULATED_VARIABLE
from slurmddp.environments.scrub import scrub
from slurmddp.errors import ConfigError, SlurmError


@dataclass(frozen=True)
class Allocation:
    """The allocation around this process."""

    job_id: str
    nodes: int
    cpus: int | None
    """CPUs that the job has on each node, at least; None if SLURM does not say."""
    hosts: str
    """The names of the nodes, as SLURM writes them."""

    def require(self, nodes: int, asked: str) -> None:
        """Raise an error unless the allocation has `nodes` nodes and srun is here; `asked` is the setting."""
        if nodes > self.nodes:
            raise ConfigError(
                f"{asked} is more than the {self.nodes} node(s) of this allocation (job {self.job_id}).",
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
            logs: the folder that gets the output of each agent, `node-N.log`.
            tolerates_node_loss: whether the other agents stay when one fails.
        """
        cpus = [] if self.cpus is None else [f"--cpus-per-task={self.cpus}"]
        return [
            *("srun", "--mpi=none", "--export=ALL", "--wait=0", "--open-mode=append"),
            "--overlap",  # Beside a step that runs already, instead of waiting for its end without a word.
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


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for srun: those of the job, and none of another step, run or rank."""
    of_job = {
        name: value
        for name, value in environ.items()
        if name.startswith("SLURM") and not name.startswith(("SLURM_STEP", "SLURM_CPU_BIND", "SLURMDDP_"))
    }
    return {**scrub(environ), **of_job}
