"""Load the newest state on all ranks together, from the memory of a node or from the disk.

After a rank has died, its node still holds the last copied state. Ranks of other nodes, such as a spare, get
that state from a rank that has it. A state in memory is used if it is as new as the newest checkpoint. If
this state does not fit, or a rank can't read it, the checkpoint is loaded instead.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import visibility
from slurmddp.checkpoint.files.best_by_metric import Best
from slurmddp.checkpoint.files.manifest import (
    DamagedError,
    Manifest,
    is_shard_file,
    load_manifest,
    newest_step,
    step_of,
)
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.state import config_match
from slurmddp.checkpoint.state.shards import mesh_of
from slurmddp.checkpoint.state.staging import read_state
from slurmddp.collectives import values as collectives
from slurmddp.errors import CheckpointError
from slurmddp.training.checkpointing.checkpointer import NEWEST_STAMP, Checkpointer
from slurmddp.training.checkpointing.program import UserProgram, refuse_other
from slurmddp.training.checkpointing.training_state import (
    apply,
    check,
    fitting,
    restore_data,
    restore_randomness,
)

log = logging.getLogger(__name__)

InMemory = tuple[int, shared_buffer.StoredState]
"""Descriptor and header of a state in memory."""


@dataclass(frozen=True)
class _Offer:
    """The newest state in the memory of all nodes, and which ranks have it."""

    best: shared_buffer.StoredState | None
    """The newest state; the same on all ranks."""
    on_node: InMemory | None
    """`best` in the memory of this node, or None."""
    source: int
    """The first rank whose node has `best`."""
    is_missing: bool
    """Whether the node of some rank lacks `best`."""


def load(
    root: Path,
    objects: Mapping[str, Any],
    checkpointer: Checkpointer,
    *,
    step: int | None = None,
    best: Best | None = None,
    strict: bool = True,
    allow_other_config: bool = False,
    of_program: UserProgram | None = None,
) -> tuple[int, str] | None:
    """Load the newest state into `objects`, or the checkpoint of `step`, or the best one. All ranks call it.

    Args:
        root: the folder of all checkpoints.
        objects: the objects to load into, by name.
        checkpointer: the saves of the training.
        step, best, strict, allow_other_config: as for `Distributon.load`.
        of_program: the only program whose checkpoint may be loaded; None: any program.

    Returns:
        The step of the loaded state, and "memory" or "disk", where it was. None if there is no state; with
        `step` or `best`, a missing checkpoint is an error.
    """
    root = root.absolute()
    loading = _Load(root, objects, checkpointer, strict, allow_other_config, of_program)
    if step is None and best is None:
        return loading.run()
    return loading.run_chosen(partial(checkpoint.find, root, step=step, best=best))


def quarantine(root: Path, step: int) -> tuple[str, int] | None:
    """Call `checkpoint.quarantine_newest(root, step)` on rank 0; return its result on all ranks."""
    return collectives.on_zero(partial(checkpoint.quarantine_newest, root, step))


def go_back(root: Path, every: int, *, before: int, checkpointer: Checkpointer) -> bool:
    """Make an older checkpoint the newest state, on disk and in memory. All ranks call it.

    Args:
        root: the folder of all checkpoints; no save may be running.
        every: prefer a checkpoint whose step is a multiple of this number; 0: no preference.
        before: the checkpoint must be of a step before this one.
        checkpointer: the saves of the training, with the copies in memory.

    Returns:
        Whether there is such a checkpoint, the same on all ranks.
    """
    root = root.absolute()
    step = collectives.on_zero(partial(checkpoint.go_back, root, every, before=before))
    if step is None:
        return False

    with collectives.agreed():
        checkpointer.saves.discard_after((step, NEWEST_STAMP))
    return True


def _newest(
    offers: Sequence[Sequence[tuple[shared_buffer.StoredState, bool]]],
) -> tuple[shared_buffer.StoredState | None, int, bool]:
    """Return the newest state in memory that can be loaded.

    Args:
        offers: for each rank, the states in the memory of its node, and whether each is only the node's part
            of a sharded state. A part can be loaded only if all nodes have their parts.

    Returns:
        The state (None if there is none), the first rank that has it, and whether another rank lacks it.
    """
    orders = [{state.order for state, _ in offer} for offer in offers]
    common = set.intersection(*orders)
    usable = [
        (state, rank)
        for rank, offer in enumerate(offers)
        for state, is_part in offer
        if not is_part or state.order in common
    ]
    if not usable:
        return None, 0, False

    # Choose the newest state, and as its source the lowest rank that has it.
    best, source = max(usable, key=lambda pair: (pair[0].order, -pair[1]))
    return best, source, best.order not in common


@dataclass(frozen=True)
class _Load:
    """One call of `load`; all ranks make the same calls of its methods."""

    root: Path
    objects: Mapping[str, Any]
    checkpointer: Checkpointer
    strict: bool
    allow_other_config: bool
    of_program: UserProgram | None

    def run(self) -> tuple[int, str] | None:
        """Load the newest state in memory or on disk; return its step and "memory" or "disk".

        None if there is no state.
        """
        offer, step_on_disk = self._find()
        best = offer.best
        if best is not None and (step_on_disk is None or best.step >= step_on_disk):
            if self._from_memory(offer, best):
                return best.step, "memory"
            best = None

        damaged: set[str] = set()
        damage: DamagedError | None = None
        while True:
            # By its name, the newest checkpoint is newer than the state in memory. But it may be damaged, and
            # `_choose` then returns an older one, so compare again.
            chosen = collectives.on_zero(partial(self._choose, without=damaged))
            if best is not None and (chosen is None or chosen[2] < best.step):
                if self._from_memory(offer, best):
                    return best.step, "memory"
                best = None

            if chosen is None:
                break
            try:
                self._from_disk(*chosen)
            except DamagedError as error:
                # It is not renamed, because the damage may be in the cache or the memory of one host.
                log.warning("%s The next older checkpoint is tried.", error.message)
                damaged.add(chosen[0])
                damage = error
            else:
                self._discard_after((chosen[2], NEWEST_STAMP))
                if damaged:
                    # The next save abandons the damaged checkpoints, as after the load of a chosen step.
                    self.checkpointer.chosen[self.root] = chosen[2]
                return chosen[2], "disk"

        if damage is not None:
            raise damage
        self._discard_after((-1, 0))
        return None

    def run_chosen(self, find: Callable[[], Path]) -> tuple[int, str]:
        """Load the checkpoint whose folder `find` returns on rank 0.

        Returns:
            The step of the checkpoint, and where it was: "disk".
        """
        chosen = collectives.on_zero(lambda: self._described(find()))
        self._from_disk(*chosen)
        self.checkpointer.chosen[self.root] = chosen[2]
        return chosen[2], "disk"

    def _find(self) -> tuple[_Offer, int | None]:
        """Return the newest state in memory, and the step of the newest checkpoint on disk, by folder names.

        The step is None if there is no checkpoint.
        """
        in_memory: list[tuple[int, shared_buffer.StoredState, bool]] = []
        step_on_disk: int | None = None
        error: Exception | None = None
        try:
            in_memory = self.checkpointer.saves.states_in_memory(self.root)
            if collectives.rank() == 0:
                # Ignore an error here: `_choose` lists the checkpoints again, and raises it.
                with suppress(OSError):
                    step_on_disk = newest_step(self.root)
        except Exception as caught:
            error = caught

        fields = [(astuple(state), is_part) for _, state, is_part in in_memory]
        gathered = collectives.gather((fields, step_on_disk), error)
        offers = [
            [(shared_buffer.StoredState(*values), is_part) for values, is_part in offer]
            for offer, _ in gathered
        ]
        best, source, is_missing = _newest(offers)

        on_node = None
        if best is not None:
            same = ((number, state) for number, state, _ in in_memory if state.order == best.order)
            on_node = next(same, None)
        return _Offer(best, on_node, source, is_missing), gathered[0][1]

    def _from_memory(self, offer: _Offer, best: shared_buffer.StoredState) -> bool:
        """Load the state `best` from memory; return False, on all ranks, if it can't be used on any rank."""
        try:
            received = None
            if offer.is_missing:
                sent = offer.on_node if collectives.rank() == offer.source else None
                received = _broadcast(sent, best, offer.source)
            with collectives.agreed():
                loaded = _read(offer.on_node, received, best, mesh_of(self.objects.values()))
                self._check_config(loaded.meta, f"of step {loaded.step} in memory")
                certain = self._check(loaded)
        except Exception as error:
            # `agreed` raises an error of one rank on all ranks, so all ranks return False here.
            log.warning("The state of step %d in memory is not used: %s", best.step, error)
            return False

        stored = best if offer.on_node is None else offer.on_node[1]
        self._apply(loaded, certain, stored.end)
        self._discard_after(best.order)
        return True

    def _choose(self, without: Collection[str]) -> tuple[str, str, int] | None:
        """On rank 0, return name, fingerprint and step of the newest undamaged checkpoint, or None.

        Args:
            without: names of checkpoints that are damaged on another host.

        Raises:
            CheckpointError: another program has written the checkpoint.
            ConfigError: the checkpoint has another configuration.
        """
        folder = checkpoint.latest(self.root, without=without)
        if folder is None:
            return None
        return self._described(folder)

    def _described(self, folder: Path) -> tuple[str, str, int]:
        meta = load_manifest(folder).meta
        refuse_other(meta, self.of_program, self.root)
        self._check_config(meta, folder.name)
        return folder.name, visibility.fingerprint(folder), step_of(folder) or 0

    def _from_disk(self, name: str, fingerprint: str, step: int) -> None:
        """Load a checkpoint: all ranks read and check it before any object is changed.

        Raises:
            CheckpointError: a rank can't read the checkpoint, or its state does not fit.
            DamagedError: on all ranks, if the checkpoint is damaged for any of them, and nothing else fails.
        """
        folder = self.root / name
        damage = ""
        try:
            with collectives.agreed():
                try:
                    visibility.wait_until_visible(folder, fingerprint)
                    loaded = checkpoint.read(folder, mesh_of(self.objects.values()))
                    certain = self._check(loaded)
                    size = self._share(load_manifest(folder))
                except DamagedError as error:
                    damage = f"Rank {collectives.rank()} on {socket.gethostname()}: {error.message}"

            damages = [text for text in collectives.gather(damage) if text]
            if damages:
                raise DamagedError(damages[0])
            self._apply(loaded, certain, size)
        except CheckpointError as error:
            if str(folder) not in error.message:
                error.message += f" The checkpoint is {folder}."
            raise

    def _share(self, manifest: Manifest) -> int:
        """Return an estimate of the bytes that a copy of a checkpoint takes in one node's memory."""
        shards = sum(record.size for name, record in manifest.files.items() if is_shard_file(name))
        whole = sum(record.size for record in manifest.files.values()) - shards
        nodes = 1 if mesh_of(self.objects.values()) is None else self.checkpointer.saves.nodes
        return whole + shards // nodes

    def _check_config(self, meta: Mapping[str, Any], name: str) -> None:
        config_match.check(meta, self.checkpointer.config, name, allow=self.allow_other_config)

    def _check(self, loaded: checkpoint.Checkpoint) -> frozenset[str]:
        """Check that a state fits the objects, loaders and strategy.

        Returns:
            The names of the objects whose load is certain to succeed.

        Raises:
            CheckpointError: the state does not fit.
            ConfigError: an object has no `load_state_dict`.
        """
        saver = self.checkpointer
        ignored = None if self.strict else list[str]()
        certain = check(loaded.state, self.objects, saver.loaders, saver.unwrap, ignored)

        try:
            saver.check_strategy(loaded)
        except CheckpointError:
            if ignored is None:
                raise
            loaded.state["rng"][collectives.rank()]["strategy"] = None
            ignored.append("strategy: its state does not fit")
        if ignored and collectives.rank() == 0:
            log.warning("load(strict=False) left out what does not fit: %s.", "; ".join(ignored))

        return certain

    def _discard_after(self, order: tuple[int, int]) -> None:
        """Discard states in memory that are newer than the loaded one, because training repeats their steps.

        Args:
            order: step and stamp of the loaded state.
        """
        self.checkpointer.chosen.pop(self.root, None)
        with collectives.agreed():
            self.checkpointer.saves.discard_after(order)

    def _apply(self, loaded: checkpoint.Checkpoint, certain: frozenset[str], size: int) -> None:
        """Load a checked state into objects, loaders, strategy and random generators.

        Args:
            loaded: the state.
            certain: the names of the objects that can't fail to load, the result of `_check`.
            size: bytes of memory to allocate for the copies of later checkpoints.
        """
        saver = self.checkpointer
        with collectives.agreed():
            # This call completes the state of an optimizer that is sharded over the ranks. Without it, a load
            # that fails could not be undone.
            saver.strategy_state()
            loaders = fitting(saver.loaders, loaded.state, None)
            apply(loaded.state, self.objects, loaders, saver.unwrap, certain, self.strict)

            saver.restore_strategy(loaded)
            restore_data(loaded, loaders)
            # Restore the random states last, because the `load_state_dict` methods may draw random numbers.
            restore_randomness(loaded, saver.seed)
            saver.prepare(self.objects, size)


