"""The writer: a process that publishes the states of staging buffers as checkpoints, one after the other.

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
    """Start a writer; return its channel and its process, which outlives this one until all is written."""
    starter_end, writer_end = WriterChannel.pair()
    # Signals stay blocked until the writer ignores them.
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
    """Return the command of a writer that inherits `channel`.

    The working directory may hold modules with names of the standard library. With -c it is the empty entry
    of the path, which is removed before any import; PYTHONSAFEPATH needs Python 3.11. The folder of this
    package may hold such modules too, so it comes first for one import only.
    """
    folder = str(Path(slurmddp.__file__).parents[1])
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); import typing; "
        f"sys.path.insert(0, {folder!r}); import slurmddp; sys.path.append(sys.path.pop(0)); "
        "from slurmddp.checkpoint.memory import writer_process; sys.exit(writer_process.main())"
    )
    return [sys.executable, "-c", code, str(channel.fileno())]


def perform(buffer: shared_buffer.MappedFile, request: Request, answer: Answer) -> None:
    """Write the state in `buffer` as a checkpoint, record the result, and call `answer` once.

    The answer goes out as soon as the checkpoint is durable, before older checkpoints are deleted.
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
        raise CheckpointError(f"The memory does not hold the state of step {request['step']}.")

    root = Path(request["root"])
    with buffer.mapped(state) as stored:
        parts = Parts(root, folder_name(state.step), state.stamp, stored.ranks)
        copy = partial(_copy, buffer, state, stored, request)

        # Node 0 publishes; every other node leaves its shards where node 0 collects them.
        if stored.part:
            parts.write(stored.part, lambda folder: copy(folder, parts.files & stored.files.keys()))
            durable()
            return

        def fill(folder: Path) -> dict[str, FileRecord]:
            # One thread flushes the small file while the large file is written.
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
    """Copy files with tensors from a buffer into `folder`."""

    def is_urgent() -> bool:
        return not request["background"] or shared_buffer.is_urgent(buffer.descriptor)

    def copy(name: str) -> FileRecord:
        start, size = stored.files[name]
        part = stored.tensors[start : start + size]
        at = state.tensors_at + start
        return copy_hashed(folder / name, buffer.descriptor, at, part, is_urgent=is_urgent)

    return {name: copy(name) for name in names}


def conclude(request: Request, error: SlurmddpError | None) -> Result:
    """Add the event `saved` or `warned` to the run, and return the result of a write."""
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
    """Add the event `saved` to the run."""
    # The node with part 0 publishes the checkpoint and adds the event.
    if request.get("part"):
        return

    facts: dict[str, Any] = {"step": request["step"]}
    if request["background"]:
        facts["seconds"] = round(request["stall_s"], 3)
        facts["written_s"] = written_s
    else:
        # Training pauses until the write is done.
        facts["seconds"] = round(request["stall_s"] + written_s, 3)
        facts["written_s"] = 0.0
    if "copied" in request:
        facts["copied"] = request["copied"]
    _record(request, "saved", facts)


def fail_part(request: Request, error: SlurmddpError) -> None:
    """Let the publisher of a sharded state know that this node's part will not be written."""
    if request.get("part"):
        parts = Parts(Path(request["root"]), folder_name(request["step"]), request["stamp"], 0)
        parts.fail(request["part"], error)


def error_of(result: Result) -> SlurmddpError | None:
    """Return the error of a failed write, for the rank to raise; None if the write succeeded."""
    if result["error"] is None:
        return None

    name, message, hint = result["error"]
    kind = getattr(errors, name, CheckpointError)
    error: SlurmddpError = kind(message, hint=hint)
    return error


def _record(request: Request, event: str, facts: Mapping[str, Any]) -> None:
    """Add an event to the run, unless a later attempt has begun since the write did."""
    if request["run_dir"] is None:
        return

    folder = RunFolder(request["run_dir"])
    attempt = request["attempt"]
    try:
        if not folder.is_superseded(attempt):
            folder.add_event(event, attempt=attempt, **facts)
    except OSError as error:
        # The disk may be full.
        print(f"slurmddp writer: the event {event} was not written: {error}", file=sys.stderr, flush=True)


def serve(channel: WriterChannel, do: Perform = perform) -> None:
    """Carry out the requests that arrive on `channel`, one by one, until its other end is closed.

    Received: `{"kind": "memory", "slot": N}` with the descriptor of a buffer; a Request of the kind "write";
    `{"kind": "end"}`. Sent: a Result when a checkpoint is durable or has failed; `{"kind": "finished"}` when
    older checkpoints are deleted as well.
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
        # Niceness belongs to a thread, and most users can't lower it again. So each write gets a new thread.
        with ThreadPoolExecutor(1, initializer=_lower_priority if message["background"] else None) as thread:
            done = thread.submit(do, slot, message, partial(_answer, channel, slot.descriptor))
            _watch(done, channel, slot.descriptor)
        _send(channel, {"kind": "finished"})


def _watch(done: Future[object], channel: WriterChannel, descriptor: int) -> None:
    """Wait for a write; mark it urgent once the requester has ended, because the job may end soon."""
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
    # The requester may have ended.
    with suppress(OSError):
        channel.send(message)


def _ignore_signals() -> None:
    """Ignore the signals with which a job is stopped, so that committed states are still written."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # `start` has blocked them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def main() -> int:
    """Serve the channel whose descriptor is the last argument; return the exit code."""
    channel = WriterChannel.attach({CHANNEL_VARIABLE: sys.argv[-1]})
    if channel is None:
        print(f"slurmddp writer: descriptor {sys.argv[-1]!r} is not a checkpoint channel", file=sys.stderr)
        return EXIT_USAGE

    # The disk may be too full for the log.
    keep_output()
    _ignore_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(channel)
    return 0
