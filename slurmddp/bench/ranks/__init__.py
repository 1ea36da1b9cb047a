"""The rank side of `slurmddp bench`: measure, and let rank 0 write the result into the run folder."""
