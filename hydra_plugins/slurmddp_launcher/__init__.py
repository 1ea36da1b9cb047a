"""Hydra finds its plugins in this namespace."""
