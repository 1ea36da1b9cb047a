"""Keep checkpoints in memory that outlives a rank, and write them to the disk by a process without torch."""
