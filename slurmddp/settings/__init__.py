"""Describe and check the settings of a job by one schema, without Hydra and without files."""
