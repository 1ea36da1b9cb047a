"""Starting processes: on SLURM through sbatch or submitit, on this machine, and the ranks of one node."""
