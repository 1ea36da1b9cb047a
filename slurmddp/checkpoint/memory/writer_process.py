"""Writes a checkpoint out of the memory in which a rank has left its state: hash, flush, publish, tell.

A process of its own does it, one state after the other, without torch and outside the training's lock. The
agent starts one for its ranks; a rank that has no agent starts its own. It ends when whoever started it is
gone and all is written.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import slurmddp
from slurmddp import errors
from slurmddp.checkpoint.files.durable import FileRecord, copy_hashed, write_hashed
from slurmddp.checkpoint.files.manifest import TENSORS_FILE, TREE_FILE
from slurmddp.checkpoint.files.publish import publish
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.environments.names import CHANNEL_VARIABLE
from slurmddp.errors import EXIT_USAGE, CheckpointError, SlurmddpError
from slurmddp.host.streams import keep_output
from slurmddp.runs.folder.layout import RunFolder

Request = Mapping[str, Any]
"""`slot` and `step` of the state; `root` and `keep_last` of the checkpoints; `since`, when it was asked, and
`stall_s`, how long training stood still; `background`, whether nobody waits; `run_dir` and `attempt`, where
events go, or null; `copied`, at what time the state was, where training has gone on after that."""
Result = dict[str, Any]
Tell = Callable[[Result], object]
Perform = Callable[[shared_buffer.Held, Request, Tell], object]

_LET_PASS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 0.5
_POLITE = 5
"""How much less than the training a writer in the background claims of the processors."""


def start() -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start a writer; return the line to it and its process, which outlives this one until all is written."""
    own, theirs = Channel.pair()
    # Until it lets the job's signals pass by itself, they wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LET_PASS)
    try:
        writer = subprocess.Popen(
            command(theirs),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        own.close()
        raise
    finally:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return own, writer


def command(line: Channel) -> list[str]:
    """Return the command of a writer that is handed `line`.

    The folder that a person works in may hold a module of any name. With -c it is the empty entry of the
    path, and can go before anything is imported; PYTHONSAFEPATH is heard by Python 3.11 and later only. This
    package's own folder may hold modules with names of the standard library's: it is first for one import.
    """
    folder = str(Path(slurmddp.__file__).parents[1])
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); import typing; "
        f"sys.path.insert(0, {folder!r}); import slurmddp; sys.path.append(sys.path.pop(0)); "
        "from slurmddp.checkpoint.memory import writer_process; sys.exit(writer_process.main())"
    )
    return [sys.executable, "-c", code, str(line.fileno())]


def perform(held: shared_buffer.Held, request: Request, tell: Tell) -> None:
    """Write the state in a memory file as a checkpoint, record that, and tell once what its rank should know.

    It is told as soon as the checkpoint stands; older ones are deleted after that.
    """
    told: list[Result] = []

    def durable() -> None:
        told.append(conclude(request, None))
        tell(told[0])

    error: SlurmddpError | None = None
    try:
        _write(held, request, durable)
    except SlurmddpError as caught:
        error = caught
    except Exception as caught:
        traceback.print_exc()
        error = CheckpointError(
            f"The checkpoint of step {request['step']} was not written: {type(caught).__name__}: {caught}."
        )
    if not told:
        tell(conclude(request, error))


def _write(held: shared_buffer.Held, request: Request, durable: Callable[[], object]) -> None:
    state = shared_buffer.read_header(held.descriptor)
    if state is None or state.step != request["step"]:
        raise CheckpointError(f"The memory does not hold the state of step {request['step']}.")

    def hurry() -> bool:
        return not request["background"] or shared_buffer.is_awaited(held.descriptor)

    with held.mapped(state) as parts:
        publish(
            Path(request["root"]),
            state.step,
            partial(_fill, held.descriptor, state, parts, hurry),
            meta=parts.about["meta"],
            keep_last=request["keep_last"],
            needed=state.tensors_bytes + state.tree_bytes,
            made_by=parts.about["versions"],
            durable=durable,
        )


