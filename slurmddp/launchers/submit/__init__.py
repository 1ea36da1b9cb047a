"""Submission to SLURM: by sbatch or by submitit."""
