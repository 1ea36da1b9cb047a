"""The writing rank's side of a save: copy the state into memory, ask for it to be written, hear how it went.

Under slurmddp's agent the agent keeps the memory and has it written. Elsewhere the rank starts a writer of
its own when it is first told not to wait; that process outlives a rank that is killed until all is written.
Where there is no memory for a copy the rank writes itself, as it does when it is to wait and has no agent.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.checkpoint.memory.writer_process import conclude, error_of
from slurmddp.checkpoint.state.staging import NoMemory, Snapshots
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError, SlurmddpError
from slurmddp.runs.folder.run_context import RunContext

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_TEXTS_BYTES = 1 << 20
"""For what a state says beside its tensors: memory that is too short by a byte is all mapped again."""
_LEAVE_S, _ENDS_S = 30.0, 1.0
"""How long a writer is waited for that is to end, and one that has let go of its line."""


@dataclass(frozen=True)
class _Asked:
    """A write that was asked for and not answered yet."""

    slot: int
    step: int
    stall_s: float


class AsyncWriter:
    """What one rank has saved, and what of it is durable."""

    def __init__(self, environ: Mapping[str, str], info: RankInfo | None = None) -> None:
        # Copies of what the agent handed down: a second Distributon in this process needs it too.
        self._line = Channel.attach_copy(environ)
        self.has_agent = self._line is not None
        inherited = [os.dup(number) for number in shared_buffer.from_environment(environ)]
        self._snapshots = Snapshots(inherited, self._register)
        self._run = RunContext.read(environ)
        self.holds = info is None or info.rank == 0 or (self.has_agent and info.local_rank == 0)
        """Whether this rank copies states: rank 0, and the first rank of each node that has an agent."""
        self.spreads = info is not None and self.has_agent and info.nodes > 1
        """Whether other ranks than rank 0 do."""
        self.unfinished = False
        """Whether a save was asked for that nobody has waited for; the same on all ranks."""
        self.on_durable: Callable[[float], None] = lambda seconds: None
        """Is told how long each save took until it was durable."""
        self._writer: subprocess.Popen[bytes] | None = None
        self._asked: list[_Asked] = []
        self._failed: SlurmddpError | None = None
        self._refused = False

    @property
    def busy(self) -> bool:
        """Whether something is being written beside the training."""
        return bool(self._asked)

    def write(
        self,
        root: Path,
        step: int,
        stamp: int,
        state: Mapping[str, Any],
        meta: Mapping[str, Any],
        *,
        keep_last: int,
        wait: bool,
        began: float,
    ) -> None:
        """Save `state`; training stands still since `began`. Raises what went wrong with an earlier one."""
        self.poll()
        self._raise_failed()
        request = {
            "kind": "write", "step": step, "root": str(root), "keep_last": keep_last, "background": not wait,
            "run_dir": str(self._run.folder.path) if self._run.folder and self._run.keeps(root) else None,
            "attempt": self._run.attempt,
        }  # fmt: skip
        slot = self._copy(root, step, stamp, state, meta) if self._writes_beside(wait) else None
        since = time.monotonic()
        request |= {"since": since, "stall_s": round(since - began, 3)}
        if slot is None:
            self.finish()
            checkpoint.write(root, step, state, meta=meta, keep_last=keep_last)
            conclude(request | {"background": False}, None)
            return
        self._ask(slot, request)
        if wait:
            self.finish()

    def keep(
        self, root: Path, step: int, stamp: int, state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> None:
        """Copy `state` into memory, if that takes no more than the copy (see `optional`)."""
        if not self._refused:
            with self.optional():
                self._snapshots.take(root, step, stamp, state, meta, patient=False)

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Log an error of the work inside instead of raising it, and copy no state on this rank any more.

        Training does not need the copies, and an error on one rank would keep the others waiting.
        """
        try:
            yield
        except NoMemory as why:
            self._refuse(why)
        except Exception as error:
            self._refuse(CheckpointError(f"No more states are kept in memory: {error}"))

    def prepare(self, size: int, *, wait: bool = True) -> None:
        """Take the memory for tensors of about `size` bytes beside what comes next, if any will be used."""
        if self.holds and self._writes_beside(wait) and not self._refused:
            self._own_line()
            self._snapshots.prepare(size + _TEXTS_BYTES)

    def poll(self) -> None:
        """Hear what was written meanwhile; costs nothing while nothing is."""
        while self._asked and self._hear(0.0):
            pass

    def finish(self) -> None:
        """Return when all that was asked for is durable; raises the first error."""
        self._snapshots.set_awaited()
        while self._asked:
            self._hear(1.0)
        self._raise_failed()

    def held(self, root: Path) -> tuple[int, shared_buffer.Sealed] | None:
        """Return descriptor and place of the newest state in this node's memory that belongs under `root`."""
        return self._snapshots.newest(root)

    def went_on_from(self, order: tuple[int, int]) -> None:
        """Let states in memory that are newer than the one that was loaded count for nothing."""
        if self.holds:
            self._snapshots.forget_after(order)
        else:
            self._snapshots.close()

    def close(self) -> None:
        """Let go of memory and writer; one that is still at work ends by itself."""
        self._snapshots.close()
        if self._line is not None:
            with suppress(OSError):
                # Loader workers may hold this end as well, so that it would not be seen to close.
                self._line.send({"kind": "end"})
            self._line.close()
            self._line = None
        if not self._asked:
            self._reap(_LEAVE_S)

    def _reap(self, timeout_s: float) -> None:
        if self._writer is not None:
            with suppress(subprocess.TimeoutExpired):
                self._writer.wait(timeout_s)
            self._writer = None

    def _writes_beside(self, wait: bool) -> bool:
        return not self._refused and (self.has_agent or not wait or self._writer is not None)

    def _copy(
        self, root: Path, step: int, stamp: int, state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> int | None:
        """Return the slot that holds the state now; None where it must be written without a copy."""
        try:
            self._own_line()
            while not self._snapshots.has_free():
                self._snapshots.set_awaited()
                self._hear(_LOOK_S)
            return self._snapshots.take(root, step, stamp, state, meta)
        except NoMemory as why:
            self._refuse(why)
        except OSError as error:
            self._refuse(CheckpointError(f"No process can be started that writes checkpoints: {error}."))
        return None

    def _refuse(self, why: Exception) -> None:
        self._refused = True
        log.warning("%s", why)

    def _ask(self, slot: int, request: dict[str, Any]) -> None:
        self._snapshots.set_busy(slot, True)
        self._asked.append(_Asked(slot, request["step"], request["stall_s"]))
        try:
            self._own_line().send(request | {"slot": slot})
        except OSError:
            self._lose_writer()

    def _hear(self, timeout_s: float) -> bool:
        """Take in one answer; return whether there was one."""
        try:
            received = self._own_line().receive(timeout_s)
        except (EOFError, OSError):
            self._lose_writer()
            return True
        if received is None:
            return False
        result = received[0]
        if result["kind"] != "written":
            return True
        done = next((asked for asked in self._asked if asked.step == result["step"]), None)
        if done is not None:
            self._asked.remove(done)
            self._failed = self._failed or error_of(result)
            if result["error"] is None:
                self.on_durable(done.stall_s + result["written_s"])
        return True

    def _lose_writer(self) -> None:
        """What was being written when the writer went is not: say so at the next occasion."""
        for asked in self._asked:
            self._snapshots.set_busy(asked.slot, False)
        steps = ", ".join(str(asked.step) for asked in self._asked)
        if self._asked:
            error = CheckpointError(f"The process that wrote the checkpoint of step {steps} has ended.")
            self._failed = self._failed or error
        self._asked.clear()
        if self._line is not None and not self.has_agent:
            self._line.close()
            self._line = None
            self._reap(_ENDS_S)

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _own_line(self) -> Channel:
        if self._writer is not None and not self._asked and self._line and self._line.is_closed_there():
            self._lose_writer()  # It had nothing to do, so nothing is lost.
        if self._line is None:
            self._line, self._writer = writer_process.start()
            for number, descriptor in enumerate(self._snapshots.descriptors):
                self._register(number, descriptor)
        return self._line

    def _register(self, slot: int, descriptor: int) -> None:
        if self._line is not None:
            self._line.send({"kind": "memory", "slot": slot}, [descriptor])
