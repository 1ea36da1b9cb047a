"""Create and read a run folder: layout, events, code snapshot, lock."""
