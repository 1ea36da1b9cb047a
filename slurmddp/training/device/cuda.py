"""Take a GPU for this rank: the calls to CUDA that follow the decisions of `choice`."""

from __future__ import annotations

import logging
import os

import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.device.choice import (
    VISIBLE,
    choose_backend,
    choose_device,
    device_identity,
    foreign_gpus,
    own_mig_device,
    visible_mig_devices,
)
from slurmddp.transports.registry import register

_log = logging.getLogger(__name__)


def visible_gpus() -> int:
    """Return how many GPUs the ranks of this node can share.

    MIG devices are counted by name: CUDA would show this process the first one only.
    """
    named = len(visible_mig_devices(os.environ)) if torch.version.cuda else 0
    return named or torch.cuda.device_count()


def lacks_gpus(info: RankInfo) -> bool:
    """Return whether torch shows fewer GPUs than SLURM has given to the ranks of this node together."""
    return RunContext.read(os.environ).by_agent and visible_gpus() < info.local_world_size <= (
        info.gpus_on_node or 0
    )


def take_device(info: RankInfo, backend: str) -> tuple[torch.device, str]:
    """Make a GPU the current device of this rank, if it has one; return the device and its backend.

    Of several MIG devices, only the rank's own stays in CUDA_VISIBLE_DEVICES.

    Raises:
        MismatchError: there are fewer GPUs than ranks, or `backend` does not fit the device.
        ConfigError: `backend` is unknown, or lacks operations.
        RuntimeError: CUDA refuses the GPU.
    """
    index = _choose_index(info)
    chosen = register(choose_backend(backend, index))
    if index is not None:
        if info.local_rank == 0 and (line := foreign_gpus(info, os.environ, torch.cuda.device_count())):
            _log.warning(line)
        torch.cuda.set_device(index)
        return torch.device("cuda", index), chosen
    if info.gpus_on_node:
        _log.warning("SLURM granted %d GPU(s), but torch sees none: computing on the CPU", info.gpus_on_node)
    elif info.emulated and (here := visible_gpus()):
        _log.warning("%d ranks on emulated nodes, %d GPU(s): computing on the CPU", info.world_size, here)
    return torch.device("cpu"), chosen


def _choose_index(info: RankInfo) -> int | None:
    """Return the index of this rank's GPU, or None for the CPU.

    CUDA reads the variable once, so the variable is set before CUDA is asked for devices.
    """
    own = own_mig_device(info, os.environ)
    if own is None:
        return choose_device(info, os.environ, torch.cuda.device_count())
    os.environ[VISIBLE] = own
    return 0 if torch.cuda.device_count() else None


def identity_of(device: torch.device) -> str:
    """Return a name that no other GPU of any node has; empty for the CPU, and if torch knows no UUID."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else device_identity(os.environ, device.index, uuid)
