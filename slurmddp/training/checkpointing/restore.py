"""Loads the newest state on all ranks together, from the memory of a node or from the disk.

After a rank has died, its node still holds the last copied state. Ranks of other nodes, such as a spare, get
that state from a rank that has it. A state in memory is used if it is as new as the newest checkpoint. If it
does not fit, or a rank can't read it, the checkpoint is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import visibility
from slurmddp.checkpoint.files.manifest import TENSORS_FILE, load_manifest, newest_step, step_of
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state import config_match
from slurmddp.checkpoint.state.staging import read_state
from slurmddp.errors import CheckpointError
from slurmddp.training.checkpointing.checkpointer import Checkpointer
from slurmddp.training.checkpointing.training_state import apply, check, restore_data, restore_randomness
from slurmddp.training.process_group import collectives

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_NEWEST_STAMP = 1 << 62
"""Stamp of a checkpoint: no copy of the same step is newer."""
InMemory = tuple[int, shared_buffer.StoredState]
"""Descriptor and header of a state in memory."""


@dataclass(frozen=True)
class _Offer:
    """The states in the memory of all nodes."""

    own: InMemory | None
    best: shared_buffer.StoredState | None
    """The newest state; the same on all ranks."""
    source: int
    """The first rank whose node has `best`."""
    is_missing: bool
    """Whether the node of some rank lacks `best`."""


def load(
    root: Path,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    *,
    allow_other_config: bool,
    device: torch.device,
) -> tuple[int, str] | None:
    """Load the newest state into `objects`; return its step and `memory` or `disk`, or None without one."""
    root = root.absolute()
    offer, on_disk = _find(root, checkpointer)
    best = offer.best
    if best is not None and (on_disk is None or best.step >= on_disk):
        found = _from_memory(offer, best, objects, checkpointer, allow_other_config, device)
        if found is not None:
            return found
        best = None
    chosen = _chosen(root, checkpointer.config, allow_other_config)
    if best is not None and (chosen is None or chosen[2] < best.step):
        found = _from_memory(offer, best, objects, checkpointer, allow_other_config, device)
        if found is not None:
            return found
    if chosen is None:
        with collectives.agreed():
            checkpointer.saves.discard_after((-1, 0))
        return None
    return _from_disk(root, chosen, objects, checkpointer), "disk"


def quarantine(root: Path, step: int) -> tuple[str, int] | None:
    """Quarantine the newest checkpoint on behalf of all ranks (see `checkpoint.quarantine_newest`)."""
    moved: tuple[str, int] | None = None
    with collectives.agreed():
        if collectives.rank() == 0:
            moved = checkpoint.quarantine_newest(root, step)
    return collectives.from_zero(moved)


def _find(root: Path, checkpointer: Checkpointer) -> tuple[_Offer, int | None]:
    """Return the states in the memory of all nodes, and the step of the newest checkpoint."""
    own: InMemory | None = None
    on_disk: int | None = None
    error: Exception | None = None
    try:
        own, on_disk = checkpointer.saves.newest_in_memory(root), _newest_on_disk(root)
    except Exception as caught:
        error = caught
    offers = collectives.gather((None if own is None else astuple(own[1]), on_disk), error)
    headers = [None if fields is None else shared_buffer.StoredState(*fields) for fields, _ in offers]
    orders = [(-1, 0) if header is None else header.order for header in headers]
    source = orders.index(max(orders))
    return _Offer(own, headers[source], source, len(set(orders)) > 1), offers[0][1]


def _newest_on_disk(root: Path) -> int | None:
    """Return the step of the newest checkpoint by its name, on rank 0 only."""
    if collectives.rank() == 0:
        with suppress(OSError):  # `_choose` lists the checkpoints again and raises.
            return newest_step(root)
    return None


def _from_memory(
    offer: _Offer,
    best: shared_buffer.StoredState,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    allow_other_config: bool,
    device: torch.device,
) -> tuple[int, str] | None:
    """Load the newest state in memory; return None on all ranks if any rank can't."""
    own = offer.own if offer.own is not None and offer.own[1].order == best.order else None
    certain: frozenset[str] = frozenset()
    try:
        received = None
        if offer.is_missing:
            is_source = collectives.rank() == offer.source
            received = _broadcast(own if is_source else None, best, offer.source, device)
        with collectives.agreed():
            found = _read(own, received, best)
            name = f"of step {found.step} in memory"
            config_match.check(found.meta, checkpointer.config, name, allow=allow_other_config)
            certain = check(found.state, objects, checkpointer.loaders, checkpointer.unwrap)
    except Exception as error:  # The same on all ranks.
        log.warning("The state of step %d in memory is not used: %s", best.step, error)
        return None
    with collectives.agreed():
        _apply(found, objects, checkpointer, certain)
        checkpointer.saves.discard_after(best.order)
        checkpointer.saves.prepare(best.end)
    return found.step, "memory"


