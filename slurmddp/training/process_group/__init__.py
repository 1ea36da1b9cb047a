"""The ranks of a launch meet, form a process group, and exchange values."""
