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
"""Size of the file by which the bandwidth of a disk is measured."""
_LINK_BYTES = 4_000_000
"""Size of the message by which bandwidth is measured: its time depends little on the latency."""
_SMALL_BYTES = 8
"""Size of the message by which latency is measured."""


def measure_cluster(d: Distributon, settings: Settings) -> dict[str, Any]:
    """Measure nodes, links and torch's all-reduce. All ranks call it.

    Returns:
        The rows of the tables `nodes`, `links` and `all_reduce`.
    """
    links = measure_links(d, settings)
    nodes = d.all_gather(_measure_node(d, _clock_offset(d, settings)))
    return {
        "nodes": [row for row in nodes if row],
        "links": links,
        "all_reduce": all_reduce_table(d, settings, [TORCH]),
    }


def _measure_node(d: Distributon, offset_s: float) -> dict[str, Any]:
    """Measure this rank's node: cores, memory, disk bandwidth and GPUs.

    Returns:
        The node's row of the table `nodes`; empty on all ranks but the first of the node.

    All nodes write to the disk at the same time, as they do in a training.
    """
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
    """Return the name of this rank's node, HOST:NUMBER; several nodes may be emulated on one host."""
    return f"{socket.gethostname()}:{d.node_rank}"


def disk_bandwidth(folder: Path, size: int) -> float:
    """Write `size` bytes to a file in a folder, and return the bytes per second, including the fsync."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - began)


def _clock_offset(d: Distributon, settings: Settings) -> float:
    """Return the seconds by which this node's clock is ahead of the first node's clock.

    The first rank of each node measures it; the other ranks return 0. All ranks call it.

    Source:
        Cristian, Probabilistic clock synchronization, 1989. The offset of the fastest exchange is used.
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
    """Return the seconds by which this rank's clock is ahead of `peer`'s, from the fastest exchange."""
    durations_and_offsets = []
    for _ in range(exchanges):
        sent_at = time.time()
        peer_time = _time(0.0, device)
        distributed.send(_time(sent_at, device), peer)
        distributed.recv(peer_time, peer)
        # `recv` on a GPU returns before the message has arrived; `item` waits for it. So the time of receipt
        # is read after `item`.
        peer_at = float(peer_time.item())
        received_at = time.time()

        offset = (sent_at + received_at) / 2 - peer_at
        durations_and_offsets.append((received_at - sent_at, offset))

    return min(durations_and_offsets)[1]


def measure_links(d: Distributon, settings: Settings) -> list[dict[str, Any]]:
    """Measure latency and bandwidth between the first ranks of each pair of nodes.

    Pairs without a common node are measured at the same time. All ranks call it, and all get the rows of
    the table `links`.
    """
    names = d.all_gather(_name(d))
    rows = []
    for pairs in rounds(d.nodes):
        pair = next((pair for pair in pairs if d.node_rank in pair), None)
        d.barrier()
        if pair is None or d.local_rank != 0:
            continue

        peer = (sum(pair) - d.node_rank) * d.local_world_size
        latencies = _one_way_times(peer, d, settings, _SMALL_BYTES)
        transfers = _one_way_times(peer, d, settings, _LINK_BYTES)
        if d.node_rank == pair[0]:
            row: dict[str, Any] = {"from": names[d.rank], "to": names[peer]}
            row |= spread(latencies)
            row["shortest_s"] = min(latencies)
            row["bytes_per_s"] = _LINK_BYTES / spread(transfers)["median_s"]
            rows.append(row)

    d.barrier()
    return [row for rows_of_rank in d.all_gather(rows) for row in rows_of_rank]


def _one_way_times(peer: int, d: Distributon, settings: Settings, size: int) -> list[float]:
    """Send a message of `size` bytes to `peer` and back, repeatedly; return half of each duration."""
    data = torch.zeros(size, dtype=torch.uint8, device=d.device)
    actions: list[Callable[[], object]] = [
        lambda: distributed.send(data, peer),
        lambda: distributed.recv(data, peer),
    ]
    # The lower rank sends first, and the higher rank receives first: if both sent first, they would wait for
    # each other.
    if d.rank > peer:
        actions.reverse()

    times = [
        seconds(lambda: [action() for action in actions], d.device) / 2
        for _ in range(settings.warmup + settings.repetitions)
    ]
    return times[settings.warmup :]
