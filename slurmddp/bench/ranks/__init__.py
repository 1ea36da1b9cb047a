"""The ranks' part of `slurmddp bench`: they measure, and rank 0 writes the result into the run folder."""
