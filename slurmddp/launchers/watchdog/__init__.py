"""Finds ranks that hang or lag, and says which and where."""
