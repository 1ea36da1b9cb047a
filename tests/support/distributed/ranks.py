"""Run a function as the ranks of one job, or scripts as programs, on this machine.

The processes are forked from a server that has imported torch, so that none of them pays for the import.
Functions must be importable (see `rank_jobs`).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from slurmddp.environments.detect import detect
from slurmddp.environments.emit import emulated_step, rank_environment
from slurmddp.host import interpreter
from slurmddp.host.ports import candidate_ports

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = [
    "torch",
    "torch._dynamo",
    "slurmddp.training.rank_main",
    "slurmddp.training.trainer",
    "support.distributed.rank_jobs",
]


def start_server() -> None:
    CONTEXT.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    first = CONTEXT.Process(target=int)  # Until then the server may be missing in lists of processes.
    first.start()
    first.join()


def stop_server() -> None:
    forkserver._forkserver._stop()


def free_port() -> int:
    """Return a free port that the kernel does not give to another process by itself."""
    for port in candidate_ports(f"test {os.getpid()}"):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

    raise LookupError("no free port")


def place_environments(world_size: int) -> list[dict[str, str]]:
    """Return the variables that `Distributon.launch` sets for each rank."""
    launch = uuid.uuid4().hex
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NODE_RANK": "0",
            "SLURMDDP_LAUNCHER": "local",
            "SLURMDDP_LAUNCH_ID": launch,
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(world_size)
    ]


def node_environments(nodes: int, each: int, folder: str | Path) -> list[dict[str, str]]:
    """Return the variables that the agents of emulated nodes set for each of their ranks."""
    steps = [emulated_step(nodes, node, "77", folder, 0) for node in range(nodes)]
    return [
        {**step, **rank_environment(detect(step), local_rank, each), "OMP_NUM_THREADS": "1"}
        for step in steps
        for local_rank in range(each)
    ]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    environments: Sequence[Mapping[str, str]] | None = None,
    timeout_s: float = 400,
) -> list[Any]:
    """Return the results of `function(*args)` on each rank; fail with the traceback of a rank that raised."""
    ranks = environments or place_environments(world_size)
    return _run([(function, args, dict(environ)) for environ in ranks], timeout_s)


def _run(
    work: Sequence[tuple[Callable[..., Any], tuple[Any, ...], dict[str, str]]], timeout_s: float
) -> list[Any]:
    """Return the results of functions, each called in a forked process with these arguments and variables."""
    processes = []
    ends = []
    for function, args, environ in work:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_be_rank, args=(theirs, function, environ, args))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)

    try:
        return _collect(ends, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
            process.close()


@dataclass(frozen=True)
class Program:
    """A script to start, like `env -i ENVIRON python SCRIPT ARGUMENTS` in `folder`."""

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path

    def run(self, output: Path) -> int:
        """Run the script in this process, with its handlers at exit; return the exit code."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        with output.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)

        sys.argv = list(self.command)
        sys.path.insert(0, str(Path(self.command[0]).parent))
        return as_program(lambda: runpy.run_path(self.command[0], run_name="__main__"))


def as_program(main: Callable[[], object]) -> int:
    """Run the `main` of a program in this forked process, from its start to its end; return the exit code."""
    import torch

    interpreter.draw_anew()
    # Set the number of threads as a fresh torch does, and drop the exit handlers of the server.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    atexit._clear()
    code = 0

    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        interpreter.note_uncaught(error)
        error.__traceback__ = own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1

    interpreter.finish(code)
    return code


def own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on, as a Python that runs nothing else shows it."""
    starters = (__file__, str(Path(__file__).with_name("forked_python.py")), "<frozen runpy>", runpy.__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename in starters:
        frames = frames.tb_next
    return frames


def run_programs(programs: Sequence[Program], timeout_s: float = 400) -> list[tuple[int, str]]:
    """Run scripts side by side; return exit code and output (both streams) of each."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(len(programs))]
        work = [(program.run, (output,), {}) for program, output in zip(programs, outputs, strict=True)]
        codes = _run(work, timeout_s)
        return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]


def host_store(end: Connection) -> None:
    """Host a store of torch until this process is killed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end.send(store.port)
    time.sleep(3600)


def _collect(ends: list[Connection], deadline: float) -> list[Any]:
    """Wait for all answers, or for the first failure, because other ranks may be stuck after a failure."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in answers]
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        assert ready, f"no answer in time from ranks {sorted(set(range(len(ends))) - set(answers))}"
        for end in ready:
            good, answers[ends.index(end)] = pickle.loads(end.recv_bytes())
            assert good, f"rank {ends.index(end)} failed:\n{answers[ends.index(end)]}"

    return [answers[rank] for rank in range(len(ends))]


def _be_rank(
    end: Connection, function: Callable[..., Any], environ: dict[str, str], args: tuple[Any, ...]
) -> None:
    import torch

    os.environ.update(environ)
    torch.set_num_threads(1)
    # Fork the loader workers, as in a rank of an agent; otherwise each rank would start a fork server.
    multiprocessing.set_start_method("fork", force=True)

    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())

    end.send_bytes(pickle.dumps(answer))
    end.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
