"""Memory that the ranks of one host share, and waits for what other ranks write into it.

The memory is a memfd: it has no name in a file system, so nothing stays behind however the ranks end. Words
of eight aligned bytes tell the other ranks what is ready. One rank writes a word, and all others read it.
"""

from __future__ import annotations

import hmac
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
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
"""Events whose calls a rank's line keeps, behind the rank's word; no rank is that far ahead of another."""
_SPINS = 300
"""Looks at a word before the processor is offered to others; about 10 us."""
_YIELDING_S = 200e-6
"""How long a rank only offers its processor to others, because a nap takes 60 us at least."""
_NAP_S = 2e-3
"""The longest nap. Because a look takes about 10 us, a waiting rank uses 1 % of a processor at most."""


class NodeMemory:
    """Shared bytes, and a word for each rank that says how far the rank is.

    Args:
        store: by which the ranks find each other; used in this call only.
        rank: of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank.
        words: how many more words follow the words of the ranks, each on a line of its own.
        data_bytes: how many bytes follow the words.

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
        words: int,
        data_bytes: int,
    ) -> None:
        self.rank, self._timeout_s = rank, timeout.total_seconds()
        self._places = {other: other * _LINE_WORDS for other in range(world_size) if other != rank}
        self._own = rank * _LINE_WORDS
        self.first_word = world_size * _LINE_WORDS
        begin = (world_size + words) * LINE_BYTES
        self._fence = _fence(platform.machine())
        descriptor = os.memfd_create(_memory_name()) if rank == 0 else -1
        try:
            if rank == 0:
                os.ftruncate(descriptor, begin + data_bytes)
            processes, file = _meet(store, rank, world_size, descriptor)
            memory = _map(file, begin + data_bytes)
            self.words = memoryview(memory).cast("q")
            self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=begin)
            self._gone = {other: _death_of(pid) for other, pid in processes.items() if other != rank}
            self._event = 0
            self.call = 0
            """A number for the collective that this rank is in; the other ranks must be in the same one."""
            self.reach(self.publish())  # Now all ranks have mapped the memory.
        finally:
            if rank == 0:
                os.close(descriptor)

    def publish(self) -> int:
        """Show the other ranks that all earlier writes of this rank are done; return the number of the event.

        All ranks publish the same sequence of events.
        """
        self._event += 1
        self.words[self._own + 1 + self._event % _CALLS] = self.call
        self.set(self._own, self._event)
        return self._event

    def reach(self, event: int) -> None:
        """Wait until every rank has published `event`; raise RankFailure if one is in another collective."""
        words = self.words
        for other, place in self._places.items():
            if words[place] < event:
                self.wait(place, event, other)
        self._fence()
        call = 1 + event % _CALLS
        for other, place in self._places.items():
            if words[place + call] != words[self._own + call]:
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

        The rank looks for a moment, then offers its processor to others between looks, then naps for longer
        and longer, so that ranks at work get the processors. It yields for a short time only, because a busy
        machine takes the processor for milliseconds then.

        Args:
            place: the index of the word.
            value: what to wait for.
            other: the rank that writes the word.
            meanwhile: called between looks; returns whether it has done anything.

        Raises:
            RankFailure: a rank ended, or the wait took longer than the time-out.
        """
        words = self.words
        for _ in range(_SPINS):
            if words[place] >= value:
                return self._fence()
        began = busy = time.monotonic()
        while words[place] < value:
            now = time.monotonic()
            if meanwhile():
                busy = now
            elif now - busy < _YIELDING_S:
                os.sched_yield()
            else:
                self._check(place, value, other, now - began)
                time.sleep(min((now - busy) / 8, _NAP_S))
        self._fence()

    def _check(self, place: int, value: int, other: int, waited_s: float) -> None:
        """Raise if the wait is in vain. The rank that has ended may not be the rank that is waited for."""
        ended = [one for one, gone in self._gone.items() if gone()]
        behind = [one for one in ended if one == other or self.words[self._places[one]] < self._event]
        if behind and self.words[place] < value:  # A rank may have written the word, and then ended.
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
        """Release the processes of the other ranks. The memory is released with its last tensor."""
        self._gone.clear()


