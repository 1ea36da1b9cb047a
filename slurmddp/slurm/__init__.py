"""SLURM's commands, options, states and limits, and the batch script of a job."""
