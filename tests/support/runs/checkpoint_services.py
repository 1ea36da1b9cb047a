"""A checkpoint service and its ranks: buffers sent over a channel, and write requests."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.checkpoint.memory.writer_process import Result
from slurmddp.environments.names import CHANNEL_VARIABLE

TENSORS = b"t" * 5000
TREE = b'{"format":2}'


def fill(descriptor: int, step: int, *, committed: bool = True, root: Path = Path("/x")) -> None:
    """Write a state into a memory file as a rank does."""
    about = {"meta": {"kind": "test"}, "versions": {"python": "3"}, "root": str(root)}
    text = json.dumps(about).encode()
    state = shared_buffer.StoredState(step, 0, shared_buffer.PAGE_BYTES, len(TENSORS), len(TREE), len(text))
    shared_buffer.invalidate(descriptor)
    with shared_buffer.reserve(descriptor, state.end) as area:
        area[state.tensors_at : state.end] = TENSORS + TREE + text
    if committed:
        shared_buffer.commit(descriptor, state)


def request(root: Path, slot: int, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "write", "slot": slot, "step": step, "root": str(root), "keep_last": 3, "keep_best": None,
        "background": False, "since": time.monotonic(), "stall_s": 0.25, "run_dir": None, "attempt": 0,
        **changes,
    }  # fmt: skip


def written(step: int, written_s: float = 0.0) -> Result:
    """Return the answer to a request whose checkpoint is durable."""
    return {"kind": "written", "step": step, "written_s": written_s, "error": None}


class Rank:
    """The rank's end of the channel, in this process."""

    channels: ClassVar[list[WriterChannel]] = []

    def __init__(self, service: CheckpointService, local_rank: int = 0) -> None:
        # Duplicate the descriptor: as in a forked rank, this end stays open when the agent closes its own
        # descriptor.
        channel = WriterChannel.attach({CHANNEL_VARIABLE: str(service.channel_for(local_rank))})
        assert channel is not None
        self.channel = channel
        self.channels.append(channel)

    def add_buffer(self, slot: int, step: int, *, committed: bool = True, root: Path = Path("/x")) -> int:
        descriptor = shared_buffer.create()
        fill(descriptor, step, committed=committed, root=root)
        self.channel.send({"kind": "memory", "slot": slot}, [descriptor])
        return descriptor

    def answer(self) -> Result:
        received = self.channel.receive(120)
        assert received is not None
        return received[0]


def wait_for(service: CheckpointService) -> None:
    """Run the service as in the agent's loop, until all requests are written."""
    deadline = time.monotonic() + 120
    service.handle()
    while service.is_writing() and time.monotonic() < deadline:
        select.select(service.descriptors(), [], [], 0.02)
        service.handle()

    assert not service.is_writing()


def write(service: CheckpointService, root: Path, step: int, **changes: Any) -> Rank:
    """Let a new rank fill buffer 0 and request its write; run the service until the write has ended."""
    rank = Rank(service)
    shared_buffer.set_writing(rank.add_buffer(0, step), True)
    rank.channel.send(request(root, 0, step, **changes))
    wait_for(service)
    return rank


class Forked:
    """A forked writer, which has the patched modules of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


def fork_writer(perform: writer_process.Perform) -> tuple[WriterChannel, Forked]:
    ours, theirs = WriterChannel.pair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            writer_process.serve(theirs, perform)
        finally:
            os._exit(0)

    theirs.close()
    return ours, Forked(pid)
