"""Contain slurmddp's launcher for Hydra, which looks for plugins in the namespace `hydra_plugins`."""
