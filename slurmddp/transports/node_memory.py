"""Share memory between the ranks of one host, and wait for the writes of other ranks.

The memory is a memfd: it has no name in a file system, so nothing stays behind however the ranks end. Words
of eight aligned bytes are counters that announce ready data. One rank writes a word, and all others read it.
"""

from __future__ import annotations

import hmac
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.errors import ConfigError, RankFailure

LINE_BYTES = 128
"""The distance between words of different ranks: two cache lines, because processors fetch them in pairs."""
_LINE_WORDS = LINE_BYTES // 8
_CALLS = 8
"""Number of events whose calls follow a rank's word in its line; no rank is that far ahead of another."""
_SPINS = 300
"""Reads of a word before the rank yields its processor; about 10 us."""
_YIELDING_S = 200e-6
"""How long a rank yields its processor before it sleeps, because a sleep takes 60 us at least."""
_LONGEST_SLEEP_S = 2e-3
"""The longest sleep. A check takes about 10 us, so a waiting rank uses 1 % of a processor at most."""


class NodeMemory:
    """Shared bytes, and a word for each rank that counts the rank's events.

    Args:
        store: the store by which the ranks find each other; used in this call only.
        rank: the rank of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank.
        extra_words: number of further words after the words of the ranks, each on a separate line.
        data_bytes: number of bytes after the words.

    Raises:
        ConfigError: a rank is on another host, or belongs to another user.
    """

    def __init__(
        self,
        store: distributed.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *,
        extra_words: int,
        data_bytes: int,
    ) -> None:
        self.rank = rank
        self._timeout_s = timeout.total_seconds()
        self._places = {other: other * _LINE_WORDS for other in range(world_size) if other != rank}
        """The indices of the other ranks' words."""
        self._own_place = rank * _LINE_WORDS
        self.first_word = world_size * _LINE_WORDS
        """The index of the first of the further words."""
        self._fence = _fence(platform.machine())

        begin = (world_size + extra_words) * LINE_BYTES
        descriptor = os.memfd_create(_memory_name()) if rank == 0 else -1
        try:
            if rank == 0:
                os.ftruncate(descriptor, begin + data_bytes)

            processes, path = _meet(store, rank, world_size, descriptor)
            memory = _map(path, begin + data_bytes)
            self.words = memoryview(memory).cast("q")
            self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=begin)
            self._has_ended = {other: _end_of(pid) for other, pid in processes.items() if other != rank}
            self._event = 0
            self.call = 0
            """A number for the collective that this rank is in; all ranks must be in the same collective."""

            # The other ranks map the memory by rank 0's descriptor, so it stays open until all of them have.
            self.reach(self.publish())
        finally:
            if rank == 0:
                os.close(descriptor)

    def publish(self) -> int:
        """Announce that all earlier writes of this rank are done; return the number of the event.

        All ranks publish the same sequence of events.
        """
        self._event += 1
        # The call must be visible before the event: `set` has a fence.
        self.words[self._own_place + 1 + self._event % _CALLS] = self.call
        self.set(self._own_place, self._event)

        return self._event

    def reach(self, event: int) -> None:
        """Wait until every rank has published `event`; raise RankFailure if one is in another collective."""
        words = self.words
        for other, place in self._places.items():
            if words[place] < event:
                self.wait(place, event, other)

        # A rank writes its call before its event, so the call is read after the event.
        self._fence()
        call = 1 + event % _CALLS
        for other, place in self._places.items():
            if words[place + call] != words[self._own_place + call]:
                raise RankFailure(
                    f"Rank {self.rank} and rank {other} called different collectives.",
                    hint="All ranks must call the same collectives in the same order, with tensors of equal "
                    "length and dtype.",
                )

    def set(self, place: int, value: int) -> None:
        """Write a word after all earlier writes of this rank."""
        self._fence()
        self.words[place] = value

    def wait(self, place: int, value: int, other: int, meanwhile: Callable[[], bool] = bool) -> None:
        """Wait until a word of rank `other` is at least `value`.

        The rank spins for a moment, then yields its processor between reads, then sleeps for longer and
        longer, so that ranks at work get the processors. It yields for a short time only, because a busy
        machine then takes the processor for milliseconds.

        Args:
            place: the index of the word.
            value: the least value to wait for.
            other: the rank that writes the word.
            meanwhile: called between reads; returns whether it has done anything.

        Raises:
            RankFailure: a rank ended, or the wait took longer than the time-out.
        """
        # Most waits are so short that a call of the system would prolong them.
        words = self.words
        for _ in range(_SPINS):
            if words[place] >= value:
                return self._fence()

        began = time.monotonic()
        idle_since = began
        while words[place] < value:
            now = time.monotonic()
            if meanwhile():
                idle_since = now
            elif now - idle_since < _YIELDING_S:
                os.sched_yield()
            else:
                self._check(place, value, other, now - began)
                time.sleep(min((now - idle_since) / 8, _LONGEST_SLEEP_S))

        self._fence()

    def _check(self, place: int, value: int, other: int, waited_s: float) -> None:
        """Raise RankFailure if a rank has ended, or the time-out is over.

        The rank that has ended may be another rank than the writer of the word.
        """
        ended = [rank for rank, has_ended in self._has_ended.items() if has_ended()]
        behind = [rank for rank in ended if rank == other or self.words[self._places[rank]] < self._event]
        # A rank may have written the word, and then ended.
        if behind and self.words[place] < value:
            raise RankFailure(
                f"Rank {behind[0]} has ended, and rank {self.rank} waited for it in a collective.",
                hint=f"Look for the failure of rank {behind[0]} in its log.",
            )

        if waited_s > self._timeout_s:
            raise RankFailure(
                f"Rank {self.rank} waited {waited_s:.0f} s for rank {other} in a collective.",
                hint="All ranks must call the same collectives in the same order. If the rank is only slow, "
                "raise the time-out of collectives.",
            )

    def close(self) -> None:
        """Close the descriptors of other ranks' processes; the memory is released with its last tensor."""
        self._has_ended.clear()


