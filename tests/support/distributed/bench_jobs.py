"""Jobs of ranks that measure benchmarks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from torch import distributed

from slurmddp import strategies
from slurmddp.bench.ranks import measure as module
from slurmddp.bench.settings import BENCHES, Settings
from slurmddp.errors import ConfigError
from slurmddp.strategies.ddp import Ddp
from slurmddp.training.distributon import Distributon


class Apart(Ddp):
    """A strategy that forgets to average gradients."""

    def wrap(self, model, device):
        return model


def results() -> dict[str, Any]:
    """Return the results of short runs of all benchmarks, and the error for a batch that can't be shared."""
    strategies.STRATEGIES["apart"] = Apart
    short = {"sizes": (4_000, 12_000, 40_000), "repetitions": 3, "warmup": 1, "width": 8, "layers": 2}
    with Distributon(seed=0) as d:
        d.launch()
        measured: dict[str, Any] = {
            bench: asdict(module.measure(d, Settings(bench=bench, batch=8, **short))) for bench in BENCHES
        }
        with pytest.raises(ConfigError) as refused:
            module.measure(d, Settings(bench="scaling", batch=7, **short))
        measured["refused"] = refused.value.message
        measured["backend"] = distributed.get_backend()
        return measured
