"""Checks of nodes and links before an attempt trains."""