def _read(
    own: InMemory | None, received: memoryview | None, best: shared_buffer.StoredState
) -> checkpoint.Checkpoint:
    if received is not None and own is None:
        return read_state(best.step, shared_buffer.StateBytes.of(received, best))
    if own is None:
        raise CheckpointError("it was not sent")
    with shared_buffer.mapped(*own) as stored:
        return read_state(best.step, stored)


def _broadcast(
    own: InMemory | None, best: shared_buffer.StoredState, source: int, device: torch.device
) -> memoryview:
    """Send the bytes of the state from rank `source`, which alone passes `own`, to all ranks."""
    with collectives.agreed():
        whole = torch.empty(best.end - best.tensors_at, dtype=torch.uint8, device="cpu")
        if own is not None:
            with shared_buffer.mapped(*own) as stored:
                whole.numpy().data[:] = stored.whole
    for start in range(0, len(whole), _CHUNK_BYTES):
        chunk = whole[start : start + _CHUNK_BYTES]
        sent = chunk.to(device)
        distributed.broadcast(sent, src=source)
        if sent is not chunk:
            chunk.copy_(sent)
    return whole.numpy().data


def _chosen(root: Path, config: Mapping[str, Any] | None, allow: bool) -> tuple[str, str, int] | None:
    """Return name, fingerprint and step of the checkpoint that rank 0 chooses."""
    chosen: tuple[str, str, int] | None = None
    with collectives.agreed():
        if collectives.rank() == 0:
            chosen = _choose(root, config, allow)
    return collectives.from_zero(chosen)


def _choose(root: Path, config: Mapping[str, Any] | None, allow: bool) -> tuple[str, str, int] | None:
    """Choose the newest good checkpoint; raises ConfigError if it has another configuration."""
    folder = checkpoint.latest(root)
    if folder is None:
        return None
    config_match.check(load_manifest(folder).meta, config, folder.name, allow=allow)
    return folder.name, visibility.fingerprint(folder), step_of(folder) or 0


def _from_disk(
    root: Path, chosen: tuple[str, str, int], objects: Mapping[str, Any], checkpointer: Checkpointer
) -> int:
    """Read and check the checkpoint on all ranks before any rank loads it."""
    folder = root / chosen[0]
    with collectives.agreed():
        visibility.wait_until_visible(folder, chosen[1])
        found = checkpoint.read(folder)
        certain = check(found.state, objects, checkpointer.loaders, checkpointer.unwrap)
    with collectives.agreed():
        _apply(found, objects, checkpointer, certain)
        checkpointer.saves.discard_after((chosen[2], _NEWEST_STAMP))
        checkpointer.saves.prepare((folder / TENSORS_FILE).stat().st_size)
    return chosen[2]


def _apply(
    found: checkpoint.Checkpoint,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    certain: frozenset[str],
) -> None:
    apply(found.state, objects, checkpointer.loaders, checkpointer.unwrap, certain)
    restore_data(found, checkpointer.loaders)
    restore_randomness(found, checkpointer.seed)
