"""A keeper of states as its ranks see it: memory laid into its hands, and requests over a line."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.checkpoint.memory.service import Keeper
from slurmddp.checkpoint.memory.writer_process import Result
from slurmddp.environments.names import CHANNEL_VARIABLE

TENSORS, TREE = b"t" * 5000, b'{"format":2}'


def fill(descriptor: int, step: int, *, sealed: bool = True, root: Path = Path("/x")) -> None:
    """Lay a state into a memory file as a rank does."""
    about = {"meta": {"kind": "test"}, "versions": {"python": "3"}, "root": str(root)}
    told = json.dumps(about).encode()
    state = shared_buffer.Sealed(step, 0, shared_buffer.PAGE_BYTES, len(TENSORS), len(TREE), len(told))
    shared_buffer.unseal(descriptor)
    with shared_buffer.reserve(descriptor, state.end) as area:
        area[state.tensors_at : state.end] = TENSORS + TREE + told
    if sealed:
        shared_buffer.seal(descriptor, state)


def request(root: Path, slot: int, step: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "write", "slot": slot, "step": step, "root": str(root), "keep_last": 3, "background": False,
        "since": time.monotonic(), "stall_s": 0.25, "run_dir": None, "attempt": 0, **changes,
    }  # fmt: skip


class Rank:
    """The rank's end of the line, in this process."""

    lines: ClassVar[list[Channel]] = []

    def __init__(self, keeper: Keeper, local_rank: int = 0) -> None:
        # What a forked rank has is a copy, which outlives the agent's.
        number = os.dup(keeper.channel_for(local_rank))
        line = Channel.attach({CHANNEL_VARIABLE: str(number)})
        assert line is not None
        self.line = line
        self.lines.append(line)

    def lay(self, slot: int, step: int, *, sealed: bool = True, root: Path = Path("/x")) -> int:
        descriptor = shared_buffer.create()
        fill(descriptor, step, sealed=sealed, root=root)
        self.line.send({"kind": "memory", "slot": slot}, [descriptor])
        return descriptor

    def answer(self) -> Result:
        received = self.line.receive(30)
        assert received is not None
        return received[0]


def wait_for(keeper: Keeper) -> None:
    """Do what the agent's loop does, until nothing is left to write."""
    deadline = time.monotonic() + 60
    keeper.handle()
    while keeper.busy() and time.monotonic() < deadline:
        select.select(keeper.descriptors(), [], [], 0.02)
        keeper.handle()
    assert not keeper.busy()


class Forked:
    """A writer that has this process's modules, with whatever a test has replaced in them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


def fork_writer(perform: writer_process.Perform) -> tuple[Channel, Forked]:
    own, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        try:
            own.close()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            writer_process.serve(theirs, perform)
        finally:
            os._exit(0)
    theirs.close()
    return own, Forked(pid)
