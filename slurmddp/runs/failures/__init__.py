"""Failures: how they are captured, explained and read."""
