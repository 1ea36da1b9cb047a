"""Writes a checkpoint out of the memory in which a rank has left its state: hash, flush, publish, tell.

The agent forks a process for it. A rank that has no agent starts one of its own,

    python -m slurmddp.runs.checkpoint_writer DESCRIPTOR

which writes what it is asked to, one after the other, and ends when its rank is gone and all is written.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from slurmddp import errors
from slurmddp.errors import EXIT_USAGE, CheckpointError, SlurmddpError
from slurmddp.node import memory
from slurmddp.node.channel import Channel
from slurmddp.runs.checkpoints import TENSORS_FILE, TREE_FILE
from slurmddp.runs.durable import FileRecord, copy_hashed, write_hashed
from slurmddp.runs.folder import RunFolder
from slurmddp.runs.publish import publish

Request = Mapping[str, Any]
"""`slot` and `step` of the state; `root` and `keep_last` of the checkpoints; `since`, when it was asked, and
`stall_s`, how long training stood still; `background`, whether nobody waits; `run_dir` and `attempt`, where
events go, or null."""
Result = dict[str, Any]
Tell = Callable[[Result], object]
Perform = Callable[[int, Request, Tell], object]

LET_PASS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLITE = 5
"""How much less than the training a writer in the background claims of the processors."""


def stay() -> None:
    """Let this process outlast what ends its job in good order: a state that is sealed is to be written."""
    for number in LET_PASS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LET_PASS)  # Who starts a writer may have held them back.


def perform(descriptor: int, request: Request, tell: Tell) -> None:
    """Write the state in a memory file as a checkpoint, record that, and tell once what its rank should know.

    It is told as soon as the checkpoint stands; older ones are deleted after that.
    """
    if request["background"]:
        with suppress(OSError):
            os.nice(max(0, _POLITE - os.getpriority(os.PRIO_PROCESS, 0)))
    told: list[Result] = []

    def durable() -> None:
        told.append(conclude(request, None))
        tell(told[0])

    error: SlurmddpError | None = None
    try:
        _write(descriptor, request, durable)
    except SlurmddpError as caught:
        error = caught
    except Exception as caught:
        traceback.print_exc()
        error = CheckpointError(
            f"The checkpoint of step {request['step']} was not written: {type(caught).__name__}: {caught}."
        )
    if not told:
        tell(conclude(request, error))


def _write(descriptor: int, request: Request, durable: Callable[[], object]) -> None:
    state = memory.read_header(descriptor)
    if state is None or state.step != request["step"]:
        raise CheckpointError(f"The memory does not hold the state of step {request['step']}.")
    with memory.mapped(descriptor, state) as parts:
        publish(
            Path(request["root"]),
            state.step,
            partial(_fill, descriptor, state, parts),
            meta=parts.about["meta"],
            keep_last=request["keep_last"],
            needed=state.tensors_bytes + state.tree_bytes,
            made_by=parts.about["versions"],
            durable=durable,
        )


def _fill(descriptor: int, state: memory.Sealed, parts: memory.Parts, folder: Path) -> dict[str, FileRecord]:
    return {
        TENSORS_FILE: copy_hashed(folder / TENSORS_FILE, descriptor, state.tensors_at, parts.tensors),
        TREE_FILE: write_hashed(folder / TREE_FILE, [parts.tree]),
    }


def conclude(request: Request, error: SlurmddpError | None) -> Result:
    """Record how a write has ended and return the result."""
    written_s = round(time.monotonic() - request["since"], 3)
    result: Result = {"kind": "written", "step": request["step"], "written_s": written_s, "error": None}
    if error is None:
        # Where somebody waits, training stands still until all is written.
        still_s, beside_s = (0.0, written_s) if request["background"] else (written_s, 0.0)
        seconds = round(request["stall_s"] + still_s, 3)
        _record(request, "saved", {"step": request["step"], "seconds": seconds, "written_s": beside_s})
        return result
    print(f"slurmddp writer: {error}", file=sys.stderr, flush=True)
    if not isinstance(error, errors.SupersededError):
        _record(request, "warned", {"about": "checkpoint", "text": error.message})
    return result | {"error": [type(error).__name__, error.message, error.hint]}


def error_of(result: Result) -> SlurmddpError | None:
    """Return the error with which a write has ended, as its rank should raise it."""
    if result["error"] is None:
        return None
    name, message, hint = result["error"]
    kind = getattr(errors, name, CheckpointError)
    found: SlurmddpError = kind(message, hint=hint)
    return found


def _record(request: Request, event: str, facts: Mapping[str, Any]) -> None:
    if request["run_dir"] is None:
        return
    try:
        RunFolder(request["run_dir"]).add_event(event, attempt=request["attempt"], **facts)
    except OSError as error:  # The disk that is full for a checkpoint may be so for a line as well.
        print(f"slurmddp writer: the event {event} was not written: {error}", file=sys.stderr, flush=True)


def serve(channel: Channel, do: Perform = perform) -> None:
    """Write what comes over `channel`, until its rank is gone and nothing is left to write."""
    slots: dict[int, int] = {}
    while True:
        try:
            message, descriptors = channel.receive(None) or ({}, [])
        except EOFError:
            return
        if message["kind"] == "end":
            return
        if message["kind"] == "memory":
            slots[message["slot"]] = descriptors[0]
            continue
        do(slots[message["slot"]], message, partial(_answer, channel, slots[message["slot"]]))


def _answer(channel: Channel, descriptor: int, result: Result) -> None:
    memory.set_busy(descriptor, False)
    with suppress(OSError):  # The rank may be gone.
        channel.send(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the rank that holds the other end of the socket whose descriptor is given."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    channel = Channel.attach({"SLURMDDP_CHANNEL_FD": arguments[0]}) if len(arguments) == 1 else None
    if channel is None:
        print("usage: python -m slurmddp.runs.checkpoint_writer DESCRIPTOR", file=sys.stderr)
        return EXIT_USAGE
    stay()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
