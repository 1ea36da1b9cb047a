"""Hold the staging buffers of a node's ranks and run the writer: the agent's checkpoint service.

A state that a rank has copied survives the rank's death, because the agent holds the buffer. Restarted ranks
inherit the buffers. Write requests of dead ranks stay valid. The writer is a separate process, so that the
agent never waits for the disk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmddp.checkpoint.files.manifest import newest_step
from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.checkpoint.memory.writer_process import Request, Result
from slurmddp.errors import CheckpointError
from slurmddp.runs.failures.capture import signal_name

_POLL_S = 0.01
_UNKILLABLE_S = 2.0
"""The longest wait for the end of a killed writer, in seconds: the kernel may delay the end during I/O."""
_KEEP_ALL = sys.maxsize
"""Value of `keep_last` for a flush, which deletes no checkpoint: only the ranks know the real value."""

Start = Callable[[], tuple[WriterChannel, subprocess.Popen[bytes]]]


@dataclass
class _RankChannel:
    """Both ends of the channel to a rank. The agent keeps the rank's end open until the rank is restarted."""

    agent_end: WriterChannel
    rank_end: WriterChannel

    def close(self) -> None:
        self.agent_end.close()
        self.rank_end.close()


@dataclass
class _Write:
    """A write request, and the channel of the rank that gets the result; None for a request of the agent.

    `is_answered`: the rank has got the result. `was_requeued`: a writer has ended before it got the request.
    """

    request: Request
    channel: _RankChannel | None
    is_answered: bool = False
    was_requeued: bool = False


@dataclass
class _Writer:
    """The writer process, and the channel to it.

    `is_gone`: the writer has closed its end of the channel, but is not reaped yet.
    """

    channel: WriterChannel
    process: subprocess.Popen[bytes]
    is_gone: bool = False


