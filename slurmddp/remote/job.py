"""Run the processes of workers: forked processes on this machine, tasks of srun, or the ranks of a job.

    python -m slurmddp.remote.job --connect ADDRESS PORT WORLD_SIZE   # by `remote.workers()`
    python -m slurmddp.remote.job script.py --lr 0.1                  # each rank of `slurmddp controller`

In a job, rank 0 starts the controller's script on its node, the first node. It opens the listener to which
the workers connect, on the address by which the job's nodes reach it. The script inherits the listener
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


def main(arguments: Sequence[str]) -> int:
    """Run a worker of a controller; on rank 0 of a job, also run the controller's script.

    Args:
        arguments: `--connect ADDRESS PORT WORLD_SIZE` for the workers that a script starts. Under `slurmddp
            controller`: the script or `-m MODULE`, and its arguments.

    Returns:
        The exit code of the script on rank 0 of a job, and 0 elsewhere.
    """
    if not os.environ.get(SECRET_VARIABLE):
        raise ConfigError(
            f"{SECRET_VARIABLE} is not set, so anybody could control these workers.",
            hint="Start the script by `slurmddp controller`, which sets it.",
        )

    # Ignore Ctrl-C: it is meant for the controller, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments[0] == "--connect":
        _, host, port, world_size = arguments
        if os.environ.get(LAUNCHER_VARIABLE) == "local":
            _fork(int(world_size))
        serve((host, int(port)), _context())
        return EXIT_FINISHED

    # Add the script's folder to the import path, because remote.call may name modules in it.
    folder = Path.cwd() if arguments[0] == "-m" else Path(arguments[0]).resolve().parent
    sys.path.insert(0, str(folder))
    context = _context()
    if context.info.rank == 0:
        wait, address = _start(arguments, context.info)
        serve(collectives.from_zero(address), context, wait)
        return wait()

    serve(collectives.from_zero(("", 0)), context)
    return EXIT_FINISHED


def _fork(world_size: int) -> None:
    """Fork this process into `world_size` ranks, so that torch is imported only once."""
    rank = 0
    for child_rank in range(1, world_size):
        if os.fork() == 0:
            rank = child_rank
            break

    # Seed the random numbers anew, because forked processes would draw the same ones.
    interpreter.draw_anew()
    os.environ.update(rank_environment(RankInfo(environment="local"), rank, world_size))


def _context() -> RankContext:
    """Join the process group of the workers, and return this rank's context."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return start(detect(os.environ), backend=backend)


def serve(address: tuple[str, int], context: RankContext, lost: Callable[[], int] = lambda: 0) -> None:
    """Connect to the controller, and run its commands until it ends the connection.

    Args:
        address: host and port of the controller.
        context: this rank.
        lost: called if the controller dies. This process then exits with the code that it returns.
    """
    facts = context.info.rank, socket.gethostname(), os.getpid(), str(context.device)
    try:
        end = socket.create_connection(address)
        controller, _ = channel.meet(end, os.environ.get(SECRET_VARIABLE, ""), "worker", *facts)
    except ConnectionError:
        # The script has ended before it accepted this worker.
        return

    Worker(controller, lost).serve()
    finish(context)
    controller.close()


def _start(arguments: Sequence[str], info: RankInfo) -> tuple[Callable[[], int], tuple[str, int]]:
    """Start the controller's script with a listening socket for the workers.

    Returns:
        A function that waits for the script's exit code, and the host and port of the socket.
    """
    with listen_as_rank_zero(info, [0]) as listener:
        environment = {
            **scrub(os.environ),
            CONTROLLER_VARIABLE: f"{listener.fileno()}:{info.world_size}",
            SECRET_VARIABLE: os.environ[SECRET_VARIABLE],
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, *arguments]
        script = process.start_bound(command, signal.SIGTERM, env=environment, pass_fds=[listener.fileno()])
        # Pass Ctrl-C on to the script. It reaches this rank, too, which must continue to serve the script.
        signal.signal(signal.SIGINT, lambda number, _: script.send_signal(number))

        return script.wait, listener.getsockname()[:2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
