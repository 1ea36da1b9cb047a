"""The rank's side of a background save: copy the state into memory, request the write, receive its result.

Under slurmddp's agent, the agent holds the memory and runs the writer process. Without an agent, the rank
starts a writer process at its first save without `wait`. If the rank is killed, this process still completes
all requested writes. The rank itself writes if the memory is too small for a copy, and, without an agent, in
saves with `wait`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.best_by_metric import Best
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.checkpoint.memory.writer_process import conclude, error_of, fail_part
from slurmddp.checkpoint.state.staging import NoMemory, Snapshot, StagingBuffers
from slurmddp.collectives import values as collectives
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError, SlurmddpError
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.checkpointing.shard_copy import ShardCopy

log = logging.getLogger(__name__)

_POLL_S = 0.05
_TEXTS_BYTES = 1 << 20
"""Bytes to allocate in addition to the tensors, for plain values and metadata. If these need more, the memory
is allocated again."""
_LEAVE_S = 30.0
"""Seconds to wait at the end for the exit of an idle writer."""
_EXIT_S = 1.0
"""Seconds to wait for the exit of a writer that has closed its channel."""


@dataclass(frozen=True)
class _Pending:
    """A write that was requested from the writer process and has no result yet."""

    slot: int
    request: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.request["step"])


@dataclass(frozen=True)
class Keep:
    """The checkpoints to keep after a save, by the arguments `keep_last` and `keep_best` of `publish`."""

    keep_last: int
    keep_best: Best | None


class AsyncWriter:
    """The rank's side of saves that another process, the writer, writes to disk."""

    def __init__(self, environ: Mapping[str, str], info: RankInfo | None = None) -> None:
        self._channel = WriterChannel.attach(environ)
        self.has_agent = self._channel is not None
        # `close` closes these descriptors, so duplicate them: a second Distributon in this process needs
        # the originals.
        inherited = [os.dup(number) for number in shared_buffer.from_environment(environ)]
        self._buffers = StagingBuffers(inherited, self._register)
        self._run = RunContext.read(environ)
        self.copies_state = info is None or info.rank == 0 or (self.has_agent and info.local_rank == 0)
        """Whether this rank copies whole states: rank 0, and under agents the first rank of each node."""
        self.has_copies_elsewhere = info is not None and self.has_agent and info.nodes > 1
        """Whether ranks of other nodes copy states too."""
        self.leads_node = info is None or info.local_rank == 0
        """Whether this rank copies the shards of its node."""
        self.node_rank = 0 if info is None else info.node_rank
        self.nodes = 1 if info is None else info.nodes
        self.unfinished = False
        """Whether a save without `wait` may still be running; the same on all ranks."""
        self.on_durable: Callable[[float], None] = lambda seconds: None
        """Receives the seconds from the start of each save until it was durable."""
        self._writer: subprocess.Popen[bytes] | None = None
        self._pending: list[_Pending] = []
        self._failed: SlurmddpError | None = None
        self._copies_off = False
        """Whether this rank copies no more states into memory, because a copy has failed."""

    @property
    def is_writing(self) -> bool:
        """Whether a requested write has no result yet."""
        return bool(self._pending)

    def write(
        self,
        snapshot: Snapshot,
        keep: Keep,
        *,
        wait: bool,
        began: float,
        shards: ShardCopy | None = None,
    ) -> None:
        """Copy a state into memory and request its write, or write it in this process if it can't be copied.

        For a sharded state, the first rank of each node calls `write`, and the other ranks call `follow`.

        Args:
            snapshot: the state, with its step and the folder of all checkpoints.
            keep: which checkpoints stay.
            wait: whether to return only when the checkpoint is durable.
            began: when training paused for this save, in seconds of `time.monotonic`.
            shards: the copy of the shards of this node, for a sharded state.

        Raises:
            CheckpointError: this save, or an earlier one without `wait`, failed.
        """
        self.poll()
        self._raise_failed()

        folder = self._run.folder
        run_dir = str(folder.path) if folder and self._run.keeps(snapshot.root) else None
        request = {
            "kind": "write", "step": snapshot.step, "root": str(snapshot.root), **asdict(keep),
            "background": not wait, "attempt": self._run.attempt, "run_dir": run_dir,
        }  # fmt: skip
        if shards is not None:
            request |= {"stamp": snapshot.stamp, "part": shards.part}

        slot = None
        if self._uses_writer(wait):
            slot = self._copy(snapshot, shards)
        since = time.monotonic()
        request |= {"since": since, "stall_s": round(since - began, 3)}

        if slot is None:
            self._write_directly(snapshot, keep, shards)
            conclude(request | {"background": False}, None)
            return
        self._request(slot, request)
        if wait:
            self.finish()

    def _write_directly(self, snapshot: Snapshot, keep: Keep, shards: ShardCopy | None) -> None:
        if shards is not None:
            self.follow(shards)
        # A background write may still use the folder: wait for it.
        self.finish()

        # The shards are written. Only rank 0 writes the rest of the state and publishes the checkpoint.
        if shards is not None and shards.first != 0:
            return
        parts = None if shards is None else shards.parts
        checkpoint.write(
            snapshot.root, snapshot.step, snapshot.state, meta=snapshot.meta, parts=parts, **asdict(keep)
        )

    def follow(self, shards: ShardCopy) -> None:
        """Take part in the save of a sharded state on a rank that does not call `write`.

        The shards go into the buffer of the node's first rank, or into a file if that rank has no buffer.
        """
        if not shards.decline() and collectives.rank() != 0:
            shards.write_file()

    def copy_to_memory(self, snapshot: Snapshot, shards: ShardCopy | None = None) -> None:
        """Copy a state into memory, without writing it to disk.

        Nothing is copied if no buffer is ready: the call does not wait for memory.
        """
        if not self._copies_off:
            self._buffers.copy(snapshot, wait=False, shards=shards)

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Return a context that logs an error of its body instead of raising it, and ends this rank's copies.

        Training can continue without copies in memory. An error that only one rank raised would leave the
        other ranks waiting for it.
        """
        try:
            yield
        except NoMemory as why:
            self._end_copies(why)
        except Exception as error:
            message = f"This rank no longer copies its state into memory, only to disk: {error}"
            self._end_copies(CheckpointError(message))

    def prepare(self, size: int, *, wait: bool = True) -> None:
        """Start to allocate buffers for `size` bytes of tensors, if saves with this `wait` need them."""
        if self._uses_writer(wait):
            self._open_channel()
            self._buffers.prepare(size + _TEXTS_BYTES)

    def poll(self) -> None:
        """Process the results of finished writes, without waiting for others."""
        while self._pending and self._receive(0.0):
            pass

    def finish(self) -> None:
        """Wait until all requested writes are durable.

        Raises:
            CheckpointError: a write failed; the first error.
        """
        self._buffers.set_urgent()
        while self._pending:
            self._receive(1.0)
        self._raise_failed()

    def finish_inherited(self) -> None:
        """Call `finish`; on the first rank of a node, also wait for writes that dead ranks had requested."""
        self.finish()
        while self.leads_node and self._buffers.is_writing():
            time.sleep(_POLL_S)

    def states_in_memory(self, root: Path) -> list[tuple[int, shared_buffer.StoredState, bool]]:
        """Return the states in this node's memory that belong to the checkpoint folder `root`.

        Each entry contains the state's descriptor, its header, and whether it is only a part of a sharded
        state.
        """
        return self._buffers.states(root)

    def discard_after(self, order: tuple[int, int]) -> None:
        """Discard the states in memory that are newer than a loaded state.

        Args:
            order: step and stamp of the loaded state.
        """
        if self.leads_node:
            self._buffers.discard_after(order)
        else:
            self._buffers.close()

    def close(self) -> None:
        """Release the memory, and close the channel to the writer, which ends after its last write."""
        self._buffers.close()
        if self._channel is not None:
            # Send a message, because closing may not suffice: loader workers may have inherited this end of
            # the channel, which then stays open.
            with suppress(OSError):
                self._channel.send({"kind": "end"})
            self._channel.close()
            self._channel = None

        # Don't wait for a writer that still has requests: it ends by itself.
        if not self._pending:
            self._reap(_LEAVE_S)

    def _reap(self, timeout_s: float) -> None:
        if self._writer is not None:
            with suppress(subprocess.TimeoutExpired):
                self._writer.wait(timeout_s)
            self._writer = None

    def _uses_writer(self, wait: bool) -> bool:
        return not self._copies_off and (self.has_agent or not wait or self._writer is not None)

    def _copy(self, snapshot: Snapshot, shards: ShardCopy | None) -> int | None:
        """Copy the state into a buffer, and return the buffer's number; None if this rank has to write it."""
        try:
            self._open_channel()
            while not self._buffers.has_free():
                self._buffers.set_urgent()
                self._receive(_POLL_S)
            return self._buffers.copy(snapshot, shards=shards)
        except NoMemory as why:
            self._end_copies(why)
        except OSError as error:
            self._end_copies(CheckpointError(f"The writer process can't be started: {error}."))
        return None

    def _end_copies(self, why: Exception) -> None:
        self._copies_off = True
        log.warning("%s", why)

    def _request(self, slot: int, request: dict[str, Any]) -> None:
        self._buffers.set_writing(slot, True)
        self._pending.append(_Pending(slot, request))
        try:
            self._open_channel().send(request | {"slot": slot})
        except OSError:
            self._lose_writer()

    def _receive(self, timeout_s: float) -> bool:
        """Process a message of the writer, or the writer's end; return False if `timeout_s` passed first."""
        try:
            received = self._open_channel().receive(timeout_s)
        except (EOFError, OSError):
            self._lose_writer()
            return True
        if received is None:
            return False

        result = received[0]
        if result["kind"] == "written":
            self._conclude(result)
        return True

    def _conclude(self, result: writer_process.Result) -> None:
        """Process the result of a write: keep its error for the next call, or report the duration."""
        write = next((pending for pending in self._pending if pending.step == result["step"]), None)
        # A write whose writer was lost has already been counted as failed.
        if write is None:
            return

        self._pending.remove(write)
        self._failed = self._failed or error_of(result)
        if result["error"] is None:
            self.on_durable(write.request["stall_s"] + result["written_s"])

    def _lose_writer(self) -> None:
        """Count all pending writes as failed, because the writer has ended; a later call raises the error."""
        for write in self._pending:
            self._buffers.set_writing(write.slot, False)

        if self._pending:
            steps = ", ".join(str(write.step) for write in self._pending)
            error = CheckpointError(
                f"The writer process ended before the checkpoint of step {steps} was complete.",
                hint="The kernel may have killed it, for example because memory ran out.",
            )
            self._failed = self._failed or error
            for write in self._pending:
                fail_part(write.request, error)
        self._pending.clear()

        if self._channel is not None and not self.has_agent:
            self._channel.close()
            self._channel = None
            self._reap(_EXIT_S)

    def _raise_failed(self) -> None:
        error = self._failed
        self._failed = None
        if error is not None:
            raise error

    def _open_channel(self) -> WriterChannel:
        """Return the channel to the writer; without an agent, start a writer if none runs."""
        # A writer that ended while it had no request is replaced silently, because no write is lost.
        is_idle = self._writer is not None and not self._pending
        if is_idle and self._channel is not None and self._channel.is_closed_by_peer():
            self._lose_writer()

        if self._channel is None:
            self._channel, self._writer = writer_process.start()
            for number, descriptor in enumerate(self._buffers.descriptors):
                self._register(number, descriptor)
        return self._channel

    def _register(self, slot: int, descriptor: int) -> None:
        if self._channel is not None:
            self._channel.send({"kind": "memory", "slot": slot}, [descriptor])
