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
    """Return the number of GPUs, or MIG devices, that are visible on this node.

    MIG devices are counted in CUDA_VISIBLE_DEVICES, because CUDA shows a process only the first of them.
    """
    if torch.version.cuda:
        mig_devices = visible_mig_devices(os.environ)
        if mig_devices:
            return len(mig_devices)
    return torch.cuda.device_count()


def lacks_gpus(info: RankInfo) -> bool:
    """Decide whether SLURM gave each rank of this node a GPU, but fewer GPUs than ranks are visible."""
    # Without an agent, SLURM may have bound each task to one GPU. Then a rank rightly sees fewer GPUs than
    # the node has, so the question can't be decided.
    if not RunContext.read(os.environ).by_agent:
        return False

    granted = info.gpus_on_node or 0
    return visible_gpus() < info.local_world_size <= granted


def take_device(info: RankInfo, backend: str) -> tuple[torch.device, str]:
    """Make this rank's GPU, if it has one, its current CUDA device.

    If CUDA_VISIBLE_DEVICES names several MIG devices, it is set to the device of this rank.

    Args:
        info: this rank.
        backend: `auto`, a name that `register` takes, or a device string.

    Returns:
        The device, and the name of its backend as `init_process_group` takes it.

    Raises:
        MismatchError: there are fewer GPUs than ranks, or `backend` does not fit the device.
        ConfigError: `backend` is unknown, or lacks operations.
        RuntimeError: an error of CUDA, for example of a broken GPU.
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
        _log.warning(
            "SLURM granted %d GPU(s), but torch sees none: computing on the CPU. Is torch a CUDA build?",
            info.gpus_on_node,
        )
    elif info.emulated:
        gpus = visible_gpus()
        if gpus:
            _log.warning(
                "%d ranks on emulated nodes are more than the %d GPU(s): computing on the CPU",
                info.world_size,
                gpus,
            )


def _choose_index(info: RankInfo) -> int | None:
    """Return the CUDA index of this rank's GPU, or None; for a MIG device, set CUDA_VISIBLE_DEVICES."""
    mig_device = choose_mig_device(info, os.environ)
    if mig_device is None:
        return choose_device(info, os.environ, torch.cuda.device_count())

    # CUDA reads the variable only once, at its first use, so set it before `device_count`.
    os.environ[VISIBLE] = mig_device
    return 0 if torch.cuda.device_count() else None


def identity_of(device: torch.device) -> str:
    """Return a name that no other GPU of any node has: its UUID, or the name of a MIG device.

    The name is empty for the CPU, and in versions of torch that don't know UUIDs.
    """
    if device.type != "cuda":
        return ""

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return ""
    return device_identity(os.environ, device.index, uuid)