def _meet(
    store: distributed.Store, rank: int, world_size: int, descriptor: int
) -> tuple[Mapping[int, int], str]:
    """Return the process of each rank, and the path of rank 0's memory."""
    here = host_identity()
    store.set(f"shm/{rank}", f"{here} {os.getpid()} {descriptor}")
    told = {other: store.get(f"shm/{other}").decode().split() for other in range(world_size)}
    if elsewhere := [other for other, (host, *_) in told.items() if host != here]:
        raise ConfigError(
            f"backend=shm: ranks {_listed(elsewhere)} and rank {rank} are on different hosts or in different "
            "containers.",
            hint="Use backend=hierarchical on several nodes, or put all ranks on one node.",
        )
    try:
        processes = {other: int(pid) for other, (_, pid, _) in told.items()}
        return processes, f"/proc/{processes[0]}/fd/{int(told[0][2])}"
    except ValueError as error:
        raise _other_file(f"{' '.join(told[0])!r}") from error


def _memory_name() -> str:
    """Return the name of the memory that the ranks of this attempt share.

    Any account can write to the store, so a rank maps no memory without this name. It follows from the
    attempt's secret, if there is one, so that no other run of this account has it.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        return "slurmddp-collectives"
    return f"slurmddp-collectives-{hmac.digest(secret.encode(), b'slurmddp memory', 'sha256').hex()[:32]}"


def host_identity() -> str:
    """Return a text that is equal for two processes if they can see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _map(file: str, size: int) -> mmap.mmap:
    """Map the memory of rank 0; raise ConfigError if the file is anything else."""
    try:
        _refuse_other_file(file)  # Opening a device or a pipe could do something already.
        descriptor = os.open(file, os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"backend=shm: the memory of rank 0 can't be opened: {error}.",
            hint="All ranks must run as the same user.",
        ) from error
    try:
        _refuse_other_file(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_size < size:
            raise _other_file(file)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _refuse_other_file(link: str) -> None:
    """Raise ConfigError if an open file is not the memory that the ranks of this attempt share."""
    # Nothing on a disk has this path: the kernel gives it to the memory of that name alone.
    if os.readlink(link) != f"/memfd:{_memory_name()} (deleted)":  # noqa: PTH115
        raise _other_file(link)


def _other_file(file: str) -> ConfigError:
    return ConfigError(
        f"backend=shm: the store names {file} as the memory of rank 0, and it is another file.",
        hint="A process outside of this run has written to the store. Ask for whole nodes, or use "
        "backend=gloo.",
    )


def _death_of(pid: int) -> Callable[[], bool]:
    """Return a function that tells whether a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return _Owned(descriptor, lambda: bool(poll.poll(0)))


class _Owned:
    """A function with a descriptor, which is closed with it."""

    def __init__(self, descriptor: int, function: Callable[[], bool]) -> None:
        self._descriptor, self._function = descriptor, function

    def __call__(self) -> bool:
        return self._function()

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _fence(machine: str) -> Callable[[], None]:
    """Return a function between the write of data and the write of its word, and between their reads.

    x86 keeps the order of writes, and of reads, so nothing is needed. ARMv8 does not. But it keeps the order
    of a store-release and a later load-acquire with everything around them, and the release and the next
    acquire of a lock are these.

    Raises:
        ConfigError: the order is not known for this kind of processor.
    """
    if machine in ("x86_64", "AMD64"):
        return lambda: None
    if machine not in ("aarch64", "arm64"):
        raise ConfigError(f"backend=shm does not run on {machine}.", hint="Use backend=gloo.")
    lock = threading.Lock()
    lock.acquire()

    def fence() -> None:
        lock.release()
        lock.acquire()

    return fence
