"""One rank of a job is a worker; rank 0 starts the controller's script beside it, on the first node.

    python -m slurmddp.remote.job script.py --lr 0.1      # in each rank of `slurmddp controller`

Rank 0 opens the listener to which the workers connect, on the address that leads to the job's nodes. The
script inherits it (`SLURMDDP_CONTROLLER`). Rank 0 ends with the script's exit code.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmddp.environments.detect import detect
from slurmddp.environments.names import CONTROLLER_VARIABLE, SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.scrub import scrub
from slurmddp.errors import EXIT_FINISHED, ConfigError
from slurmddp.host import process
from slurmddp.host.ports import listen_as_rank_zero
from slurmddp.remote import worker
from slurmddp.training.process_group import collectives


def main(words: Sequence[str]) -> int:
    """Serve a controller that runs `words`, a script or `-m MODULE` with arguments; return its exit code."""
    if not os.environ.get(SECRET_VARIABLE):
        raise ConfigError(
            f"{SECRET_VARIABLE} is not set, so anybody could control these workers.",
            hint="Start the script by `slurmddp controller`, which draws a secret.",
        )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller.
    folder = Path.cwd() if words[0] == "-m" else Path(words[0]).resolve().parent
    sys.path.insert(0, str(folder))  # Calls name modules beside the script.
    context = worker.context_of(detect(os.environ))
    is_first = context.info.rank == 0
    wait, address = _start(words, context.info) if is_first else (lambda: EXIT_FINISHED, ("", 0))
    worker.serve(collectives.from_zero(address), context, wait)
    return wait()


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
