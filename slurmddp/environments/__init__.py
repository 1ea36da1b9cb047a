"""Read the rank of a process from its environment variables into a `RankInfo`, by pure functions."""
