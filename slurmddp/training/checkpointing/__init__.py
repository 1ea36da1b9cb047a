"""Collective save and load of the training state."""
