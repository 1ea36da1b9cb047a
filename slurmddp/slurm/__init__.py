"""Talking to SLURM: its commands, options, states and limits, and the batch script."""
