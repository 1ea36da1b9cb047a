"""Name, verify, publish and delete checkpoints as files, without torch."""
