"""Capture, explain, record and read the failures of a run's processes."""
