"""Run SLURM's commands and parse their output, render batch scripts, compare jobs with a site's limits."""