class CheckpointService:
    """The agent's part of checkpoints: it holds its ranks' staging buffers and has their states written.

    The writer process is started with the first write request.
    """

    def __init__(self, start: Start = writer_process.start) -> None:
        self._start = start
        self._channels: dict[int, _RankChannel] = {}
        self._slots: dict[int, int] = {}
        self._waiting: deque[_Write] = deque()
        self._running: _Write | None = None
        self._writer: _Writer | None = None
        self._unhealthy: dict[int, str] = {}

    def take_unhealthy(self) -> dict[int, str]:
        """Return the unhealthy nodes that ranks have reported since the last call: the reasons by node rank.

        A rank reports nodes before it exits. So after the exit of a rank its report is complete.
        """
        for channel in self._channels.values():
            self._read(channel)

        reports = self._unhealthy
        self._unhealthy = {}
        return reports

    def channel_for(self, local_rank: int) -> int:
        """Create a channel for a rank that is to be started, and return the descriptor that it inherits.

        Call it when all ranks of the previous start have ended. Their write requests stay valid.
        """
        # Read all channels first: ranks that have ended may have left requests in them.
        for channel in self._channels.values():
            self._read(channel)
        self._release_unrequested()

        previous = self._channels.pop(local_rank, None)
        if previous is not None:
            previous.close()
        self._channels[local_rank] = _RankChannel(*WriterChannel.pair())
        return self._channels[local_rank].rank_end.fileno()

    def _release_unrequested(self) -> None:
        """Clear the flag `writing` of buffers whose rank ended before it sent the write request."""
        for slot in self._slots.keys() - self._requested_slots():
            shared_buffer.set_writing(self._slots[slot], False)

    def _requested_slots(self) -> set[int]:
        """Return the numbers of the buffers whose states are being written, or wait to be written."""
        writes = list(self._waiting)
        if self._running is not None:
            writes.append(self._running)
        return {write.request["slot"] for write in writes}

    def descriptors(self) -> list[int]:
        """Return the file descriptors to poll: one of them becomes readable when `handle` must be called."""
        descriptors = [channel.agent_end.fileno() for channel in self._channels.values()]
        # Leave out a writer that has ended: its channel is readable for ever.
        if self._writer is not None and not self._writer.is_gone:
            descriptors.append(self._writer.channel.fileno())
        return descriptors

    def memory_fds(self) -> list[int]:
        """Return the descriptors of this node's buffers, which restarted ranks inherit."""
        return [self._slots[slot] for slot in sorted(self._slots)]

    def newest_step(self) -> int | None:
        """Return the step of the newest committed state in this node's buffers; None if there is none."""
        return shared_buffer.newest_step(self.memory_fds())

    def is_writing(self) -> bool:
        """Return whether a state is being written, or waits to be written."""
        return self._running is not None or bool(self._waiting)

    def handle(self) -> None:
        """Read the messages of ranks and writer, reap the writer if it has ended, and start the next write.

        The call does not block.
        """
        for channel in self._channels.values():
            self._read(channel)
        self._listen()
        self._reap()
        self._begin()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of the writer, which `handle` reaps; empty without a writer."""
        if self._writer is None:
            return ()
        return (self._writer.process.pid,)

    def _reap(self) -> None:
        """Reap the writer if it has exited. If it was interrupted in a write, send the rank an error."""
        if self._writer is None:
            return
        pid, status = os.waitpid(self._writer.process.pid, os.WNOHANG)
        if pid == 0:
            return

        # Read its last messages: it may have sent a result just before it ended.
        self._listen()
        self._writer.process.returncode = os.waitstatus_to_exitcode(status)
        self._writer.channel.close()
        self._writer = None

        interrupted = self._running
        self._running = None
        if interrupted is not None and not interrupted.is_answered:
            self._answer(interrupted, _killed(interrupted.request, status))

    def _listen(self) -> None:
        """Read the writer's messages: the result of a write, then "finished" when it is idle again."""
        if self._writer is None:
            return

        try:
            while (received := self._writer.channel.receive()) is not None:
                message = received[0]
                if message["kind"] == "finished":
                    self._running = None
                elif self._running is not None:
                    self._answer(self._running, message)
        except (EOFError, ConnectionError):
            self._writer.is_gone = True

    def _answer(self, write: _Write, result: Result) -> None:
        write.is_answered = True
        shared_buffer.set_writing(self._slots[write.request["slot"]], False)
        if write.channel is not None:
            # The rank may have ended; nobody needs the result then.
            with suppress(OSError):
                write.channel.agent_end.send(result)

    def flush_newest(
        self, run_dir: Path, attempt: int, claim: Callable[[int, bool], bool] = lambda step, is_part: True
    ) -> int | None:
        """Start to write the newest state in this node's buffers, if it is not on the disk yet.

        Call it on all nodes, when all ranks have ended. Each node writes its own part of a sharded state.

        Args:
            run_dir: the run folder, to which the event `saved` is added.
            attempt: the number of the attempt, for the event.
            claim: called with the step, and with whether this node has only a part of a sharded state. It
                returns whether this node is to write the state.

        Returns:
            The step of the state. None if nothing needs to be written or `claim` returned False.

        Raises:
            OSError: the checkpoints can't be listed.
        """
        self.handle()
        request = self._flush_request(run_dir, attempt)
        if request is None or not claim(request["step"], request["part"] is not None):
            return None

        shared_buffer.set_writing(self._slots[request["slot"]], True)
        self._waiting.append(_Write(request, None))
        self._begin()
        return int(request["step"])

    def _flush_request(self, run_dir: Path, attempt: int) -> Request | None:
        """Return a request to write the newest state.

        None if there is no state, if a checkpoint on the disk is as new, or if the write was requested
        already.
        """
        headers = {slot: shared_buffer.read_header(number) for slot, number in self._slots.items()}
        states = [(state.order, slot, state) for slot, state in headers.items() if state is not None]
        if not states:
            return None
        _, slot, newest = max(states)
        if slot in self._requested_slots():
            return None

        with shared_buffer.mapped(self._slots[slot], newest) as stored:
            root = stored.about["root"]
            part = stored.part
        step_on_disk = newest_step(Path(root))
        if step_on_disk is not None and step_on_disk >= newest.step:
            return None

        return {
            "kind": "write", "slot": slot, "step": newest.step, "root": root, "keep_last": _KEEP_ALL,
            "keep_best": None, "background": False, "since": time.monotonic(), "stall_s": 0.0,
            "copied": newest.stamp / 1e9, "run_dir": str(run_dir), "attempt": attempt, "stamp": newest.stamp,
            "part": part,
        }  # fmt: skip

    def expedite(self) -> None:
        """Set the flag `urgent` of all requested writes, so that the writer does not sleep between pieces."""
        self.handle()
        for slot in self._requested_slots():
            shared_buffer.set_urgent(self._slots[slot])

    def finish(self, timeout_s: float) -> bool:
        """Wait until all requested writes are done, and return True.

        After `timeout_s` seconds, drop the waiting requests, kill the writer, and return False.
        """
        deadline = time.monotonic() + timeout_s
        self.expedite()
        while self.is_writing() and time.monotonic() < deadline:
            self._poll()
        if not self.is_writing():
            return True

        # A killed writer leaves only a hidden folder, and the previous checkpoint stays the newest.
        self._waiting.clear()
        if self._writer is not None:
            os.kill(self._writer.process.pid, signal.SIGKILL)
        while self._running is not None and time.monotonic() < deadline + _UNKILLABLE_S:
            self._poll()
        return False

    def _poll(self) -> None:
        time.sleep(_POLL_S)
        self.handle()

    def close_in_child(self) -> None:
        """Close the writer's channel in a forked process.

        The writer ends only when all copies of the channel are closed.
        """
        if self._writer is not None:
            self._writer.channel.close()

    def close(self) -> None:
        """Close all channels and buffers.

        An idle writer is killed. A writer that is writing ends by itself after the write.
        """
        if self._writer is not None:
            self._writer.channel.close()
            if self._running is None:
                os.kill(self._writer.process.pid, signal.SIGKILL)
                os.waitpid(self._writer.process.pid, 0)
                # Set the exit code, or Popen would warn that the child is still running.
                self._writer.process.returncode = -signal.SIGKILL

        for channel in self._channels.values():
            channel.close()
        for descriptor in self._slots.values():
            os.close(descriptor)

        self._writer = None
        self._channels.clear()
        self._slots.clear()

    def _read(self, channel: _RankChannel) -> None:
        with suppress(EOFError):
            while (received := channel.agent_end.receive()) is not None:
                message, descriptors = received

                if message["kind"] == "memory":
                    self._add_buffer(message["slot"], descriptors[0])
                elif message["kind"] == "write":
                    self._waiting.append(_Write(message, channel))
                elif message["kind"] == "unhealthy":
                    self._unhealthy |= {int(node): why for node, why in message["nodes"].items()}

    def _add_buffer(self, slot: int, descriptor: int) -> None:
        previous = self._slots.pop(slot, None)
        if previous is not None:
            os.close(previous)
        self._slots[slot] = descriptor

        if self._writer is not None:
            # Ignore the error of a writer that has ended: the next writer gets all buffers when it starts.
            with suppress(ConnectionError):
                _register(self._writer.channel, slot, descriptor)

    def _begin(self) -> None:
        """Send the next request to the writer, if it is idle.

        If the writer has ended but is not reaped yet, the request waits for the next writer.
        """
        while self._running is None and self._waiting:
            if self._writer is not None and self._writer.is_gone:
                return

            write = self._waiting.popleft()
            try:
                self._hand_over(write)
            except ConnectionError:
                self._requeue(write)
            except OSError as error:
                self._fail(write, f"{error}.")
            else:
                self._running = write

    def _hand_over(self, write: _Write) -> None:
        if self._writer is None:
            self._writer = _Writer(*self._start())
            for slot, descriptor in self._slots.items():
                _register(self._writer.channel, slot, descriptor)

        self._writer.channel.send(write.request)

    def _requeue(self, write: _Write) -> None:
        """Queue a request again because the writer has ended; the second time, report an error instead."""
        if self._writer is not None:
            self._writer.is_gone = True

        if write.was_requeued:
            self._fail(write, "it ends as soon as it starts.")
        else:
            write.was_requeued = True
            self._waiting.appendleft(write)

    def _fail(self, write: _Write, why: str) -> None:
        error = CheckpointError(f"The process that writes checkpoints could not be started or reached: {why}")
        self._answer(write, writer_process.conclude(write.request, error))


def _register(channel: WriterChannel, slot: int, descriptor: int) -> None:
    channel.send({"kind": "memory", "slot": slot}, [descriptor])


def _killed(request: Request, status: int) -> Result:
    if os.WIFSIGNALED(status):
        how = f"was killed by {signal_name(os.WTERMSIG(status))}"
        hint = "If the node was short of memory, give the job more (mem_gb)."
    else:
        how = f"ended with exit code {os.waitstatus_to_exitcode(status)}"
        hint = "See the log of its node (node-N.log) for the reason."

    text = f"The process that wrote the checkpoint of step {request['step']} {how}."
    return writer_process.conclude(request, CheckpointError(text, hint=hint))
