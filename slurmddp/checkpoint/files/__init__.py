"""Checkpoints as files: names, verification, publication, retention. No torch."""
