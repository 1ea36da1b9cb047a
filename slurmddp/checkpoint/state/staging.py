"""Copies a training state into memory that outlives this process, and reads one back: the rank's side.

Two memory files take turns, so that a whole state is there while the next one is copied. They are kept, with
all their pages in place: a copy then costs what a copy costs.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint.files.manifest import FORMAT, check_format
from slurmddp.checkpoint.files.publish import check, versions
from slurmddp.checkpoint.files.space import size_text
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state.packed import Bytes
from slurmddp.checkpoint.state.reader import Checkpoint
from slurmddp.checkpoint.state.safetensors_stream import decode, layout
from slurmddp.checkpoint.state.staging_copy import View
from slurmddp.checkpoint.state.state_tree import flatten, unflatten
from slurmddp.errors import CheckpointError
from slurmddp.host.cgroups import available_bytes, copies_that_fit

log = logging.getLogger(__name__)

_ROUND_BYTES = 2 << 20
"""Memory is taken in pieces of this size: a tree that is a few bytes longer next time needs no new map."""

_LARGEST_GROWTH = 8
"""At most this part of a state is taken in advance for its growth."""


class NoMemory(Exception):
    """There is no memory for a copy; the text says how much was wanted and how much there is."""


@dataclass
class _Slot:
    """One memory file."""

    descriptor: int
    view: View | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.view is None else len(self.view.area)


class Snapshots:
    """The memory files of one rank; `keep` is told the number and descriptor of each new one."""

    def __init__(
        self,
        inherited: Sequence[int] = (),
        keep: Callable[[int, int], None] = lambda slot, descriptor: None,
    ) -> None:
        self._slots = [_Slot(descriptor) for descriptor in inherited]
        self._keep = keep
        self._wanted = 2
        self._preparing: threading.Thread | None = None
        self._refused: NoMemory | None = None
        self._outgrown = 0
        """How large the state was for which memory was last taken instead of a copy."""

    def prepare(self, size: int) -> None:
        """Take the memory for states of `size` bytes, in a thread of its own; `take` waits for it."""
        self._join()
        self._preparing = threading.Thread(target=self._prepare, args=(size,), name="slurmddp-memory")
        self._preparing.daemon = True
        self._preparing.start()

    def _prepare(self, size: int) -> None:
        try:
            self._make_slots(size)
            for slot in self._slots:
                if not shared_buffer.is_busy(slot.descriptor):
                    self._fit(slot, size)
        except NoMemory as why:
            self._refused = why  # for `take` to tell

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def take(
        self,
        root: Path,
        step: int,
        stamp: int,
        state: Mapping[str, Any],
        meta: Mapping[str, Any],
        *,
        patient: bool = True,
    ) -> int | None:
        """Copy `state` and return the number of the memory file that holds it now.

        `root` is where its checkpoint would be; `stamp` is the same for copies on other nodes. None if all
        files are being written to the disk, or if not `patient` and the memory is still to be taken, which
        then begins. Raises NoMemory, or what writing it would raise.
        """
        check(step, 1, meta)
        flat = flatten(state)
        head, tensors = layout(flat.tensors)
        tree = json.dumps({"format": FORMAT, "state": flat.tree}, separators=(",", ":")).encode()
        about = json.dumps({"root": str(root), "meta": dict(meta), "versions": versions()}).encode()
        tensors_bytes = len(head) + sum(tensor.nbytes for tensor in tensors)
        sealed = shared_buffer.Sealed(
            step, stamp, shared_buffer.PAGE_BYTES, tensors_bytes, len(tree), len(about)
        )
        if not patient and not self._is_ready(sealed.end):
            return None
        number = self._free_slot(sealed.end)
        if number is not None:
            self._fill(self._slots[number], sealed, [head, tree, about], tensors)
        return number

    def has_free(self) -> bool:
        """Tell whether `take` would find a memory file that is not being written."""
        return len(self._slots) < self._wanted or not all(
            shared_buffer.is_busy(s.descriptor) for s in self._slots
        )

    def _is_ready(self, size: int) -> bool:
        """Tell whether all pages for a state of `size` bytes are in place, and begin to take them if not."""
        if self._preparing is not None and self._preparing.is_alive():
            return False
        self._join()
        if self._refused is None and (
            len(self._slots) < self._wanted
            or any(
                slot.capacity < size and not shared_buffer.is_busy(slot.descriptor) for slot in self._slots
            )
        ):
            self.prepare(size + self._growth(size))
            self._outgrown = size
            return False
        return True

    def _growth(self, size: int) -> int:
        """Return how much more a state that grows will need the next time: else no copy would ever fit."""
        return min(max(0, size - self._outgrown), size // _LARGEST_GROWTH) if self._outgrown else 0

    def _fill(
        self,
        slot: _Slot,
        sealed: shared_buffer.Sealed,
        texts: Sequence[bytes],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        view = self._fit(slot, sealed.end)
        shared_buffer.unseal(slot.descriptor)
        for start, text in zip((sealed.tensors_at, sealed.tree_at, sealed.about_at), texts, strict=True):
            view.area[start : start + len(text)] = text
        view.copy(tensors, sealed.tensors_at + len(texts[0]))
        shared_buffer.seal(slot.descriptor, sealed)

    def _free_slot(self, size: int) -> int | None:
        """Return the memory file to overwrite: never one that is being written, nor the newest of two."""
        self._join()
        self._make_slots(size)
        free = [
            (
                (-1, 0) if (found := shared_buffer.read_header(slot.descriptor)) is None else found.order,
                number,
            )
            for number, slot in enumerate(self._slots)
            if not shared_buffer.is_busy(slot.descriptor)
        ]
        return min(free)[1] if free else None

    def _make_slots(self, size: int) -> None:
        if self._refused is not None:
            raise self._refused
        missing = self._wanted - len(self._slots)
        if missing <= 0:
            return
        available = available_bytes()
        copies = copies_that_fit(_rounded(size), available, missing)
        if copies < missing:
            self._wanted -= missing - copies
            self._say_less(size, available)
        for _ in range(copies):
            self._slots.append(_Slot(shared_buffer.create()))
            self._keep(len(self._slots) - 1, self._slots[-1].descriptor)

    def _say_less(self, size: int, available: int) -> None:
        facts = f"A copy of the state takes {size_text(size)}, and {size_text(available)} of memory are left"
        if self._wanted == 0:
            self._refused = NoMemory(f"{facts}: training waits until each checkpoint is written.")
            raise self._refused
        log.warning("%s: one copy is held in place of two, and training waits for it to be written.", facts)

    def _fit(self, slot: _Slot, size: int) -> View:
        """Return the view of a memory file that takes `size` bytes."""
        if slot.view is not None and slot.capacity >= size:
            return slot.view
        more = _rounded(size) - os.fstat(slot.descriptor).st_size
        available = available_bytes()
        if more > 0 and copies_that_fit(more, available) == 0:
            raise NoMemory(
                f"The state has grown by {size_text(more)}, and {size_text(available)} of memory are left: "
                "training waits until each checkpoint is written."
            )
        _unmap(slot)
        try:
            area = shared_buffer.reserve(slot.descriptor, _rounded(size))
        except OSError as error:
            raise NoMemory(
                f"No memory for a copy of {size_text(size)} ({error.strerror}): training waits until each "
                "checkpoint is written."
            ) from error
        slot.view = View(area)
        return slot.view

    def newest(self, root: Path) -> tuple[int, shared_buffer.Sealed] | None:
        """Return descriptor and place of the newest whole state whose checkpoint belongs under `root`."""
        found = []
        for slot in self._slots:
            sealed = shared_buffer.read_header(slot.descriptor)
            if sealed is None:
                continue
            with shared_buffer.mapped(slot.descriptor, sealed) as parts:
                if parts.about["root"] == str(root):
                    found.append((sealed.order, slot.descriptor, sealed))
        return max(found)[1:] if found else None

    @property
    def descriptors(self) -> list[int]:
        """The memory files, in the order of their numbers."""
        return [slot.descriptor for slot in self._slots]

    def forget_after(self, order: tuple[int, int]) -> None:
        """Let states that are newer than that count for nothing: training resumes from that one."""
        for slot in self._slots:
            found = shared_buffer.read_header(slot.descriptor)
            if found is not None and found.order > order and not shared_buffer.is_busy(slot.descriptor):
                shared_buffer.unseal(slot.descriptor)

    def set_busy(self, number: int, busy: bool) -> None:
        """Say that a memory file is being written to the disk, or no longer is."""
        shared_buffer.set_busy(self._slots[number].descriptor, busy)

    def set_awaited(self) -> None:
        """Say that somebody waits for what is being written to the disk, whoever has asked for it."""
        for slot in self._slots:
            if shared_buffer.is_busy(slot.descriptor):
                shared_buffer.set_awaited(slot.descriptor)

    def close(self) -> None:
        """Let go of the memory here; whom it was kept by still has it."""
        self._join()
        for slot in self._slots:
            _unmap(slot)
            os.close(slot.descriptor)
        self._slots.clear()


def _rounded(size: int) -> int:
    return -(-size // _ROUND_BYTES) * _ROUND_BYTES


def _unmap(slot: _Slot) -> None:
    if slot.view is not None:
        view, slot.view = slot.view, None
        view.close()


def read_parts(step: int, parts: shared_buffer.Parts) -> Checkpoint:
    """Return the state that `parts` hold; its tensors are copies."""
    try:
        content = json.loads(bytes(parts.tree))
        check_format(content["format"])
        tensors = decode(Bytes(parts.tensors), len(parts.tensors))
        return Checkpoint(step, unflatten(content["state"], tensors), parts.about["meta"])
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"The state of step {step} in memory can't be decoded: {error}.") from error