def _meet(
    store: distributed.Store, rank: int, world_size: int, descriptor: int
) -> tuple[Mapping[int, int], str]:
    """Return the process id of each rank, and the path of rank 0's memory."""
    own_host = host_identity()
    store.set(f"shm/{rank}", f"{own_host} {os.getpid()} {descriptor}")
    entries = {other: store.get(f"shm/{other}").decode().split() for other in range(world_size)}
    elsewhere = [other for other, (host, *_) in entries.items() if host != own_host]
    if elsewhere:
        ranks = ", ".join(map(str, elsewhere))
        raise ConfigError(
            f"backend=shm: ranks {ranks} and rank {rank} are on different hosts or in different containers.",
            hint="Use backend=hierarchical on several nodes, or put all ranks on one node.",
        )

    try:
        processes = {other: int(pid) for other, (_, pid, _) in entries.items()}
        return processes, f"/proc/{processes[0]}/fd/{int(entries[0][2])}"
    except ValueError as error:
        # Any account can write to the store.
        raise _not_the_memory(f"{' '.join(entries[0])!r}") from error


def _memory_name() -> str:
    """Return the name of the memory that the ranks of this attempt share.

    Any account can write to the store, so a rank maps no memory without this name. If the attempt has a
    secret, the name is derived from it, so that no other run of this account has the name.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        return "slurmddp-collectives"
    return f"slurmddp-collectives-{hmac.digest(secret.encode(), b'slurmddp memory', 'sha256').hex()[:32]}"


def host_identity() -> str:
    """Return a text that is equal for two processes if they can see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _map(path: str, size: int) -> mmap.mmap:
    """Map the memory of rank 0; raise ConfigError if the file is anything else."""
    try:
        # Before the file is opened, because opening a device or a pipe may have effects.
        _require_memory(path)
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"backend=shm: the memory of rank 0 can't be opened: {error}.",
            hint="All ranks must run as the same user.",
        ) from error

    try:
        # The path may lead to another file since the first check.
        _require_memory(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_size < size:
            raise _not_the_memory(path)
        return mmap.mmap(descriptor, size)
    finally:
        # The mapping needs no open descriptor.
        os.close(descriptor)


def _require_memory(link: str) -> None:
    """Raise ConfigError if an open file is not the memory that the ranks of this attempt share."""
    # No file on a disk has this path: the kernel gives it to a memfd of that name only.
    if os.readlink(link) != f"/memfd:{_memory_name()} (deleted)":  # noqa: PTH115
        raise _not_the_memory(link)


def _not_the_memory(path: str) -> ConfigError:
    return ConfigError(
        f"backend=shm: the store names {path} as the memory of rank 0, and it is another file.",
        hint="A process outside of this run has written to the store. Ask for whole nodes, or use "
        "backend=gloo.",
    )


def _end_of(pid: int) -> Callable[[], bool]:
    """Return a function that returns whether a process has ended."""
    try:
        # Unlike the number, the descriptor never stands for a later process.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    return _OwningFunction(descriptor, lambda: bool(poll.poll(0)))


class _OwningFunction:
    """A function that closes its descriptor when it is deleted."""

    def __init__(self, descriptor: int, function: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._function = function

    def __call__(self) -> bool:
        return self._function()

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _fence(machine: str) -> Callable[[], None]:
    """Return a memory fence: a call between writing data and writing its word, and between reading them.

    x86 keeps the order of writes, and of reads, so it needs no fence. ARMv8 may change both orders. But it
    never moves other accesses across a store-release and a later load-acquire. The release and the next
    acquire of a lock are such a pair.

    Raises:
        ConfigError: the order is not known for this kind of processor.
    """
    if machine in ("x86_64", "AMD64"):
        return lambda: None
    if machine not in ("aarch64", "arm64"):
        raise ConfigError(f"backend=shm does not run on {machine}.", hint="Use backend=gloo.")

    # Each fence releases the lock first.
    lock = threading.Lock()
    lock.acquire()

    def fence() -> None:
        lock.release()
        lock.acquire()

    return fence
