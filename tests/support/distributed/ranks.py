"""Run a function as the ranks of one job, on this machine, and bring back what each returns.

The ranks are forked from a server that has imported torch; they find their places as the children of
`Distributon.launch` do. Functions must be importable (see `rank_jobs`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

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


def stop_server() -> None:
    forkserver._forkserver._stop()


def place_environments(world_size: int) -> list[dict[str, str]]:
    """Return what `Distributon.launch` would give to each of its ranks."""
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


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    environments: Sequence[Mapping[str, str]] | None = None,
    timeout_s: float = 400,
) -> list[Any]:
    """Return the results of `function(*args)` on each rank; fail with the traceback of a rank that raised."""
    processes, ends = [], []
    for environ in environments or place_environments(world_size):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_be_rank, args=(theirs, function, dict(environ), args))
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


def _collect(ends: list[Connection], deadline: float) -> list[Any]:
    """Wait for all answers; the first failure ends the wait, since other ranks may be stuck because of it."""
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
    # Loader workers are forked, as by a rank of an agent; else each rank would start a fork server.
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
