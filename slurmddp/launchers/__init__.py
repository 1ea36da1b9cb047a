"""Start the processes of runs: through SLURM, on this machine, and the ranks of each node."""
