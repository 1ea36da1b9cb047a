"""The rank of this process: pure functions from environment variables to a `RankInfo`."""
