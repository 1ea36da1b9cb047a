"""Start runs through SLURM or on this machine, and start, watch and restart the ranks on each node."""
