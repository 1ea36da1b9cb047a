"""Measure the nodes of a new site: processors, memory, disk, clocks, links, and an all-reduce."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slurmddp.bench.ranks.collectives import TORCH, all_reduce_table
from slurmddp.bench.ranks.timing import seconds, spread
from slurmddp.bench.settings import Settings
from slurmddp.host.process import usable_cpus
from slurmddp.training.distributon import Distributon
from slurmddp.training.preflight.pairs import rounds

_DISK_BYTES = 64 << 20
_LINK_BYTES = 4_000_000
"""Message by which bandwidth is measured: far above the size at which latency counts."""
_SMALL_BYTES = 8


def measure_cluster(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Return the tables `nodes`, `links` and `all_reduce`."""
    links = measure_links(d, settings)
    nodes = d.all_gather(_node(d, _clock_offsets(d, settings)))
    return {
        "nodes": [row for row in nodes if row],
        "links": links,
        "all_reduce": all_reduce_table(d, settings, [TORCH]),
    }


def _node(d: Distributon, offset_s: float) -> dict[str, Any]:
    """Return the row of this rank's node; empty but on its first rank. All nodes write at the same time."""
    d.barrier()
    if d.local_rank != 0:
        return {}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "node": _name(d),
        "cores": os.cpu_count() or 0,
        "cores_of_rank": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_bytes_per_s": disk_bandwidth(d.run_folder or Path(), _DISK_BYTES),
        "clock_offset_s": offset_s,
        "gpus": ", ".join(gpus),
    }


def _name(d: Distributon) -> str:
    """Return the host's name, with the node's number where several nodes are emulated on one host."""
    return f"{socket.gethostname()}:{d.node_rank}"


def disk_bandwidth(folder: Path, size: int) -> float:
    """Return the bytes per second at which a file of `size` bytes reaches the disk of a folder."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - began)


def _clock_offsets(d: Distributon, settings: Settings) -> float:
    """Return the seconds by which this node's clock is ahead of the first node's clock.

    Source:
        Cristian, Probabilistic clock synchronization, 1989: the shortest exchange is the most exact.
    """
    offset = 0.0
    for node in range(1, d.nodes):
        peer = node * d.local_world_size
        if d.rank == peer:
            offset = _offset(0, d.device, settings.repetitions)
        elif d.rank == 0:
            for _ in range(settings.repetitions):
                distributed.recv(_time(0.0, d.device), peer)
                distributed.send(_time(time.time(), d.device), peer)
        d.barrier()
    return offset


def _time(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64, device=device)


def _offset(peer: int, device: torch.device, exchanges: int) -> float:
    found = []
    for _ in range(exchanges):
        asked, theirs = time.time(), _time(0.0, device)
        distributed.send(_time(asked, device), peer)
        distributed.recv(theirs, peer)
        answer = float(theirs.item())
        answered = time.time()
        found.append((answered - asked, (asked + answered) / 2 - answer))
    return min(found)[1]


def measure_links(d: Distributon, settings: Settings) -> list[dict[str, Any]]:
    """Return latency and bandwidth between pairs of nodes; pairs without a common node work at once."""
    names = d.all_gather(_name(d))
    rows = []
    for pairs in rounds(d.nodes):
        pair = next((pair for pair in pairs if d.node_rank in pair), None)
        d.barrier()
        if pair is None or d.local_rank != 0:
            continue
        peer = (sum(pair) - d.node_rank) * d.local_world_size
        latency = _halves(peer, d, settings, _SMALL_BYTES)
        transfer = _halves(peer, d, settings, _LINK_BYTES)
        if d.node_rank == pair[0]:
            ends: dict[str, Any] = {"from": names[d.rank], "to": names[peer]}
            bandwidth = _LINK_BYTES / spread(transfer)["median_s"]
            rows.append({**ends, **spread(latency), "shortest_s": min(latency), "bytes_per_s": bandwidth})
    d.barrier()
    return [row for one in d.all_gather(rows) for row in one]


def _halves(peer: int, d: Distributon, settings: Settings, size: int) -> list[float]:
    """Return half of the time of each exchange there and back."""
    data = torch.zeros(size, dtype=torch.uint8, device=d.device)
    there: list[Callable[[], object]] = [
        lambda: distributed.send(data, peer),
        lambda: distributed.recv(data, peer),
    ]
    if d.rank > peer:
        there.reverse()
    times = [
        seconds(lambda: [action() for action in there], d.device) / 2
        for _ in range(settings.warmup + settings.repetitions)
    ]
    return times[settings.warmup :]
