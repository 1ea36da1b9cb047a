"""Checkpoints in memory that outlives a rank, and the process that writes them. No torch."""
