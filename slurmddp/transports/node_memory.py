"""Share memory between the ranks of one host, and wait for the writes of other ranks.

The memory is a memfd: it has no name in a file system, so nothing stays behind however the ranks end. Aligned
words of eight bytes are counters, by which a rank announces that its data is ready. One rank writes a word,
and all other ranks read it.
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
"""Number of words after a rank's counter. They hold the calls of the rank's latest events; no rank is so many
events ahead of another rank."""
_SPINS = 300
"""How often a waiting rank reads a word before it first yields its processor; this takes about 10 us."""
_YIELDING_S = 200e-6
"""How long a rank only yields its processor before it begins to sleep; a sleep takes at least 60 us."""
_LONGEST_SLEEP_S = 2e-3
"""The longest sleep between two reads. A read takes about 10 us, so a wait uses at most 1 % of a
processor."""


class NodeMemory:
    """Memory that all ranks of a host share: bytes for data, and counters by which ranks wait for each other.

    A counter is a word of eight bytes, which one rank writes. Each rank has a counter of its own events.

    Args:
        store: the key-value store through which the ranks find each other; used in this call only.
        rank: the rank of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank.
        extra_words: number of further counters after those of the ranks, each LINE_BYTES from the next.
        data_bytes: number of bytes for data.

    Raises:
        ConfigError: a rank is on another host, or belongs to another user.
        RankFailure: a rank has ended, or did not come within the time-out.
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
        """The indices of the words in which the other ranks count their events."""
        self._own_place = rank * _LINE_WORDS
        self.first_word = world_size * _LINE_WORDS
        """The index of the first of the `extra_words`."""
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
            """A number that identifies the collective of this rank. `reach` compares it on all ranks."""

            # Wait for all ranks: they map the memory through rank 0's descriptor, which is closed below.
            self.reach(self.publish())
        finally:
            if rank == 0:
                os.close(descriptor)

    def publish(self) -> int:
        """Announce that all earlier writes of this rank are done, and return the number of this event.

        All ranks must publish the same sequence of events.
        """
        self._event += 1
        # Write the call before the event. The fence in `set` makes both visible in this order.
        self.words[self._own_place + 1 + self._event % _CALLS] = self.call
        self.set(self._own_place, self._event)

        return self._event

    def reach(self, event: int) -> None:
        """Wait until every rank has published `event`.

        Raises:
            RankFailure: a rank is in another collective, has ended, or did not come within the time-out.
        """
        words = self.words
        for other, place in self._places.items():
            if words[place] < event:
                self.wait(place, event, other)

        # Read the calls after the events, because a rank writes its call before its event.
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
        """Set the word at index `place`; a rank that reads it also sees this rank's earlier writes."""
        self._fence()
        self.words[place] = value

    def wait(self, place: int, value: int, other: int, meanwhile: Callable[[], bool] = bool) -> None:
        """Wait until a word of rank `other` is at least `value`.

        The rank reads the word _SPINS times, then yields its processor between reads for _YIELDING_S, and
        then sleeps for longer and longer, so that working ranks get the processors. It yields only that long,
        because on a busy machine each yield can take milliseconds.

        Args:
            place: the index of the word.
            value: the wait ends when the word has this value or a greater one.
            other: the rank that writes the word.
            meanwhile: called between reads. If it returns True, it has done work, and the rank does not sleep
                yet.

        Raises:
            RankFailure: a rank has ended, or the wait took longer than the time-out.
        """
        # Read without a system call at first: most waits are so short that a system call would prolong them.
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
        """Raise RankFailure if this wait can't succeed, because a rank has ended, or if the time-out is over.

        The rank that has ended may be another rank than `other`: if it has not published the current event,
        `other` may be waiting for it as well.
        """
        ended = [rank for rank, has_ended in self._has_ended.items() if has_ended()]
        behind = [rank for rank in ended if rank == other or self.words[self._places[rank]] < self._event]
        # Read the word again: the rank may have written it and then ended, which is no failure.
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
        """Close the descriptors of other ranks' processes. The memory is released with its last tensor."""
        self._has_ended.clear()


