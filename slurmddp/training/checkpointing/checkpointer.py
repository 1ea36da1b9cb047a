"""Save the state of a training on all ranks together: gather each rank's part, and write or copy it.

Rank 0 writes a whole state. Of a sharded state, each node writes or copies the shards of its ranks. An error
on any rank is raised on all ranks: if one rank left alone, the others would block in their next collective.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.best_by_metric import ranked
from slurmddp.checkpoint.files.manifest import folder_name
from slurmddp.checkpoint.files.parts import Parts
from slurmddp.checkpoint.files.retention import MIN_KEPT
from slurmddp.checkpoint.state import config_match
from slurmddp.checkpoint.state.safetensors_stream import encoded_size
from slurmddp.checkpoint.state.shards import has_shards, with_whole_tensors
from slurmddp.checkpoint.state.staging import Snapshot
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.collectives import values as collectives
from slurmddp.training.checkpointing.async_writer import AsyncWriter, Keep
from slurmddp.training.checkpointing.finite import require_finite
from slurmddp.training.checkpointing.program import UserProgram
from slurmddp.training.checkpointing.shard_copy import ShardCopy
from slurmddp.training.checkpointing.snapshot_interval import Figures, SnapshotInterval
from slurmddp.training.checkpointing.training_state import Loaders, Unwrap, collect, of_this_rank
from slurmddp.training.precision import LossScaler
from slurmddp.training.run_log import numbers

log = logging.getLogger(__name__)

NEWEST_STAMP = 1 << 62
"""Time stamp of every checkpoint, by which it counts as newer than a copy in memory of the same step."""


@dataclass(frozen=True)
class _Gathered:
    """The gathered state of all ranks; on ranks that neither write nor copy it, the state is empty."""

    state: dict[str, Any]
    stamp: int = field(default_factory=time.time_ns)
    """Rank 0's time, in nanoseconds since the epoch."""
    figures: Figures | None = None
    """Rank 0's measurements, from which all ranks compute when to copy next."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Running averages and plain values of rank 0, which may differ between replicas."""

    def completed(self) -> dict[str, Any]:
        """Return the state with rank 0's buffers and plain values, so that all nodes have the same state."""
        if self.shared:
            _overlay(self.state, self.shared)
        return self.state


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Writer of checkpoints and of copies in memory; all ranks call the same methods in the same order."""

    loaders: Loaders
    unwrap: Unwrap
    strategy: Any = None
    """The strategy, whose optional methods for its state (see `Strategy`) are called on all ranks."""
    scaler: LossScaler | None = None
    seed: int | None
    config: Mapping[str, Any] | None
    program: UserProgram | None = None
    """The program of this process; None if it is not known."""
    saves: AsyncWriter
    pace: SnapshotInterval
    chosen: dict[Path, int] = field(default_factory=dict)
    """By checkpoint folder, the step that the program chose in its last load. Removed by the next save, and
    by a load of the newest checkpoint."""
    known_metrics: set[str] = field(default_factory=set)
    """The names of metrics that a save had, or whose absence was logged."""

    def facts(self) -> dict[str, Any]:
        """Return the metadata for the checkpoint's manifest: world size, seed, configuration, program."""
        return {
            "world_size": collectives.world_size(),
            "seed": self.seed,
            **config_match.manifest_facts(self.config),
            **(self.program.facts() if self.program else {}),
        }

    def save(
        self,
        root: Path,
        step: int,
        objects: Mapping[str, Any],
        metrics: Mapping[str, Any],
        keep: Keep,
        *,
        wait: bool,
    ) -> Path:
        """Write a checkpoint of all ranks; return its folder. With `wait`, it is durable on return.

        Rank 0 writes the state. Of a sharded state, each node writes its shards, and rank 0 publishes the
        checkpoint.
        """
        began = time.monotonic()
        root = root.absolute()
        saves = self.saves
        self._leave_newer(root, step)

        shards = None
        if _is_sharded(objects):
            gathered = self._gather_state(step, objects)
            shards = self._shards(root, folder_name(step), gathered)
        else:
            gathered = _Gathered(self._state_on_zero(step, objects))

        saves.unfinished = not wait
        with collectives.agreed(), shards or nullcontext():
            writes = collectives.rank() == 0 if shards is None else saves.leads_node
            if writes:
                meta = self.facts() | _measured(metrics)
                snapshot = Snapshot(root, step, gathered.stamp, gathered.completed(), meta)
                self._log_missing_metric(root, keep, metrics)
                saves.write(snapshot, keep, wait=wait, began=began, shards=shards)
            elif shards is not None:
                saves.follow(shards)
        return root / folder_name(step)

    def _leave_newer(self, root: Path, step: int) -> None:
        """If an older step was chosen for the last load, rename newer checkpoints and discard newer copies.

        Otherwise a resume would load them instead of the checkpoints that this training writes from now on.

        Args:
            root: the folder of all checkpoints.
            step: the step of the save or copy that follows.
        """
        loaded = self.chosen.pop(root, None)
        if loaded is None:
            return

        with collectives.agreed():
            self.saves.finish_inherited()
            self.saves.discard_after((loaded, NEWEST_STAMP))
        names = collectives.on_zero(partial(checkpoint.abandon, root, loaded, step))
        if names and collectives.rank() == 0:
            log.warning(
                "Training continues from the older step %d. Newer checkpoints are renamed, not loaded: %s.",
                loaded, ", ".join(names),
            )  # fmt: skip

    def _log_missing_metric(self, root: Path, keep: Keep, metrics: Mapping[str, Any]) -> None:
        """Log a warning on rank 0, once per metric, if no checkpoint has the metric of `keep_best`."""
        self.known_metrics.update(metrics)
        if collectives.rank() or keep.keep_best is None or keep.keep_best[0] in self.known_metrics:
            return

        name = keep.keep_best[0]
        given = ", ".join(metrics) or "none"
        if not ranked(root, keep.keep_best):
            log.warning(
                "keep_best names the metric %r, but no checkpoint has it so far (metrics of this save: %s). "
                "Only the last %d checkpoints stay. Pass the metric: save(..., metrics={%r: value}).",
                name, given, max(keep.keep_last, MIN_KEPT), name,
            )  # fmt: skip
        self.known_metrics.add(name)

    def _gather_rank_states(self) -> list[Any] | None:
        """Return the results of `_rank_state` of all ranks on rank 0, and None on other ranks."""
        with collectives.agreed():
            rank_state = self._rank_state()
        return collectives.gather_to_zero(rank_state)

    def _rank_state(self) -> dict[str, Any]:
        """Return the state that only this rank has: random states, loader positions, strategy, loss scale."""
        # Ask the strategy first: its collectives need all ranks, and the lines below may raise on this rank.
        strategy_state = self.strategy_state()
        rank_state = of_this_rank(self.loaders)
        if strategy_state:
            rank_state["strategy"] = strategy_state
        if self.scaler is not None:
            rank_state["scaler"] = self.scaler.state_dict()
        return rank_state

    def strategy_state(self) -> dict[str, Any]:
        """Return the strategy's state on this rank; empty if the strategy has no `state_dict`."""
        state: dict[str, Any] = self.strategy.state_dict() if hasattr(self.strategy, "state_dict") else {}
        return state

    def check_strategy(self, loaded: checkpoint.Checkpoint) -> None:
        """Let the strategy check its saved state of this rank.

        On another number of ranks the state will not be used, so it is not checked.

        Raises:
            CheckpointError: the strategy can't restore the state.
        """
        rank_states = loaded.state["rng"]
        if len(rank_states) != collectives.world_size() or not hasattr(self.strategy, "check_state_dict"):
            return
        rank_state = rank_states[collectives.rank()]
        if "strategy" in rank_state:
            self.strategy.check_state_dict(rank_state["strategy"])

    def restore_strategy(self, loaded: checkpoint.Checkpoint) -> None:
        """Restore the strategy's state on this rank, and the loss scale of fp16.

        The strategy is reset first. If the saved state is of another number of ranks, another strategy, or
        other settings, the strategy continues without it. All ranks then take rank 0's loss scale, because
        ranks that average gradients need the same scale.
        """
        if hasattr(self.strategy, "reset"):
            self.strategy.reset()

        rank_states = loaded.state["rng"]
        has_same_ranks = len(rank_states) == collectives.world_size()
        rank_state = rank_states[collectives.rank() if has_same_ranks else 0]

        if "strategy" in rank_state and not (has_same_ranks and self._continues(rank_state["strategy"])):
            reason = "another strategy, or of other settings"
            if not has_same_ranks:
                reason = f"{len(rank_states)} rank(s)"
            log.warning("The strategy starts without its saved state: the checkpoint is of %s.", reason)
            rank_state = rank_states[0]

        if self.scaler is not None:
            self.scaler.load_state_dict(rank_state.get("scaler", {}))

    def _continues(self, state: dict[str, Any] | None) -> bool:
        """Restore the strategy's state; return False if the strategy can't continue from it."""
        if state is None or not hasattr(self.strategy, "load_state_dict"):
            return False
        return self.strategy.load_state_dict(state) is not False

    def _state_on_zero(self, step: int, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of all ranks to save, on rank 0; {} on other ranks."""
        rank_states = self._gather_rank_states()
        with collectives.agreed():
            if rank_states is None:
                return {}
            return self._state(step, objects, rank_states)

    def _shards(self, root: Path, name: str, gathered: _Gathered, *, everywhere: bool = False) -> ShardCopy:
        parts = Parts(root, name, gathered.stamp, collectives.world_size())
        return ShardCopy(gathered.state, parts, self.saves.node_rank, everywhere=everywhere)

    def _state(self, step: int, objects: Mapping[str, Any], rank_states: list[Any]) -> dict[str, Any]:
        """Return the state of all ranks to save, after a check that the parameters are finite.

        Raises:
            SlurmddpError: a trainable parameter holds NaN or infinity.
        """
        require_finite(step, objects, self.unwrap)
        return collect(objects, self.loaders, rank_states, self.unwrap)

    def finish(self) -> None:
        """Wait until the saves of all ranks are durable.

        Raises:
            CheckpointError: on all ranks, if a save failed on any rank.
        """
        self.saves.unfinished = False
        with collectives.agreed():
            self.saves.finish()

    def check_can_save(self, root: Path, objects: Mapping[str, Any], *, keep_last: int, wait: bool) -> float:
        """Write, verify and delete the files of a save, and allocate memory for later saves.

        Returns:
            The seconds that the check took on rank 0; the same number on all ranks.
        """
        started = time.perf_counter()
        root = root.absolute()
        growth = _growth(objects)

        parts = None
        if _is_sharded(objects):
            gathered = self._gather_state(0, objects)
            shards = self._shards(root, "test", gathered)
            parts = shards.parts
            share = sum(shards.sizes.values()) + growth // self.saves.nodes
        else:
            gathered = _Gathered(self._state_on_zero(0, objects))
            share = growth

        state = gathered.state
        with collectives.agreed():
            if collectives.rank() == 0:
                checkpoint.check_can_write(root, state, growth=growth, keep_last=keep_last, parts=parts)
            elif parts is not None:
                shards.write_file()
            if state:
                size = share + encoded_size(flatten(state, sharded=parts is not None).tensors)
                self.prepare(objects, size, wait=wait)
        return collectives.from_zero(time.perf_counter() - started)

    def prepare(self, objects: Mapping[str, Any], size: int, *, wait: bool = True) -> None:
        """Start to allocate memory for copies of `size` bytes, if this rank copies the state of `objects`."""
        if self._copies(objects):
            self.saves.prepare(size, wait=wait)

    def _copies(self, objects: Mapping[str, Any]) -> bool:
        """Decide whether this rank copies the state of `objects`, or the shards of its node, into memory."""
        if _is_sharded(objects):
            return self.saves.leads_node
        return self.saves.copies_state

    def copy_to_memory(self, root: Path, step: int, objects: Mapping[str, Any]) -> None:
        """Copy the state into the memory of each node; of a sharded state, each node copies its shards."""
        began = time.perf_counter()
        root = root.absolute()
        self._leave_newer(root, step)
        gathered = self._gather_state(step, objects)
        shards = None
        if _is_sharded(objects):
            shards = self._shards(root, folder_name(step), gathered, everywhere=True)

        with self.saves.optional(), shards or nullcontext():
            if self._copies(objects):
                snapshot = Snapshot(root, step, gathered.stamp, gathered.completed(), self.facts())
                self.saves.copy_to_memory(snapshot, shards)
        self.pace.copied(gathered.figures or self.pace.figures, time.perf_counter() - began)

    def _gather_state(self, step: int, objects: Mapping[str, Any]) -> _Gathered:
        """Return the state of all ranks, on the ranks that copy it. All ranks call it.

        Of a sharded state, each rank gets its own shards, and the first rank of each node the rest too. An
        error on any rank is raised on all ranks.
        """
        saves = self.saves
        is_zero = collectives.rank() == 0
        is_sharded = _is_sharded(objects)
        state: dict[str, Any] = {}
        rank_state = None
        of_rank_zero: tuple[Figures, int, dict[str, Any]] | None = None
        error: Exception | None = None
        try:
            rank_state = self._rank_state()
            if is_sharded or saves.copies_state:
                state = self._state(step, objects, [])
            if is_zero:
                shared: dict[str, Any] = {}
                if saves.nodes > 1 if is_sharded else saves.has_copies_elsewhere:
                    shared = _shared_part(state, objects, self.unwrap)
                of_rank_zero = (self.pace.figures, time.time_ns(), shared)
        except Exception as caught:
            error = caught

        # `gather` sends an error of this rank along, and raises it on all ranks.
        gathered = collectives.gather((rank_state, of_rank_zero), error)
        if is_sharded:
            state = with_whole_tensors(state, keep=saves.leads_node)
        if state:
            state["rng"] = [part for part, _ in gathered]

        figures, stamp, shared = gathered[0][1] or (None, 0, {})
        return _Gathered(state, stamp, figures, {} if is_zero else shared)


def _is_sharded(objects: Mapping[str, Any]) -> bool:
    return any(map(has_shards, objects.values()))


def _measured(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a save for the manifest: {"metrics": numbers by name}, or {} without metrics.

    NaN and infinity are left out, because no such value can be the best.
    """
    finite = {name: value for name, value in numbers(metrics).items() if math.isfinite(value)}
    return {"metrics": finite} if finite else {}


def _shared_part(state: Mapping[str, Any], objects: Mapping[str, Any], unwrap: Unwrap) -> dict[str, Any]:
    """Return the values of rank 0's state that may differ between ranks, for `_overlay` on other nodes.

    These are all values except parameters and the states of optimizers: buffers, plain values, loaders.
    """
    parts: dict[str, Any] = {}
    for name, value in objects.items():
        saved = state["objects"][name]
        if isinstance(value, nn.Module):
            trained = {key for key, _ in unwrap(value).named_parameters(remove_duplicate=False)}
            parts[name] = {key: item for key, item in saved.items() if key not in trained}
        elif not isinstance(value, Optimizer):
            parts[name] = saved

    modules = [name for name, value in objects.items() if isinstance(value, nn.Module)]
    return {"objects": parts, "loaders": state["loaders"], "modules": modules}


def _overlay(state: dict[str, Any], shared: Mapping[str, Any]) -> None:
    """Replace values of `state` by rank 0's values, a result of `_shared_part`."""
    for name, value in shared["objects"].items():
        if name in shared["modules"]:
            state["objects"][name].update(value)
        else:
            state["objects"][name] = value
    state["loaders"] = shared["loaders"]


def _growth(objects: Mapping[str, Any]) -> int:
    """Return the number of bytes by which the first step will enlarge the optimizers' states."""
    return sum(_first_step_bytes(value) for value in objects.values() if isinstance(value, Optimizer))


def _first_step_bytes(optimizer: Optimizer) -> int:
    """Return an estimate of the bytes that an optimizer's state will need; 0 if it has a state already.

    Of torch's optimizers, those with `betas` (Adam) store two values per weight, those with momentum one.
    """
    if optimizer.state:
        return 0

    copies = 0
    if "betas" in optimizer.defaults:
        copies = 2
    elif optimizer.defaults.get("momentum"):
        copies = 1
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    trained_bytes: int = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return copies * trained_bytes