def _fill(
    descriptor: int,
    state: shared_buffer.Sealed,
    parts: shared_buffer.Parts,
    hurry: Callable[[], bool],
    folder: Path,
) -> dict[str, FileRecord]:
    with ThreadPoolExecutor(1) as beside:  # The small file is flushed while the large one is on its way.
        tree = beside.submit(write_hashed, folder / TREE_FILE, [parts.tree])
        tensors = copy_hashed(folder / TENSORS_FILE, descriptor, state.tensors_at, parts.tensors, hurry=hurry)
        return {TENSORS_FILE: tensors, TREE_FILE: tree.result()}


def conclude(request: Request, error: SlurmddpError | None) -> Result:
    """Record how a write has ended and return the result."""
    written_s = round(time.monotonic() - request["since"], 3)
    result: Result = {"kind": "written", "step": request["step"], "written_s": written_s, "error": None}
    if error is None:
        # Where somebody waits, training stands still until all is written.
        still_s, beside_s = (0.0, written_s) if request["background"] else (written_s, 0.0)
        seconds = round(request["stall_s"] + still_s, 3)
        facts = {"step": request["step"], "seconds": seconds, "written_s": beside_s}
        _record(request, "saved", facts | {name: request[name] for name in ("copied",) if name in request})
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
    """Write what is asked for over `channel`, one by one, until nobody is left to ask.

    `{"kind": "memory", "slot": ...}` comes with a memory file, a Request with "kind" "write"; what goes back
    is the result, and `{"kind": "finished"}` when older checkpoints are deleted as well.
    """
    slots: dict[int, shared_buffer.Held] = {}
    while True:
        try:
            message, descriptors = channel.receive(None) or ({}, [])
        except EOFError:
            return
        if message["kind"] == "end":
            return
        if message["kind"] == "memory":
            if (before := slots.pop(message["slot"], None)) is not None:
                before.close()
            slots[message["slot"]] = shared_buffer.Held(descriptors[0])
            continue
        slot = slots[message["slot"]]
        # Niceness belongs to a thread, and most users can't take it back: the next one may be waited for.
        with ThreadPoolExecutor(1, initializer=_yield if message["background"] else None) as thread:
            done = thread.submit(do, slot, message, partial(_answer, channel, slot.descriptor))
            _watch(done, channel, slot.descriptor)
        _send(channel, {"kind": "finished"})


def _watch(done: Future[object], channel: Channel, descriptor: int) -> None:
    """Wait for a write; once whoever asked is gone no training is left to spare, and the job may end soon."""
    while not wait([done], _LOOK_S).done:
        if channel.is_closed_there():
            shared_buffer.set_awaited(descriptor)
            break
    done.result()


def _yield() -> None:
    with suppress(OSError):
        os.nice(max(0, _POLITE - os.getpriority(os.PRIO_PROCESS, 0)))


def _answer(channel: Channel, descriptor: int, result: Result) -> None:
    shared_buffer.set_busy(descriptor, False)
    _send(channel, result)


def _send(channel: Channel, message: Mapping[str, Any]) -> None:
    with suppress(OSError):  # Who asked may be gone.
        channel.send(message)


def _stay() -> None:
    """Let this process outlast what ends its job in good order: a state that is sealed is to be written."""
    for number in _LET_PASS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LET_PASS)  # Who starts a writer may have held them back.


def main() -> int:
    """Serve the process that holds the other end of the line whose descriptor is given as an argument."""
    channel = Channel.attach({CHANNEL_VARIABLE: sys.argv[-1]})
    if channel is None:
        print(f"slurmddp writer: {sys.argv[-1]!r} is no line to who has states to write", file=sys.stderr)
        return EXIT_USAGE
    keep_output()  # The disk that is full for a checkpoint may be so for the log as well.
    _stay()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(channel)
    return 0