def _meet(
    store: distributed.Store, rank: int, world_size: int, descriptor: int
) -> tuple[Mapping[int, int], str]:
    """Exchange process ids through the store.

    Returns:
        The process id of each rank, and the path under /proc by which a rank opens rank 0's memory.

    Raises:
        ConfigError: a rank is on another host, or an entry of the store is not of this package.
    """
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
        # Another program has written the entry: any account can write to the store.
        raise _not_the_memory(f"{' '.join(entries[0])!r}") from error


def _memory_name() -> str:
    """Return the name of the memory file that the ranks of this attempt share.

    Any account can write a path to the store, so a rank maps only memory of this name. If the attempt has a
    secret, the name is derived from it, and no other run has the same name.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        return "slurmddp-collectives"
    return f"slurmddp-collectives-{hmac.digest(secret.encode(), b'slurmddp memory', 'sha256').hex()[:32]}"


def host_identity() -> str:
    """Return a string that is equal for two processes of one boot of one host and one PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _map(path: str, size: int) -> mmap.mmap:
    """Map `size` bytes of rank 0's memory.

    Raises:
        ConfigError: the file can't be opened, or is not the memory of this attempt.
    """
    try:
        # Check before the file is opened, because opening a device or a pipe may have effects.
        _require_memory(path)
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"backend=shm: the memory of rank 0 can't be opened: {error}.",
            hint="All ranks must run as the same user.",
        ) from error

    try:
        # Check again: the path may lead to another file since the first check.
        _require_memory(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_size < size:
            raise _not_the_memory(path)
        return mmap.mmap(descriptor, size)
    finally:
        # The map stays valid without an open descriptor.
        os.close(descriptor)


def _require_memory(link: str) -> None:
    """Raise ConfigError unless `link`, a path under /proc, leads to the memory of this attempt."""
    # The kernel shows this target only for a memfd of that name; no file on a disk has it.
    if os.readlink(link) != f"/memfd:{_memory_name()} (deleted)":  # noqa: PTH115
        raise _not_the_memory(link)


def _not_the_memory(path: str) -> ConfigError:
    return ConfigError(
        f"backend=shm: the store names {path} as the memory of rank 0, but that is another file.",
        hint="A process outside of this run has written to the store. Ask for whole nodes, or use "
        "backend=gloo.",
    )


def _end_of(pid: int) -> Callable[[], bool]:
    """Return a function that returns whether the process with this id has ended."""
    try:
        # Unlike the process id, the descriptor never refers to a later process.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    return _OwningFunction(descriptor, lambda: bool(poll.poll(0)))


class _OwningFunction:
    """Function that owns a file descriptor, and closes it when the function is deleted."""

    def __init__(self, descriptor: int, function: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._function = function

    def __call__(self) -> bool:
        return self._function()

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _fence(machine: str) -> Callable[[], None]:
    """Return a memory fence for a type of processor.

    A rank calls it between writing data and the word that announces them, and between reading the word and
    the data. x86 keeps the order of writes and of reads, so the fence does nothing. ARMv8 may change both
    orders, but never moves other accesses across a store-release and a later load-acquire. The release and
    the next acquire of a lock are such a pair.

    Raises:
        ConfigError: the processor is neither x86 nor ARMv8.
    """
    if machine in ("x86_64", "AMD64"):
        return lambda: None
    if machine not in ("aarch64", "arm64"):
        raise ConfigError(f"backend=shm does not run on {machine}.", hint="Use backend=gloo.")

    # Acquire the lock here, because each call of the fence begins with its release.
    lock = threading.Lock()
    lock.acquire()

    def fence() -> None:
        lock.release()
        lock.acquire()

    return fence
