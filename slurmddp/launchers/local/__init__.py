"""Runs on this machine: attempts of a run, and `launch()` of a script."""
