"""The agent's part in checkpoints: it keeps the memory in which ranks leave their states, and has it written.

What a rank has copied is safe from the rank's own death. For each write the agent forks a child of its own
(it has no CUDA and no threads), one at a time, so it stays free to watch; the next ranks get the memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from slurmddp.errors import CheckpointError
from slurmddp.launchers.failure import signal_name
from slurmddp.launchers.signals import STOP_SIGNALS
from slurmddp.node import memory
from slurmddp.node.channel import Channel
from slurmddp.runs import checkpoint_writer
from slurmddp.runs.checkpoint_writer import Perform, Request, Result
from slurmddp.runs.retention import believe, trusted

_SHUT_OUT = frozenset({*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})
_LOOK_S = 0.01
_WORDS_BYTES = 1 << 16
_UNKILLABLE_S = 2.0
"""How long a killed writer is waited for; the kernel may hold one in I/O."""


@dataclass
class _Line:
    """Both ends of the line to a rank; the rank's own is open here until its successor gets one."""

    own: Channel
    ranks: Channel


@dataclass
class _Write:
    """One request, and the child at work on it; `words` is where that one leaves its words."""

    request: Request
    line: _Line
    pid: int = 0
    words: int = -1
    heard: bytes = b""
    is_answered: bool = False


class Keeper:
    """The memory and the writers of one node."""

    def __init__(self, perform: Perform = checkpoint_writer.perform) -> None:
        self._perform = perform
        self._lines: dict[int, _Line] = {}
        self._slots: dict[int, int] = {}
        self._waiting: deque[_Write] = deque()
        self._running: _Write | None = None

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
        writes = [*self._waiting, *([self._running] if self._running is not None else [])]
        asked = {write.request["slot"] for write in writes}
        for slot, descriptor in self._slots.items():
            if slot not in asked:
                memory.set_busy(descriptor, False)

    def descriptors(self) -> list[int]:
        """Return what becomes readable when `handle` has something to do."""
        words = [] if self._running is None or self._running.is_answered else [self._running.words]
        return [*(line.own.fileno() for line in self._lines.values()), *words]

    def memory_fds(self) -> list[int]:
        """Return the memory files of this node, for the ranks of the next generation to inherit."""
        return [self._slots[slot] for slot in sorted(self._slots)]

    def newest_step(self) -> int | None:
        """Return the step of the newest whole state that is in memory here."""
        return memory.newest_step(self.memory_fds())

    def busy(self) -> bool:
        """Tell whether a checkpoint is being written, or waits for that."""
        return self._running is not None or bool(self._waiting)

    def handle(self) -> None:
        """Take in what ranks have sent, and begin to write; never blocks."""
        for line in self._lines.values():
            self._read(line)
        if self._running is not None:
            self._listen(self._running)
        self._begin()

    def ended(self, pid: int, status: int) -> bool:
        """Take in the end of a child, with its status as `os.waitpid` gives it; False if it was no writer."""
        if self._running is None or self._running.pid != pid:
            return False
        done, self._running = self._running, None
        self._listen(done)
        os.close(done.words)
        if not done.is_answered:
            self._answer(done, self._killed(done, status))
        self._begin()
        return True

    def _listen(self, write: _Write) -> None:
        """Take in what a child has said so far: how its write went, and then what it knows to be good."""
        with suppress(BlockingIOError):
            while text := os.read(write.words, _WORDS_BYTES):
                *lines, write.heard = (write.heard + text).split(b"\n")
                for word in map(json.loads, lines):
                    if word["kind"] == "written":
                        self._answer(write, word)
                    else:
                        believe(word["trusted"])  # The next child knows it too, and does not hash them all.

    def _answer(self, write: _Write, result: Result) -> None:
        write.is_answered = True
        memory.set_busy(self._slots[write.request["slot"]], False)
        with suppress(OSError):  # The rank may be gone.
            write.line.own.send(result)

    def finish(self, timeout_s: float) -> bool:
        """Wait until all is written; after `timeout_s` give up, kill the writer, and return False."""
        deadline = time.monotonic() + timeout_s
        self.handle()
        while self._running is not None and time.monotonic() < deadline:
            self._look()
        if self._running is None:
            return True
        self._waiting.clear()
        os.kill(self._running.pid, signal.SIGKILL)
        while self._running is not None and time.monotonic() < deadline + _UNKILLABLE_S:
            self._look()
        return False

    def _look(self) -> None:
        """See whether the writer has ended, or wait a moment."""
        pid = self._running.pid if self._running is not None else 0
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            self.ended(found, status)
        else:
            time.sleep(_LOOK_S)
        self.handle()

    def close(self) -> None:
        """Let go of lines and memory; a writer that is still at work ends by itself."""
        for line in self._lines.values():
            line.own.close()
            line.ranks.close()
        for descriptor in self._slots.values():
            os.close(descriptor)
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

    def _keep(self, slot: int, descriptor: int) -> None:
        before = self._slots.pop(slot, None)
        if before is not None:
            os.close(before)
        self._slots[slot] = descriptor

    def _begin(self) -> None:
        while self._running is None and self._waiting:
            write = self._waiting.popleft()
            try:
                self._fork(write)
            except OSError as error:
                why = CheckpointError(f"No process could be started that writes the checkpoint: {error}.")
                memory.set_busy(self._slots[write.request["slot"]], False)
                with suppress(OSError):
                    write.line.own.send(checkpoint_writer.conclude(write.request, why))
            else:
                self._running = write

    def _fork(self, write: _Write) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        # No signal may reach the child while it still shares the agent's handlers and wake-up pipe.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHUT_OUT)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # See Ranks.fork.
                write.pid = os.fork()
            if write.pid == 0:
                _be_writer(self._perform, self._slots[write.request["slot"]], write.request, writer)
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.set_blocking(reader, False)
        write.words = reader

    def _killed(self, write: _Write, status: int) -> Result:
        how = (
            f"was killed by {signal_name(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else "left no word"
        )
        why = CheckpointError(
            f"The process that wrote the checkpoint of step {write.request['step']} {how}.",
            hint="If it was killed for want of memory, give the job more (mem_gb).",
        )
        return checkpoint_writer.conclude(write.request, why)


def _be_writer(perform: Perform, descriptor: int, request: Request, words: int) -> NoReturn:
    """Turn this copy of the agent into a writer and leave without the agent's clean-up."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        checkpoint_writer.stay()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHUT_OUT)
        perform(descriptor, request, partial(_say, words))
        _say(words, {"kind": "trusted", "trusted": trusted()})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _say(words: int, word: Mapping[str, Any]) -> None:
    """Leave a line for the agent."""
    with os.fdopen(words, "wb", closefd=False) as stream:
        stream.write(json.dumps(word).encode() + b"\n")
