"""Going on from the newest state there is, on all ranks together: in the memory of a node, or on the disk.

After a rank has died its node still holds what was copied last; ranks of nodes that do not, a spare one, say,
get it from a rank whose node does. What is in memory is used if it is as new as the newest checkpoint; if it
does not fit, or can't be read on any rank, the checkpoint is.
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
from slurmddp.checkpoint.files.manifest import TENSORS_FILE, load_manifest, newest_step, step_of
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state import config_match, visibility
from slurmddp.checkpoint.state.staging import read_parts
from slurmddp.errors import CheckpointError
from slurmddp.training.checkpointing.checkpointer import Checkpointer
from slurmddp.training.checkpointing.training_state import apply, check, restore_data, restore_randomness
from slurmddp.training.process_group import collectives

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_LATEST = 1 << 62
Held = tuple[int, shared_buffer.Sealed]
"""Descriptor and place of a state in memory."""


@dataclass(frozen=True)
class _Offer:
    """What the memory of the nodes holds."""

    own: Held | None
    best: shared_buffer.Sealed | None
    """The newest state; the same on all ranks."""
    source: int
    """The first rank whose node has that one."""
    is_missing: bool
    """Whether there is a rank whose node does not."""


def load(
    root: Path,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    *,
    allow_other_config: bool,
    device: torch.device,
) -> tuple[int, str] | None:
    """Give `objects` the newest state; return its step, and `memory` or `disk`; None when there is none."""
    root = root.absolute()
    offer, on_disk = _look(root, checkpointer)
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
            checkpointer.saves.went_on_from((-1, 0))
        return None
    return _from_disk(root, chosen, objects, checkpointer), "disk"


def set_aside(root: Path, step: int) -> tuple[str, int] | None:
    """Set the checkpoint of `step` aside on behalf of all ranks (see `checkpoint.set_newest_aside`)."""
    moved: tuple[str, int] | None = None
    with collectives.agreed():
        if collectives.rank() == 0:
            moved = checkpoint.set_newest_aside(root, step)
    return collectives.from_zero(moved)


def _look(root: Path, checkpointer: Checkpointer) -> tuple[_Offer, int | None]:
    """Return what there is in the memory of any node, and the step of the newest checkpoint."""
    own: Held | None = None
    on_disk: int | None = None
    error: Exception | None = None
    try:
        own, on_disk = checkpointer.saves.held(root), _newest_on_disk(root)
    except Exception as caught:
        error = caught
    offers = collectives.gather((None if own is None else astuple(own[1]), on_disk), error)
    held = [None if place is None else shared_buffer.Sealed(*place) for place, _ in offers]
    orders = [(-1, 0) if one is None else one.order for one in held]
    source = orders.index(max(orders))
    return _Offer(own, held[source], source, len(set(orders)) > 1), offers[0][1]


def _newest_on_disk(root: Path) -> int | None:
    """Return the step of the newest checkpoint by its name, on rank 0 only."""
    if collectives.rank() == 0:
        with suppress(OSError):  # What chooses a checkpoint tries again.
            return newest_step(root)
    return None


def _from_memory(
    offer: _Offer,
    best: shared_buffer.Sealed,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    allow_other_config: bool,
    device: torch.device,
) -> tuple[int, str] | None:
    """Go on from the state in memory that `source` has; None, on all ranks, when it does not do."""
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
        _give(found, objects, checkpointer, certain)
        checkpointer.saves.went_on_from(best.order)
        checkpointer.saves.prepare(best.end)
    return found.step, "memory"


def _read(own: Held | None, received: memoryview | None, best: shared_buffer.Sealed) -> checkpoint.Checkpoint:
    if received is not None and own is None:
        return read_parts(best.step, shared_buffer.Parts.of(received, best))
    if own is None:
        raise CheckpointError("it was not sent")
    with shared_buffer.mapped(*own) as parts:
        return read_parts(best.step, parts)


def _broadcast(own: Held | None, best: shared_buffer.Sealed, source: int, device: torch.device) -> memoryview:
    """Return on all ranks the bytes of the state that `source`, which alone gives `own`, has."""
    with collectives.agreed():
        whole = torch.empty(best.end - best.tensors_at, dtype=torch.uint8, device="cpu")
        if own is not None:
            with shared_buffer.mapped(*own) as parts:
                whole.numpy().data[:] = parts.whole
    for start in range(0, len(whole), _CHUNK_BYTES):
        chunk = whole[start : start + _CHUNK_BYTES]
        sent = chunk.to(device)
        distributed.broadcast(sent, src=source)
        if sent is not chunk:
            chunk.copy_(sent)
    return whole.numpy().data


def _chosen(root: Path, config: Mapping[str, Any] | None, allow: bool) -> tuple[str, str, int] | None:
    """Return name, mark and step of the checkpoint that rank 0 chooses."""
    chosen: tuple[str, str, int] | None = None
    with collectives.agreed():
        if collectives.rank() == 0:
            chosen = _choose(root, config, allow)
    return collectives.from_zero(chosen)


def _choose(root: Path, config: Mapping[str, Any] | None, allow: bool) -> tuple[str, str, int] | None:
    """Choose the newest good checkpoint; raises ConfigError for one of another configuration."""
    folder = checkpoint.latest(root)
    if folder is None:
        return None
    config_match.check(load_manifest(folder).meta, config, folder.name, allow=allow)
    return folder.name, visibility.mark_of(folder), step_of(folder) or 0


def _from_disk(
    root: Path, chosen: tuple[str, str, int], objects: Mapping[str, Any], checkpointer: Checkpointer
) -> int:
    """Read and check on all ranks before any of them changes anything."""
    folder = root / chosen[0]
    with collectives.agreed():
        visibility.await_same(folder, chosen[1])
        found = checkpoint.read(folder)
        certain = check(found.state, objects, checkpointer.loaders, checkpointer.unwrap)
    with collectives.agreed():
        _give(found, objects, checkpointer, certain)
        checkpointer.saves.went_on_from((chosen[2], _LATEST))
        checkpointer.saves.prepare((folder / TENSORS_FILE).stat().st_size)
    return chosen[2]


def _give(
    found: checkpoint.Checkpoint,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    certain: frozenset[str],
) -> None:
    apply(found.state, objects, checkpointer.loaders, checkpointer.unwrap, certain)
    restore_data(found, checkpointer.loaders)
    restore_randomness(found, checkpointer.seed)
