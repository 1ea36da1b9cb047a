"""Take a GPU for this rank: the calls to CUDA that follow the decisions of `choice`."""

from __future__ import annotations

import logging
import os

import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.device.choice import (
    choose_backend,
    choose_device,
    choose_mig_device,
    foreign_gpus,
)
from slurmddp.training.device.visible_devices import (
    VISIBLE,
    device_identity,
    visible_mig_devices,
)
from slurmddp.transports.registry import register

_log = logging.getLogger(__name__)


def visible_gpus() -> int:
    """Return how many GPUs the ranks of this node can share.

    MIG devices are counted by name: CUDA would show this process the first one only.
    """
    if torch.version.cuda:
        mig_devices = visible_mig_devices(os.environ)
        if mig_devices:
            return len(mig_devices)
    return torch.cuda.device_count()


def lacks_gpus(info: RankInfo) -> bool:
    """Decide whether torch shows fewer GPUs than SLURM has given to the ranks of this node together."""
    # Outside an agent, SLURM may have bound each GPU to a task, which sees no other GPU.
    if not RunContext.read(os.environ).by_agent:
        return False

    granted = info.gpus_on_node or 0
    return visible_gpus() < info.local_world_size <= granted


def take_device(info: RankInfo, backend: str) -> tuple[torch.device, str]:
    """Make a GPU the current device of this rank, if it has one; return the device and its backend.

    Of several MIG devices, only the device of this rank stays in CUDA_VISIBLE_DEVICES.

    Raises:
        MismatchError: there are fewer GPUs than ranks, or `backend` does not fit the device.
        ConfigError: `backend` is unknown, or lacks operations.
        RuntimeError: CUDA refuses the GPU.
    """
    index = _choose_index(info)
    registered = register(choose_backend(backend, index))
    if index is None:
        _warn_of_unused_gpus(info)
        return torch.device("cpu"), registered

    if info.local_rank == 0:
        warning = foreign_gpus(info, os.environ, torch.cuda.device_count())
        if warning:
            _log.warning(warning)

    torch.cuda.set_device(index)
    return torch.device("cuda", index), registered


def _warn_of_unused_gpus(info: RankInfo) -> None:
    """Warn if this rank computes on the CPU although there are GPUs."""
    if info.gpus_on_node:
        _log.warning("SLURM granted %d GPU(s), but torch sees none: computing on the CPU", info.gpus_on_node)
    elif info.emulated:
        gpus = visible_gpus()
        if gpus:
            _log.warning("%d ranks on emulated nodes, %d GPU(s): computing on the CPU", info.world_size, gpus)


def _choose_index(info: RankInfo) -> int | None:
    """Return the index of this rank's GPU, or None for the CPU."""
    mig_device = choose_mig_device(info, os.environ)
    if mig_device is None:
        return choose_device(info, os.environ, torch.cuda.device_count())

    # CUDA reads the variable once, so set it before asking CUDA for devices.
    os.environ[VISIBLE] = mig_device
    return 0 if torch.cuda.device_count() else None


def identity_of(device: torch.device) -> str:
    """Return a name that no other GPU of any node has; empty for the CPU, and if torch knows no UUID."""
    if device.type != "cuda":
        return ""

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return ""
    return device_identity(os.environ, device.index, uuid)
