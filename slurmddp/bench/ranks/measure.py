"""Run a benchmark on all ranks, and write its result with versions and topology."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import slurmddp
from slurmddp.bench.ranks.cluster import measure_cluster
from slurmddp.bench.ranks.collectives import measure_collectives
from slurmddp.bench.ranks.scaling import measure_scaling
from slurmddp.bench.ranks.strategies import measure_strategies
from slurmddp.bench.results import FILE_NAME, Result
from slurmddp.bench.settings import Settings
from slurmddp.host.process import usable_cpus
from slurmddp.training.distributon import Distributon

Measure = Callable[[Distributon, Settings], Mapping[str, Any]]

MEASURES: Mapping[str, Measure] = {
    "cluster": measure_cluster,
    "collectives": measure_collectives,
    "strategies": measure_strategies,
    "scaling": measure_scaling,
}
"""By benchmark, the function that returns the tables of its result, and the cost model under `model`."""


def run(d: Distributon, settings: Settings) -> None:
    """Measure on all ranks; rank 0 writes `bench.json` into the run folder.

    A Distributon that belongs to no run has no run folder; the file is then written into the current folder.
    """
    result = measure(d, settings)
    if d.is_global_zero:
        result.write((d.run_folder or Path()) / FILE_NAME)


def measure(d: Distributon, settings: Settings) -> Result:
    """Run the benchmark that the settings name, and return its result. All ranks call it.

    Args:
        d: a launched Distributon.
        settings: the settings of the benchmark, equal on all ranks.

    Raises:
        ConfigError: there is a single rank, or the batch can't be shared by the ranks.
    """
    settings.check_ranks(d.world_size)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    topology = _topology(d)
    tables = dict(MEASURES[settings.bench](d, settings))
    return Result(
        settings=asdict(settings),
        topology=topology,
        versions={
            "slurmddp": slurmddp.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        model=tables.pop("model", {}),
        tables=tables,
        started=started,
    )


def _topology(d: Distributon) -> dict[str, Any]:
    """Return the topology of a result: ranks, nodes, backend; host, node, cores and GPU of each rank."""
    gpu = torch.cuda.get_device_name(d.device) if d.device.type == "cuda" else ""
    places = d.all_gather([d.node_rank, socket.gethostname(), usable_cpus(), gpu])
    return {
        "ranks": d.world_size,
        "nodes": d.nodes,
        "hosts": [host for _, host, *_ in places],
        "node_of_rank": [node for node, *_ in places],
        "cores_of_rank": [cores for *_, cores, _ in places],
        "gpus": [gpu for *_, gpu in places],
        "device": d.device.type,
        "backend": distributed.get_backend(),
        "threads": torch.get_num_threads(),
    }
