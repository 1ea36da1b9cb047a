"""The state of a run, its logs and its metrics."""
