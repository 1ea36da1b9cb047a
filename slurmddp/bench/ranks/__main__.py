"""Measure as one rank of a run: `slurmddp run -m slurmddp.bench.ranks SETTINGS`, with settings as JSON."""

from __future__ import annotations

import sys

from slurmddp.bench.ranks.measure import run
from slurmddp.bench.settings import Settings
from slurmddp.training.distributon import Distributon

if __name__ == "__main__":
    settings = Settings.from_json(sys.argv[1])
    Distributon(seed=settings.seed).launch(run, settings)
