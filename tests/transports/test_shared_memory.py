"""Collectives through shared memory: right, alike on all ranks, and mindful of processors."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ReduceOp

from slurmddp.collectives import ALGORITHMS, all_reduce
from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.errors import ConfigError, RankFailure
from slurmddp.transports import node_memory, shared_memory
from slurmddp.transports.shared_memory import MESSAGE_BYTES, SharedMemoryLink
from support.distributed import collective_jobs
from support.distributed.ranks import run_ranks

RANKS = (1, 2, 3, 5)


def on_threads(function: Callable[[SharedMemoryLink], Any], ranks: int) -> list[Any]:
    """Return the results of all ranks, each a thread of this process."""
    store = HashStore()

    def run(rank: int) -> Any:
        return function(SharedMemoryLink(store, rank, ranks, timedelta(seconds=60)))

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


@pytest.mark.parametrize("ranks", RANKS)
def test_c1_shared_memory_gives_the_bits_of_a_sum_in_the_order_of_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tensors longer than three slots are then short, and each slot is still reduced by shares.
    monkeypatch.setattr(shared_memory, "SET_BYTES", 4 * shared_memory.WHOLE_BYTES)
    assert (
        on_threads(lambda link: collective_jobs.wrong_reductions(link, link._slot_bytes), ranks)
        == [[]] * ranks
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcasts_gathers_and_means_of_any_length(ranks: int) -> None:
    assert on_threads(collective_jobs.wrong_copies, ranks) == [[]] * ranks


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_c1_processes_reduce_through_memory_that_has_no_name(tmp_path: Path) -> None:
    for wrong, named in run_ranks(collective_jobs.over_shared_memory, 3, str(tmp_path / "store")):
        assert wrong == []
        assert set(named) == {"/memfd:slurmddp-collectives (deleted)"}


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_the_death_of_a_rank_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    for told in run_ranks(collective_jobs.after_a_death, 2, str(tmp_path / "store")):
        assert told.startswith("Rank 2 has ended, and rank")


@pytest.mark.parametrize("ranks", RANKS)
def test_every_algorithm_runs_over_messages_longer_than_their_memory(ranks: int) -> None:
    length = 3 * MESSAGE_BYTES // 4 * ranks + 1

    def sums(link: SharedMemoryLink) -> list[bool]:
        own = torch.full((length,), float(link.rank + 1))
        whole = torch.full((length,), float(sum(range(ranks + 1))))
        return [torch.equal(all_reduce(own, link, algorithm=name), whole) for name in ALGORITHMS]

    assert on_threads(sums, ranks) == [[True] * len(ALGORITHMS)] * ranks


def test_messages_pass_each_other_and_keep_their_order() -> None:
    sent = [torch.arange(length) for length in (100_000, 3, 0, 50_000)]

    def exchange(link: SharedMemoryLink) -> bool:
        waits = [link.send(tensor, 1 - link.rank) for tensor in sent]
        found = [torch.empty_like(tensor) for tensor in sent]
        for tensor in found:
            link.recv(tensor, 1 - link.rank)
        for wait in waits:
            wait()
        return all(map(torch.equal, found, sent))

    assert on_threads(exchange, 2) == [True, True]


def test_messages_stay_whole_while_collectives_run() -> None:
    def exchange(link: SharedMemoryLink) -> list[float]:
        others = [other for other in range(3) if other != link.rank]
        waits = [link.send(torch.full((3,), float(link.rank)), other) for other in others]
        link.all_reduce(torch.ones(3 * link._slot_bytes // 4 + 1))
        found = [torch.empty(3) for _ in others]
        for tensor, other in zip(found, others, strict=True):
            link.recv(tensor, other)
        for wait in waits:
            wait()
        return [value for tensor in found for value in tensor.tolist()]

    assert on_threads(exchange, 3) == [[1] * 3 + [2] * 3, [0] * 3 + [2] * 3, [0] * 3 + [1] * 3]


def test_a_waiting_rank_leaves_the_processors_to_others() -> None:
    """Measured as the share of a processor that the wait takes, however long it is."""
    waits = threading.Event()

    def wait(link: SharedMemoryLink) -> float:
        if link.rank:
            assert waits.wait(120)
            time.sleep(1)
        used, began = time.thread_time(), time.monotonic()
        waits.set()
        link.all_reduce(torch.ones(3), ReduceOp.SUM)
        return (time.thread_time() - used) / (time.monotonic() - began)

    share, *_ = on_threads(wait, 2)
    assert share < 0.15


def test_a_rank_that_does_not_come_is_named() -> None:
    def alone(link: SharedMemoryLink) -> str:
        if link.rank == 0:
            link._memory._timeout_s = 0.5
            with pytest.raises(RankFailure) as caught:
                link.barrier()
            return str(caught.value)
        return ""

    told, _ = on_threads(alone, 2)
    assert re.match(r"Rank 0 waited \d+ s for rank 1 in a collective. All ranks must call the same", told)


FOUR = torch.ones(4)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("all_reduce", (FOUR,), (torch.ones(5),)),
        ("all_reduce", (FOUR,), (FOUR.int(),)),
        ("all_reduce", (FOUR,), (FOUR, ReduceOp.MAX)),
        ("all_reduce", (torch.ones(10**6),), (torch.ones(10**6 + 1),)),
        ("broadcast", (FOUR, 0), (FOUR, 1)),
        ("all_gather", (torch.ones(8), FOUR), None),
    ],
    ids=["length", "type", "reduction", "pieces", "source", "barrier"],
)
def test_ranks_that_call_different_collectives_are_told(name: str, first, second) -> None:
    def call(link: SharedMemoryLink) -> None:
        getattr(link, name)(*first)
        with pytest.raises(RankFailure, match=rf"Rank {link.rank} and rank {1 - link.rank} called different"):
            if link.rank and second is None:
                link.barrier()
            else:
                getattr(link, name)(*(second if link.rank else first))

    on_threads(call, 2)


@pytest.mark.parametrize("length", [1, 3, MESSAGE_BYTES])
def test_a_message_of_another_length_is_refused(length: int) -> None:
    def exchange(link: SharedMemoryLink) -> None:
        if link.rank == 0:
            link.send(torch.ones(length), 1)
        else:
            with pytest.raises(RankFailure, match=f"Rank 0 sent {4 * length} bytes, but rank 1 expected 8"):
                link.recv(torch.ones(2), 0)

    on_threads(exchange, 2)


def test_ranks_of_different_hosts_are_refused() -> None:
    store = HashStore()
    store.set("shm/1", "another-boot/pid:[1] 5 -1")
    with pytest.raises(ConfigError, match=r"ranks 1 and rank 0 .*different hosts.* backend=hierarchical"):
        SharedMemoryLink(store, 0, 2, timedelta(seconds=5))


def test_the_memory_goes_away_with_the_link() -> None:
    link = SharedMemoryLink(HashStore(), 0, 1, timedelta(seconds=5))
    link.all_reduce(torch.ones(3), ReduceOp.SUM)
    link.close()
    del link
    gc.collect()
    assert "slurmddp-collectives" not in Path("/proc/self/maps").read_text()


def test_an_unknown_reduction_is_left_to_the_group() -> None:
    link = SharedMemoryLink(HashStore(), 0, 1, timedelta(seconds=5))
    assert link.all_reduce(torch.ones(3), ReduceOp.PREMUL_SUM) is NotImplemented


@pytest.mark.parametrize(
    "forged", ["file", "path", "other memory", "memory of another run", "small memory", "words"]
)
def test_a_rank_maps_no_file_that_a_stranger_names_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: str
) -> None:
    """Each account that reaches the store can write there."""
    precious = tmp_path / "checkpoint"
    precious.write_bytes(b"precious" * 1_000_000)
    opened = os.open(precious, os.O_RDWR)
    monkeypatch.setenv(SECRET_VARIABLE, "another" if forged == "memory of another run" else "secret")
    own_name = node_memory._memory_name()
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    name = "something" if forged == "other memory" else own_name
    memory = os.memfd_create(name)
    os.ftruncate(memory, 4096 if forged == "small memory" else 64_000_000)

    named = {"file": str(opened), "path": f"0/../../../..{precious}", "words": "1 2"}
    store = HashStore()
    stranger = f"{node_memory.host_identity()} {os.getpid()} {named.get(forged, str(memory))}"

    class Forged:
        """The store, in which a stranger overwrites what rank 0 sets."""

        set = store.set

        def get(self, key: str) -> bytes:
            return stranger.encode() if key == "shm/0" else store.get(key)

    with pytest.raises(ConfigError, match="that is another file"):
        SharedMemoryLink(Forged(), 1, 2, timedelta(seconds=5))  # type: ignore[arg-type]
    assert precious.read_bytes() == b"precious" * 1_000_000
    os.close(opened)
    os.close(memory)
