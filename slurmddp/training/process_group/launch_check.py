"""Check that this process was started as the program expects, before it waits for other ranks."""

from __future__ import annotations

import multiprocessing
import os
import socket

from slurmddp.environments.names import LAUNCHER_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError


def refuse_to_multiply() -> None:
    """Raise SlurmddpError if running this program's command again would not start ranks."""
    if multiprocessing.parent_process() is not None:
        raise SlurmddpError(
            "launch() was called in a process that multiprocessing started.",
            hint="Launch from the main program, under `if __name__ == '__main__':`.",
        )
    if os.environ.get(LAUNCHER_VARIABLE) == "local":
        raise SlurmddpError(
            "launch() was called in a process that launch() started, which does not see its rank.",
            hint="Unset SLURMDDP_ENVIRONMENT; a forced environment hides the launcher's variables.",
        )


def require_devices(info: RankInfo, wanted: int) -> None:
    """Raise MismatchError unless as many ranks were started on this machine as the program asks for."""
    if wanted != info.local_world_size:
        raise MismatchError(
            f"num_devices is {wanted}, but {info.environment} started {info.local_world_size} "
            f"process(es) on {socket.gethostname()}.",
            hint=_start_command(info, wanted),
        )


def _start_command(info: RankInfo, wanted: int) -> str:
    auto = 'or use num_devices="auto"'
    if info.environment == "slurm":
        return f"Start it with `srun --ntasks-per-node={wanted}`, {auto}."
    if info.environment == "torchrun":
        return f"Start it with `torchrun --nproc-per-node={wanted}`, {auto}."
    return f"Start {wanted} process(es) per node, {auto}."
