"""A Python whose processes are forked from a server that has imported torch, so that no process imports it.

The program `python` sends its arguments, variables, folder and descriptors to the server. It passes signals
on to the forked process, and ends as that does. The forked process is killed if `python` is.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType

from support.distributed.forked_agents import Descriptor
from support.distributed.ranks import CONTEXT, as_program

PRELOAD = [
    "slurmddp.cli.main",
    "slurmddp.cli.start_view",
    "slurmddp.config.composition.compose",
    "slurmddp.config.job",
    "slurmddp.launchers.submit.sbatch",
    "slurmddp.runs.folder.create",
    "slurmddp.runs.report.html",
    "slurmddp.slurm.script",
]
CLIENT = """
import json, os, signal, socket, sys
listed = "/proc/self/fd"
numbers = [int(number) for number in os.listdir(listed) if os.path.exists(f"{listed}/{number}")]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    socket.send_fds(server, [b"."], numbers)
    request = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd(), os.nice(0), numbers]).encode()
    server.sendall(len(request).to_bytes(8, "big") + request)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    code = os.waitstatus_to_exitcode(int(server.recv(16)))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_FREE = 500
"""The lowest number of descriptors that the programs of tests do not use."""


@contextmanager
def python_server() -> Iterator[str]:
    """Start the server as a child of the server of forked ranks; yield the path of the program `python`."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        python, client, address = (f"{folder}/{name}" for name in ("python", "client.py", "socket"))
        Path(client).write_text(CLIENT)
        Path(python).write_text(f'#!/bin/sh\nexec {sys.executable} -IS {client} {address} "$@"\n')
        Path(python).chmod(0o755)
        listener.bind(address)
        listener.listen(64)
        server = CONTEXT.Process(target=serve, args=(Descriptor(listener.fileno()), python))
        server.start()

        try:
            yield python
        finally:
            server.kill()
            server.join()


def serve(listening: Descriptor, python: str) -> None:
    for name in PRELOAD:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel collects the supervisors that have ended.
    with socket.socket(fileno=listening.number) as listener:
        while True:
            client = listener.accept()[0]
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(client, python)

            client.close()


def supervise(client: socket.socket, python: str) -> None:
    """Run a program in a new process, and send its wait status to the client."""
    received = socket.recv_fds(client, 1, 250)[1]
    request = read(client, int.from_bytes(read(client, 8), "big"))
    if (pid := os.fork()) == 0:
        arguments, environ, folder, niceness, numbers = json.loads(request)
        be_python(python, arguments, environ, folder, niceness, dict(zip(received, numbers, strict=True)))

    for descriptor in received:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, client.fileno()], [], [])[0]:
        passed = client.recv(1)
        os.kill(pid, passed[0] if passed else signal.SIGKILL)

    client.sendall(str(os.waitpid(pid, 0)[1]).encode())
    os._exit(0)


def read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += client.recv(size - len(data))
    return data


def be_python(
    python: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    niceness: int,
    numbers: Mapping[int, int],
) -> None:
    """Act as `python ARGUMENTS`; options of the interpreter have no effect.

    Args:
        python: the path of the program `python`.
        arguments: its arguments.
        environ: its variables.
        folder: its working directory.
        niceness: its scheduling priority.
        numbers: for each descriptor of this process, its number in the program.
    """
    held = {fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE): number for descriptor, number in numbers.items()}
    os.closerange(3, _FREE)
    for copy, number in held.items():
        os.dup2(copy, number)
        os.close(copy)

    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # It is no child of multiprocessing.
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    os.setsid()
    os.nice(niceness - os.nice(0))
    # A program may replace its streams, and still write to their descriptors.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(descriptor, "wb", 0, closefd=False), write_through=True)
        for descriptor in (1, 2)
    )
    if "PYTHONFAULTHANDLER" in environ:
        faulthandler.enable()
    sys.executable = python
    sys.orig_argv = [python, *arguments]
    multiprocessing.set_executable(python)
    sys.path[:0] = environ["PYTHONPATH"].split(":") if "PYTHONPATH" in environ else []
    # Import sitecustomize, as Python's `site` does before the first line of a program.
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        import_module("sitecustomize")
    while arguments[0] not in ("-c", "-m") and arguments[0].startswith("-"):
        arguments = arguments[1:]
    os._exit(as_program(lambda: run(arguments)))


def run(arguments: Sequence[str]) -> None:
    first, *others = arguments
    sys.argv = [first, *others]
    if first == "-m":
        sys.argv = others
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(others[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
