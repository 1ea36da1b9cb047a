"""Let all ranks stop after the same step, before SLURM kills them."""
