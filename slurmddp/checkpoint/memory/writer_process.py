"""Run the writer, a process that publishes the states of staging buffers as checkpoints, one by one.

It runs without torch and outside of the training's interpreter lock. The agent starts one writer for its
ranks; a rank without an agent starts a writer itself. The writer ends when the process that started it has
ended and all requests are written.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import slurmddp
from slurmddp import errors
from slurmddp.checkpoint.files.digest import FileRecord
from slurmddp.checkpoint.files.durable import copy_hashed, write_hashed
from slurmddp.checkpoint.files.manifest import TREE_FILE, folder_name
from slurmddp.checkpoint.files.parts import Parts
from slurmddp.checkpoint.files.publish import publish
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.environments.names import CHANNEL_VARIABLE
from slurmddp.errors import EXIT_USAGE, CheckpointError, SlurmddpError
from slurmddp.host.streams import keep_output
from slurmddp.runs.folder.layout import RunFolder

Request = Mapping[str, Any]
"""A write request.

`slot`, `step`: number of the buffer, and step of its state. `root`, `keep_last`, `keep_best`: as in
`publish`.
`since`: time of the request on the monotonic clock. `stall_s`: seconds for which training paused.
`background`: whether training continues during the write. `run_dir`, `attempt`: the run that gets the events,
or null. `copied`: the time of the copy in seconds since the epoch, only in requests of the agent.
`stamp`, `part`: of the state, see `StoredState` and `StateBytes`; only in requests for sharded states.
"""
Result = dict[str, Any]
Answer = Callable[[Result], object]
Perform = Callable[[shared_buffer.MappedFile, Request, Answer], object]

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.5
_NICENESS = 5
"""Niceness of a write in the background, so that the training gets the processors first."""


def start() -> tuple[WriterChannel, subprocess.Popen[bytes]]:
    """Start a writer process, and return this process's end of the channel, and the writer.

    If this process ends, the writer continues until all requests are written.
    """
    starter_end, writer_end = WriterChannel.pair()
    # The signals stay blocked in the writer until it ignores them, so that none of them ends it before.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        writer = subprocess.Popen(
            command(writer_end),
            pass_fds=[writer_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        starter_end.close()
        raise
    finally:
        writer_end.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return starter_end, writer


def command(channel: WriterChannel) -> list[str]:
    """Return the command line that starts a writer with the inherited end `channel`.

    The working directory may contain modules with names of the standard library, which must not be imported.
    With -c it is the empty entry of sys.path, which is removed before any import (PYTHONSAFEPATH needs Python
    3.11). The folder of this package may contain such modules too. So it is first in sys.path only while
    slurmddp is imported, and last afterwards.
    """
    folder = str(Path(slurmddp.__file__).parents[1])
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); import typing; "
        f"sys.path.insert(0, {folder!r}); import slurmddp; sys.path.append(sys.path.pop(0)); "
        "from slurmddp.checkpoint.memory import writer_process; sys.exit(writer_process.main())"
    )
    return [sys.executable, "-c", code, str(channel.fileno())]


def perform(buffer: shared_buffer.MappedFile, request: Request, answer: Answer) -> None:
    """Write the state in `buffer` as a checkpoint, add an event to the run, and pass the result to `answer`.

    `answer` is called once: when the checkpoint is durable (before older checkpoints are deleted), or when
    the write has failed.
    """
    answered = False

    def durable() -> None:
        nonlocal answered
        answered = True
        answer(conclude(request, None))

    error: SlurmddpError | None = None

    try:
        _write(buffer, request, durable)
    except SlurmddpError as caught:
        error = caught
    except Exception as caught:
        traceback.print_exc()
        error = CheckpointError(
            f"The checkpoint of step {request['step']} was not written: {type(caught).__name__}: {caught}."
        )

    if not answered:
        answer(conclude(request, error))


def _write(buffer: shared_buffer.MappedFile, request: Request, durable: Callable[[], object]) -> None:
    state = shared_buffer.read_header(buffer.descriptor)
    if state is None or state.step != request["step"]:
        raise CheckpointError(f"The memory does not contain the state of step {request['step']}.")

    root = Path(request["root"])
    with buffer.mapped(state) as stored:
        parts = Parts(root, folder_name(state.step), state.stamp, stored.ranks)
        copy = partial(_copy, buffer, state, stored, request)

        # A part above 0 is another node's: write its shards where the node with part 0 collects them.
        if stored.part:
            parts.write(stored.part, lambda folder: copy(folder, parts.files & stored.files.keys()))
            durable()
            return

        def fill(folder: Path) -> dict[str, FileRecord]:
            # Write the small tree file in a thread, so that its flush overlaps with the write of the tensors.
            with ThreadPoolExecutor(1) as thread:
                tree = thread.submit(write_hashed, folder / TREE_FILE, [stored.tree])
                records = {**copy(folder, stored.files), TREE_FILE: tree.result()}
            return records | parts.collect(parts.files - records.keys(), folder)

        publish(
            root,
            state.step,
            fill,
            meta=stored.about["meta"],
            keep_last=request["keep_last"],
            keep_best=request["keep_best"],
            needed=state.tensors_bytes + state.tree_bytes,
            made_by=stored.about["versions"],
            durable=durable,
        )
        parts.sweep()


def _copy(
    buffer: shared_buffer.MappedFile,
    state: shared_buffer.StoredState,
    stored: shared_buffer.StateBytes,
    request: Request,
    folder: Path,
    names: Iterable[str],
) -> dict[str, FileRecord]:
    """Copy the files `names` from a buffer into `folder`, and return their records by name."""

    def is_urgent() -> bool:
        return not request["background"] or shared_buffer.is_urgent(buffer.descriptor)

    def copy(name: str) -> FileRecord:
        start, size = stored.files[name]
        part = stored.tensors[start : start + size]
        at = state.tensors_at + start
        return copy_hashed(folder / name, buffer.descriptor, at, part, is_urgent=is_urgent)

    return {name: copy(name) for name in names}


def conclude(request: Request, error: SlurmddpError | None) -> Result:
    """Record the end of a write: add the event `saved` or `warned` to the run, and return the result.

    Args:
        request: the write request.
        error: why the write failed; None if it succeeded. An error is also printed, and reported to the node
            that publishes the checkpoint.
    """
    written_s = round(time.monotonic() - request["since"], 3)
    result: Result = {"kind": "written", "step": request["step"], "written_s": written_s, "error": None}
    if error is None:
        _record_save(request, written_s)
        return result

    fail_part(request, error)
    print(f"slurmddp writer: {error}", file=sys.stderr, flush=True)
    if not isinstance(error, errors.SupersededError):
        _record(request, "warned", {"about": "checkpoint", "text": error.message})
    return result | {"error": [type(error).__name__, error.message, error.hint]}


def _record_save(request: Request, written_s: float) -> None:
    """Add the event `saved` to the run, unless another node publishes the checkpoint.

    Args:
        request: the write request.
        written_s: seconds from the request until the checkpoint was durable.
    """
    # The node with part 0 publishes the checkpoint, and adds the event.
    if request.get("part"):
        return

    facts: dict[str, Any] = {"step": request["step"]}
    if request["background"]:
        facts["seconds"] = round(request["stall_s"], 3)
        facts["written_s"] = written_s
    else:
        # Training paused during the write too.
        facts["seconds"] = round(request["stall_s"] + written_s, 3)
        facts["written_s"] = 0.0
    if "copied" in request:
        facts["copied"] = request["copied"]
    _record(request, "saved", facts)


def fail_part(request: Request, error: SlurmddpError) -> None:
    """Report to the node that publishes a sharded state that this node's part will not be written.

    Nothing is reported if this node is the publisher or the state is not sharded.
    """
    if request.get("part"):
        parts = Parts(Path(request["root"]), folder_name(request["step"]), request["stamp"], 0)
        parts.fail(request["part"], error)


def error_of(result: Result) -> SlurmddpError | None:
    """Return the error in the result of a write, for the rank to raise; None if the write succeeded."""
    if result["error"] is None:
        return None

    name, message, hint = result["error"]
    kind = getattr(errors, name, CheckpointError)
    error: SlurmddpError = kind(message, hint=hint)
    return error


def _record(request: Request, event: str, facts: Mapping[str, Any]) -> None:
    """Add an event to the run, unless a later attempt has started since the write was requested."""
    if request["run_dir"] is None:
        return

    folder = RunFolder(request["run_dir"])
    attempt = request["attempt"]
    try:
        if not folder.is_superseded(attempt):
            folder.add_event(event, attempt=attempt, **facts)
    except OSError as error:
        # The disk may be full. Print the error, and continue without the event.
        print(f"slurmddp writer: the event {event} was not written: {error}", file=sys.stderr, flush=True)


def serve(channel: WriterChannel, do: Perform = perform) -> None:
    """Carry out the requests that arrive on `channel`, one by one, until its other end is closed.

    Messages received: `{"kind": "memory", "slot": N}` with the descriptor of buffer N; a Request, which has
    the kind "write"; `{"kind": "end"}` to end. Messages sent for each Request: a Result when the checkpoint
    is durable or has failed, and `{"kind": "finished"}` when older checkpoints are deleted too.

    Args:
        channel: this process's end of the channel.
        do: writes a checkpoint and calls the given answer function, as `perform` does.
    """
    slots: dict[int, shared_buffer.MappedFile] = {}
    while True:
        try:
            message, descriptors = channel.receive(None) or ({}, [])
        except EOFError:
            return
        if message["kind"] == "end":
            return
        if message["kind"] == "memory":
            previous = slots.pop(message["slot"], None)
            if previous is not None:
                previous.close()
            slots[message["slot"]] = shared_buffer.MappedFile(descriptors[0])
            continue

        slot = slots[message["slot"]]
        # Each write gets a new thread: niceness belongs to a thread, and most users can't lower it again.
        with ThreadPoolExecutor(1, initializer=_lower_priority if message["background"] else None) as thread:
            done = thread.submit(do, slot, message, partial(_answer, channel, slot.descriptor))
            _watch(done, channel, slot.descriptor)
        _send(channel, {"kind": "finished"})


def _watch(done: Future[object], channel: WriterChannel, descriptor: int) -> None:
    """Wait until a write is done; make it urgent if the requester ends, because the job may end soon."""
    while not wait([done], _POLL_S).done:
        if channel.is_closed_by_peer():
            shared_buffer.set_urgent(descriptor)
            break
    done.result()


def _lower_priority() -> None:
    with suppress(OSError):
        os.nice(max(0, _NICENESS - os.getpriority(os.PRIO_PROCESS, 0)))


def _answer(channel: WriterChannel, descriptor: int, result: Result) -> None:
    shared_buffer.set_writing(descriptor, False)
    _send(channel, result)


def _send(channel: WriterChannel, message: Mapping[str, Any]) -> None:
    # The requester may have ended. Nobody needs the message then.
    with suppress(OSError):
        channel.send(message)


def _ignore_signals() -> None:
    """Ignore the signals that stop a job, so that the writer still writes the states that were committed."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # `start` has blocked the signals for this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def main() -> int:
    """Serve the channel whose descriptor is the last command-line argument; return the exit code."""
    channel = WriterChannel.attach({CHANNEL_VARIABLE: sys.argv[-1]})
    if channel is None:
        print(f"slurmddp writer: descriptor {sys.argv[-1]!r} is not a checkpoint channel", file=sys.stderr)
        return EXIT_USAGE

    # Output may go to a file on a full disk. Its errors must not end the writer.
    keep_output()
    _ignore_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(channel)
    return 0
