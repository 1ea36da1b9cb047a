"""Durable, verified checkpoints: tensors and plain values, never pickled code."""
