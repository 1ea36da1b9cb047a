"""The agent's part in checkpoints: it keeps the memory in which ranks leave their states, and has it written.

What a rank has copied is safe from the rank's own death. A process of the agent's own writes, so the agent
stays free to watch; the next ranks get the memory, and what their predecessors asked for still counts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurmddp.checkpoint.files.manifest import newest_step
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.checkpoint.memory.writer_process import Request, Result
from slurmddp.errors import CheckpointError
from slurmddp.runs.failures.capture import signal_name

_LOOK_S = 0.01
_UNKILLABLE_S = 2.0
"""How long a killed writer is waited for; the kernel may hold one in I/O."""


class Process(Protocol):
    """What the keeper has to know of a writer's process."""

    pid: int
    returncode: int | None


Start = Callable[[], tuple[Channel, Process]]


@dataclass
class _Line:
    """Both ends of the line to a rank; the rank's own is open here until its successor gets one."""

    own: Channel
    ranks: Channel


@dataclass
class _Write:
    """One request, and the line over which it came; the keeper's own came over none."""

    request: Request
    line: _Line | None
    is_answered: bool = False
    was_put_back: bool = False


@dataclass
class _Writer:
    """The process that writes, and the line to it; one that `is_gone` is still to be reaped."""

    line: Channel
    process: Process
    is_gone: bool = False


