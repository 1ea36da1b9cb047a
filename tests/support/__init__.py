"""Support for tests: run folders and agents without torch, SLURM and its fakes, ranks of torch."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
