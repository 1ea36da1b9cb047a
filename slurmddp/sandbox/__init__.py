"""Run a real SLURM on this machine, to try a job and to test slurmddp."""

from slurmddp.sandbox.cluster import Sandbox, Status

__all__ = ["Sandbox", "Status"]
