"""Talking to SLURM: commands, states, limits, scripts, and a SLURM of one's own to try things on."""
