"""Connect ranks of one host: tensors pass through memory that all ranks have mapped.

Backend `shm`. Each collective runs in rounds. In a round a rank copies a piece of its tensor into its slot,
publishes the slot, waits for the other ranks, and reads their slots. Three sets of slots take turns, so a
rank may fill its next slot while slower ranks still read. A set is free again after two more rounds, because
a rank enters a round only after it has left the round before.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from slurmddp.collectives.chunks import chunks
from slurmddp.collectives.operations import Combine
from slurmddp.errors import RankFailure
from slurmddp.transports.link_group import COMBINE
from slurmddp.transports.node_memory import LINE_BYTES, NodeMemory

SET_BYTES = 2 * 1024 * 1024
"""Bytes of the slots of all ranks together. They fit into the third-level cache of a processor."""
LEAST_SLOT_BYTES = 64 * 1024
"""The smallest size of a slot in bytes, used on many ranks. Smaller pieces would need too many rounds."""
WHOLE_BYTES = 128 * 1024
"""If all ranks' tensors together have at most this size, each rank reduces the whole tensor: one wait instead
of two."""
MESSAGE_BYTES = 64 * 1024
"""Size of a part of a message between two ranks; the memory has room for two parts per pair of ranks."""
_SETS = 3
_PAGE_BYTES = 4096
_PARTS = 2
_WORDS = LINE_BYTES // 8
_VIEWS = 256
"""The largest number of tensor lengths whose views and call numbers are cached; a training uses few."""


class SharedMemoryLink:
    """Link between ranks of one host through shared memory.

    It implements all-reduce, broadcast, all-gather and barrier itself. Only one thread at a time may call it.
    Collectives use 6 MB of memory, or on more than 32 ranks 192 kB for each rank. A pair of ranks that
    exchanges messages uses 128 kB in each direction.

    Args:
        store: the key-value store through which the ranks find each other.
        rank: the rank of this process.
        world_size: number of ranks.
        timeout: the longest wait for another rank.

    Raises:
        ConfigError: the ranks are on different hosts.

    Example:
        link = SharedMemoryLink(store, rank, world_size, timedelta(minutes=5))
        link.all_reduce(torch.ones(3), ReduceOp.SUM)
    """

    def __init__(self, store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self._slot_bytes = max(SET_BYTES // world_size // _PAGE_BYTES * _PAGE_BYTES, LEAST_SLOT_BYTES)
        sets_bytes = _SETS * world_size * self._slot_bytes
        pairs = world_size**2
        self._memory = NodeMemory(
            store,
            rank,
            world_size,
            timeout,
            extra_words=2 * pairs,
            data_bytes=sets_bytes + pairs * _PARTS * MESSAGE_BYTES,
        )

        data = self._memory.data
        self._slots = data[:sets_bytes].view(_SETS, world_size, self._slot_bytes)
        self._parts = data[sets_bytes:].view(world_size, world_size, _PARTS, MESSAGE_BYTES)
        self._round = 0
        self._views: dict[tuple[torch.dtype, int], list[tuple[list[torch.Tensor], list[torch.Tensor]]]] = {}
        self._calls: dict[tuple[Combine | str, torch.dtype, int], int] = {}
        """By operation, dtype and length, the number by which ranks check that all call the same
        operation."""
        self._outgoing: dict[int, deque[_Message]] = {}
        """By receiver, the messages with parts that are not copied into the shared memory yet."""
        self._pushing = threading.Lock()

    # --- methods for collectives

    def all_reduce(self, flat: torch.Tensor, op: Any = ReduceOp.SUM) -> Any:
        """Reduce a tensor over all ranks, in place.

        The result has equal bits on all ranks, because they reduce in the same order. Large tensors are
        reduced in pieces. Each rank reduces its share of a piece while the other ranks reduce theirs, and
        copies its next piece into the memory before it waits for them.

        Args:
            flat: a contiguous tensor of one dimension, of equal length and dtype on all ranks.
            op: `torch.distributed.ReduceOp.SUM`, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.

        Returns:
            None. NotImplemented for other reductions, which the caller must then do.
        """
        if op == ReduceOp.AVG:
            self.all_reduce(flat)
            fractional = flat.is_floating_point() or flat.is_complex()
            flat.div_(self.world_size, rounding_mode=None if fractional else "trunc")
            return None

        combine = COMBINE.get(op)
        if combine is None:
            return NotImplemented

        self._begin(combine, flat)
        if flat.numel() * flat.element_size() * self.world_size <= WHOLE_BYTES:
            self._reduce_whole(flat, combine)
        else:
            self._reduce_shares(flat, combine)

        return None

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Replace `flat`, which is contiguous and of one dimension, by the tensor of rank `source`."""
        memory = self._memory
        self._begin(f"broadcast {source}", flat)
        for piece in self._pieces(flat):
            slots, _ = self._next_slots(piece)
            if self.rank == source:
                slots[source].copy_(piece)

            # Ranks other than the source publish, too: the set of slots is free once all ranks have left the
            # round.
            memory.reach(memory.publish())
            if self.rank != source:
                piece.copy_(slots[source])

    def all_gather(self, out: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill `out`, of N times the length of `flat`, with the tensors of all N ranks in their order."""
        memory = self._memory
        self._begin("all_gather", flat)
        rows = [self._pieces(row) for row in out.view(self.world_size, -1)]
        for number, piece in enumerate(self._pieces(flat)):
            slots, _ = self._next_slots(piece)
            slots[self.rank].copy_(piece)
            memory.reach(memory.publish())
            for row, slot in zip(rows, slots, strict=True):
                row[number].copy_(slot)

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self._memory.call = 0
        self._memory.reach(self._memory.publish())

    def close(self) -> None:
        """Close this rank's descriptors of the other ranks' processes; it waits for no other rank."""
        self._memory.close()

    def _begin(self, operation: Combine | str, flat: torch.Tensor) -> None:
        """Set the call number of an operation, by which ranks detect that their operations or tensors differ.

        It is computed from the operation, and the dtype and length of `flat`.
        """
        key = (operation, flat.dtype, flat.numel())
        call = self._calls.get(key)
        if call is None:
            # Name a function by its index in COMBINE, which is equal in all processes.
            name = operation if isinstance(operation, str) else list(COMBINE.values()).index(operation)
            if len(self._calls) >= _VIEWS:
                self._calls.clear()
            call = zlib.crc32(f"{name} {flat.dtype} {flat.numel()}".encode())
            self._calls[key] = call

        self._memory.call = call

    def _reduce_whole(self, flat: torch.Tensor, combine: Combine) -> None:
        memory = self._memory
        slots, _ = self._next_slots(flat)
        slots[self.rank].copy_(flat)
        memory.reach(memory.publish())

        flat.copy_(slots[0])
        for slot in slots[1:]:
            combine(flat, slot)

    def _reduce_shares(self, flat: torch.Tensor, combine: Combine) -> None:
        memory = self._memory
        pieces = self._pieces(flat)
        slots, shares = self._next_slots(pieces[0])
        slots[self.rank].copy_(pieces[0])
        filled = memory.publish()
        for number, piece in enumerate(pieces):
            memory.reach(filled)
            for share in shares[1:]:
                combine(shares[0], share)

            reduced = memory.publish()
            result = slots[0]
            # Copy the next piece into the memory before the wait, so that slower ranks delay the copy less.
            if number + 1 < len(pieces):
                slots, shares = self._next_slots(pieces[number + 1])
                slots[self.rank].copy_(pieces[number + 1])
                filled = memory.publish()

            memory.reach(reduced)
            piece.copy_(result)

    def _pieces(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split `flat` into views that each fit into a slot; an empty tensor gives one empty view."""
        return torch.split(flat, self._slot_bytes // flat.element_size())

    def _next_slots(self, piece: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Begin the next round of a collective.

        Returns:
            The slot of each rank, and this rank's share of each slot, as tensors of the length of `piece`.
        """
        self._round = (self._round + 1) % _SETS
        key = (piece.dtype, piece.numel())
        if key not in self._views:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            self._views[key] = [self._cut(slots, piece) for slots in self._slots]

        return self._views[key][self._round]

    def _cut(self, slots: torch.Tensor, piece: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        views = [slot.view(piece.dtype)[: piece.numel()] for slot in slots]
        return views, [chunks(view, self.world_size)[self.rank] for view in views]

    # --- methods for messages from one rank to another

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        """Start to send a contiguous tensor to rank `to`.

        Parts that don't fit into the shared memory yet are copied during later calls of this link.

        Returns:
            A function that waits until the memory of the tensor may change.
        """
        message = _Message(tensor)
        self._outgoing.setdefault(to, deque()).append(message)
        self._push()

        return lambda: self._finish(message, to)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Receive the next message of `source` into a contiguous tensor of the same shape and dtype.

        Raises:
            RankFailure: the message has another size, `source` has ended, or the time-out is over.
        """
        memory = self._memory
        sent, taken = self._words(source, self.rank)
        message = _Message(tensor)
        for part in message.parts:
            count = memory.words[taken] + 1
            # Send this rank's own messages during the wait, because the sender may be waiting for one.
            memory.wait(sent, count, source, self._push)
            sent_bytes = memory.words[sent + 1 + count % _PARTS]
            if sent_bytes != message.bytes:
                raise RankFailure(
                    f"Rank {source} sent {sent_bytes} bytes, but rank {self.rank} expected {message.bytes}.",
                    hint="All ranks must call the same collectives in the same order, with tensors of equal "
                    "length and dtype.",
                )

            part.copy_(self._parts[source, self.rank, count % _PARTS, : len(part)])
            # Announce that the sender may overwrite the part.
            memory.set(taken, count)

    def _finish(self, message: _Message, to: int) -> None:
        _, taken = self._words(self.rank, to)
        while message.parts:
            if not self._push():
                self._memory.wait(taken, self._memory.words[taken] + 1, to, self._push)

    def _push(self) -> bool:
        """Copy waiting parts into the shared memory while they fit; return whether any part was copied."""
        moved = False
        # Take a lock: the program may wait for a send while the thread of a group receives, and both call
        # `_push`.
        with self._pushing:
            for to, messages in self._outgoing.items():
                sent, taken = self._words(self.rank, to)
                while messages and self._memory.words[sent] - self._memory.words[taken] < _PARTS:
                    count = self._memory.words[sent] + 1
                    part = messages[0].parts.popleft()
                    self._memory.words[sent + 1 + count % _PARTS] = messages[0].bytes
                    self._parts[self.rank, to, count % _PARTS, : len(part)].copy_(part)
                    # Set the count after the part. The fence in `set` makes both visible in this order.
                    self._memory.set(sent, count)
                    moved = True
                    if not messages[0].parts:
                        messages.popleft()

        return moved

    def _words(self, source: int, to: int) -> tuple[int, int]:
        """Return the indices of two counters: parts that `source` has sent to `to`, and parts read by `to`.

        The first counter is followed by the size of the message of each part in the memory.
        """
        first = self._memory.first_word + 2 * (source * self.world_size + to) * _WORDS
        return first, first + _WORDS


class _Message:
    """A tensor that is being sent or received: its size in bytes, and the parts that are not copied yet."""

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().view(-1).view(torch.uint8)
        self.bytes = len(flat)
        self.parts = deque(torch.split(flat, MESSAGE_BYTES))
