"""Decide which rank reads which sample, and where reading resumes."""
