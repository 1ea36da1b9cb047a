"""The processes that are workers: forked ones on this machine, tasks of srun, or the ranks of a job.

    python -m slurmddp.remote.job --connect ADDRESS PORT WORLD_SIZE   # by `remote.workers()`
    python -m slurmddp.remote.job script.py --lr 0.1                  # each rank of `slurmddp controller`

In a job rank 0 starts the controller's script beside it, on the first node. It opens the listener to which
the workers connect, on the address that leads to the job's nodes. The script inherits the listener
(`SLURMDDP_CONTROLLER`). Rank 0 ends with the script's exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from slurmddp.collectives import values as collectives
from slurmddp.environments.detect import detect
from slurmddp.environments.emit import rank_environment
from slurmddp.environments.names import CONTROLLER_VARIABLE, LAUNCHER_VARIABLE, SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.scrub import scrub
from slurmddp.errors import EXIT_FINISHED, ConfigError
from slurmddp.host import interpreter, process
from slurmddp.host.ports import listen_as_rank_zero
from slurmddp.remote import channel
from slurmddp.remote.worker import Worker
from slurmddp.training.process_group.setup import RankContext, finish, start


def main(words: Sequence[str]) -> int:
    """Serve the controller at an address, or one that runs the script or `-m MODULE` of `words`.

    Returns:
        The exit code of the script on rank 0 of a job, else 0.
    """
    if not os.environ.get(SECRET_VARIABLE):
        raise ConfigError(
            f"{SECRET_VARIABLE} is not set, so anybody could control these workers.",
            hint="Start the script by `slurmddp controller`, which draws a secret.",
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller.
    if words[0] == "--connect":
        _, address, port, world_size = words
        if os.environ.get(LAUNCHER_VARIABLE) == "local":
            _fork(int(world_size))
        serve((address, int(port)), _context())
        return EXIT_FINISHED
    folder = Path.cwd() if words[0] == "-m" else Path(words[0]).resolve().parent
    sys.path.insert(0, str(folder))  # Calls name modules beside the script.
    context = _context()
    is_first = context.info.rank == 0
    wait, listening = _start(words, context.info) if is_first else (lambda: EXIT_FINISHED, ("", 0))
    serve(collectives.from_zero(listening), context, wait)
    return wait()


def _fork(world_size: int) -> None:
    """Become one of `world_size` processes, which share the cost of the import of torch."""
    rank = next((rank for rank in range(1, world_size) if os.fork() == 0), 0)
    interpreter.draw_anew()
    os.environ.update(rank_environment(RankInfo(environment="local"), rank, world_size))


def _context() -> RankContext:
    """Make this process a rank of the workers' process group."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return start(detect(os.environ), backend=backend)


def serve(address: tuple[str, int], context: RankContext, lost: Callable[[], int] = lambda: 0) -> None:
    """Serve the controller at `address` until it says goodbye.

    If the controller dies, this process exits with the code that `lost` returns. If the controller's script
    has ended and never asked for this worker, the function returns.
    """
    facts = context.info.rank, socket.gethostname(), os.getpid(), str(context.device)
    try:
        end = socket.create_connection(address)
        controller, _ = channel.meet(end, os.environ.get(SECRET_VARIABLE, ""), "worker", *facts)
    except ConnectionError:  # The script has closed its listener.
        return
    Worker(controller, lost).serve()
    finish(context)
    controller.close()


def _start(words: Sequence[str], info: RankInfo) -> tuple[Callable[[], int], tuple[str, int]]:
    """Start the script; return a function that waits for its exit code, and the address where it listens."""
    with listen_as_rank_zero(info, [0]) as listener:
        environment = {
            **scrub(os.environ),
            CONTROLLER_VARIABLE: f"{listener.fileno()}:{info.world_size}",
            SECRET_VARIABLE: os.environ[SECRET_VARIABLE],
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, *words]
        script = process.start_bound(command, signal.SIGTERM, env=environment, pass_fds=[listener.fileno()])
        signal.signal(signal.SIGINT, lambda number, _: script.send_signal(number))
        return script.wait, listener.getsockname()[:2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