class Keeper:
    """The memory of one node's ranks, and the writer, which starts with the first checkpoint."""

    def __init__(self, start: Start = writer_process.start) -> None:
        self._start = start
        self._lines: dict[int, _Line] = {}
        self._slots: dict[int, int] = {}
        self._waiting: deque[_Write] = deque()
        self._running: _Write | None = None
        self._writer: _Writer | None = None
        self._unhealthy: dict[int, str] = {}

    def take_unhealthy(self) -> dict[int, str]:
        """Return the unhealthy nodes that ranks have reported since the last call, by node rank.

        A rank reports them before it exits, so the report is there when its exit is.
        """
        for line in self._lines.values():
            self._read(line)
        found, self._unhealthy = self._unhealthy, {}
        return found

    def channel_for(self, local_rank: int) -> int:
        """Return the descriptor for a new rank to inherit; what its predecessor asked for still counts.

        The ranks before have ended, all of them.
        """
        for line in self._lines.values():
            self._read(line)
        self._free_unasked()
        before = self._lines.pop(local_rank, None)
        if before is not None:
            before.own.close()
            before.ranks.close()
        self._lines[local_rank] = _Line(*Channel.pair())
        return self._lines[local_rank].ranks.fileno()

    def _free_unasked(self) -> None:
        """Let memory be used again that a rank had set apart for a write when it died, and not asked for."""
        for slot in self._slots.keys() - self._asked_for():
            shared_buffer.set_busy(self._slots[slot], False)

    def _asked_for(self) -> set[int]:
        """Return the numbers of the memory files that are being written, or wait for that."""
        writes = [*self._waiting, *([self._running] if self._running is not None else [])]
        return {write.request["slot"] for write in writes}

    def descriptors(self) -> list[int]:
        """Return what becomes readable when `handle` has something to do."""
        writers = [] if self._writer is None or self._writer.is_gone else [self._writer.line.fileno()]
        return [*(line.own.fileno() for line in self._lines.values()), *writers]

    def memory_fds(self) -> list[int]:
        """Return the memory files of this node, for the ranks of the next generation to inherit."""
        return [self._slots[slot] for slot in sorted(self._slots)]

    def newest_step(self) -> int | None:
        """Return the step of the newest whole state that is in memory here."""
        return shared_buffer.newest_step(self.memory_fds())

    def busy(self) -> bool:
        """Tell whether a checkpoint is being written, or waits for that."""
        return self._running is not None or bool(self._waiting)

    def handle(self) -> None:
        """Handle the messages of ranks and writer and the writer's exit, and begin to write; never blocks."""
        for line in self._lines.values():
            self._read(line)
        self._listen()
        self._reap()
        self._begin()

    @property
    def pids(self) -> tuple[int, ...]:
        """The child that `handle` waits for, if it runs."""
        return () if self._writer is None else (self._writer.process.pid,)

    def _reap(self) -> None:
        """Handle the writer's exit, if it has ended."""
        if self._writer is None:
            return
        pid, status = os.waitpid(self._writer.process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._listen()
        self._writer.process.returncode = os.waitstatus_to_exitcode(status)
        self._writer.line.close()
        self._writer = None
        done, self._running = self._running, None
        if done is not None and not done.is_answered:
            self._answer(done, _killed(done.request, status))

    def _listen(self) -> None:
        """Take in what the writer has said: how its write went, and that it is ready for the next one."""
        if self._writer is None:
            return
        try:
            while (received := self._writer.line.receive()) is not None:
                word = received[0]
                if word["kind"] == "finished":
                    self._running = None
                elif self._running is not None:
                    self._answer(self._running, word)
        except (EOFError, ConnectionError):
            self._writer.is_gone = True

    def _answer(self, write: _Write, result: Result) -> None:
        write.is_answered = True
        shared_buffer.set_busy(self._slots[write.request["slot"]], False)
        if write.line is not None:
            with suppress(OSError):  # The rank may be gone.
                write.line.own.send(result)

    def save_newest(
        self, run_dir: Path, attempt: int, claim: Callable[[int], bool] = lambda step: True
    ) -> int | None:
        """Begin to write the newest state if only memory holds it, and return its step.

        To be called when no rank is left. `claim` says whether no other node writes that step. Raises
        OSError when the checkpoints can't be listed.
        """
        self.handle()
        request = newest_unsaved(self._slots, self._asked_for(), run_dir, attempt)
        if request is None or not claim(request["step"]):
            return None
        shared_buffer.set_busy(self._slots[request["slot"]], True)
        self._waiting.append(_Write(request, None))
        self._begin()
        return int(request["step"])

    def hurry(self) -> None:
        """Let all that ranks have asked for be written as fast as can be: somebody waits for it."""
        self.handle()
        for slot in self._asked_for():
            shared_buffer.set_awaited(self._slots[slot])

    def finish(self, timeout_s: float) -> bool:
        """Wait until all is written; after `timeout_s` give up, kill the writer, and return False."""
        deadline = time.monotonic() + timeout_s
        self.hurry()
        while self.busy() and time.monotonic() < deadline:
            self._look()
        if not self.busy():
            return True
        self._waiting.clear()
        if self._writer is not None:
            os.kill(self._writer.process.pid, signal.SIGKILL)
        while self._running is not None and time.monotonic() < deadline + _UNKILLABLE_S:
            self._look()
        return False

    def _look(self) -> None:
        """Wait a moment, then handle what has come."""
        time.sleep(_LOOK_S)
        self.handle()

    def forget_in_child(self) -> None:
        """Let go of the writer in a process that was forked: it listens until nobody has a line to it."""
        if self._writer is not None:
            self._writer.line.close()

    def close(self) -> None:
        """Let go of lines, memory and writer; one that is still at work ends by itself."""
        if self._writer is not None:
            self._writer.line.close()
            if self._running is None:
                os.kill(self._writer.process.pid, signal.SIGKILL)
                os.waitpid(self._writer.process.pid, 0)
                self._writer.process.returncode = -signal.SIGKILL
        for line in self._lines.values():
            line.own.close()
            line.ranks.close()
        for descriptor in self._slots.values():
            os.close(descriptor)
        self._writer = None
        self._lines.clear()
        self._slots.clear()

    def _read(self, line: _Line) -> None:
        with suppress(EOFError):
            while (received := line.own.receive()) is not None:
                message, descriptors = received
                if message["kind"] == "memory":
                    self._keep(message["slot"], descriptors[0])
                elif message["kind"] == "write":
                    self._waiting.append(_Write(message, line))
                elif message["kind"] == "unhealthy":
                    self._unhealthy |= {int(node): why for node, why in message["nodes"].items()}

    def _keep(self, slot: int, descriptor: int) -> None:
        before = self._slots.pop(slot, None)
        if before is not None:
            os.close(before)
        self._slots[slot] = descriptor
        if self._writer is not None:
            with suppress(ConnectionError):  # Its line is heard to be closed, and the next one gets all.
                _register(self._writer.line, slot, descriptor)

    def _begin(self) -> None:
        """Hand the next request to the writer; if the writer is gone, `_reap` comes first."""
        while self._running is None and self._waiting and not (self._writer and self._writer.is_gone):
            write = self._waiting.popleft()
            try:
                self._hand_over(write)
            except ConnectionError:
                self._put_back(write)
            except OSError as error:
                self._give_up(write, f"{error}.")
            else:
                self._running = write

    def _hand_over(self, write: _Write) -> None:
        if self._writer is None:
            self._writer = _Writer(*self._start())
            for slot, descriptor in self._slots.items():
                _register(self._writer.line, slot, descriptor)
        self._writer.line.send(write.request)

    def _put_back(self, write: _Write) -> None:
        """Leave a request to the next writer, once: this one has ended, and `_reap` is to come."""
        if self._writer is not None:
            self._writer.is_gone = True
        if write.was_put_back:
            self._give_up(write, "It ends as soon as it is started.")
        else:
            write.was_put_back = True
            self._waiting.appendleft(write)

    def _give_up(self, write: _Write, why: str) -> None:
        error = CheckpointError(f"The process that writes checkpoints could not be used: {why}")
        self._answer(write, writer_process.conclude(write.request, error))


def _register(line: Channel, slot: int, descriptor: int) -> None:
    line.send({"kind": "memory", "slot": slot}, [descriptor])


def _killed(request: Request, status: int) -> Result:
    how = f"ended with exit code {os.waitstatus_to_exitcode(status)}"
    hint = "Why stands in the log of its node (node-N.log)."
    if os.WIFSIGNALED(status):
        how = f"was killed by {signal_name(os.WTERMSIG(status))}"
        hint = "If it was killed for want of memory, give the job more (mem_gb)."
    text = f"The process that wrote the checkpoint of step {request['step']} {how}."
    return writer_process.conclude(request, CheckpointError(text, hint=hint))


_KEEP_ALL = sys.maxsize
"""How many checkpoints stay is the trainer's to say, and it is gone."""


def newest_unsaved(
    slots: Mapping[int, int], asked_for: Collection[int], run_dir: Path, attempt: int
) -> Request | None:
    """Return what to ask of a writer, so that no state is lost; None where nothing is newer than the disk.

    `slots` are the memory files by number, `asked_for` those of them that are to be written anyway.
    Raises OSError when the checkpoints on the disk can't be listed.
    """
    states = {slot: found for slot, number in slots.items() if (found := shared_buffer.read_header(number))}
    if not states:
        return None
    slot = max(states, key=lambda slot: states[slot].order)
    if slot in asked_for:
        return None
    with shared_buffer.mapped(slots[slot], states[slot]) as parts:
        root = parts.about["root"]
    on_disk = newest_step(Path(root))
    if on_disk is not None and on_disk >= states[slot].step:
        return None
    return {
        "kind": "write", "slot": slot, "step": states[slot].step, "root": root, "keep_last": _KEEP_ALL,
        "background": False, "since": time.monotonic(), "stall_s": 0.0, "copied": states[slot].stamp / 1e9,
        "run_dir": str(run_dir), "attempt": attempt,
    }  # fmt: skip
