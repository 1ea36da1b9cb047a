"""Who am I? Pure functions from a mapping of environment variables to a `RankInfo`."""
