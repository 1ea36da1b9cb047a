"""Find out the state of a run, and read its logs and metrics."""
