"""A SLURM of one's own on this machine, for people who want to try their job and for the project's tests."""

from slurmddp.sandbox.cluster import Sandbox, Status

__all__ = ["Sandbox", "Status"]
