"""Run SLURM's commands, parse their output, compare jobs with a site's limits, and render batch scripts."""
