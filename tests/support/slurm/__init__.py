"""A real SLURM in a sandbox, fake programs of SLURM, and the batch step between them."""