def _read(
    on_node: InMemory | None, received: memoryview | None, best: shared_buffer.StoredState, mesh: Any
) -> checkpoint.Checkpoint:
    """Return the state `best`, decoded from this node's memory or from bytes that another rank has sent.

    Args:
        on_node: the state in this node's memory, or None.
        received: the bytes from another rank, or None.
        best: the header of the state.
        mesh: the device mesh of sharded objects, or None.
    """
    if on_node is not None:
        with shared_buffer.mapped(*on_node) as stored:
            return read_state(best.step, stored, mesh)
    if received is None:
        raise CheckpointError("no rank has sent it")
    return read_state(best.step, shared_buffer.StateBytes.of(received, best), mesh)


def _broadcast(sent: InMemory | None, best: shared_buffer.StoredState, source: int) -> memoryview:
    """Send the bytes of a state from rank `source` to all ranks, and return them.

    Args:
        sent: the state in memory on rank `source`; None on other ranks.
        best: the header of the state.
        source: the rank that sends.
    """
    with collectives.agreed():
        whole = torch.empty(best.end - best.tensors_at, dtype=torch.uint8, device="cpu")
        if sent is not None:
            with shared_buffer.mapped(*sent) as stored:
                whole.numpy().data[:] = stored.whole

    collectives.broadcast_bytes(whole, source)
    return whole.numpy().data
