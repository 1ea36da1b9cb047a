"""Submit runs to SLURM, by sbatch or by submitit."""
