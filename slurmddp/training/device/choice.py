"""Choose a rank's device, backend and number of threads: pure functions of names and numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.training.device.visible_devices import VISIBLE, ignored_names, visible_mig_devices
from slurmddp.transports.registry import split_devices

_BOUND_TO_TASK = re.compile(r"\bgpu:(?:verbose,)?(?:per_task:(\d+)|single:)")
"""Matches SLURMD_TRES_BIND if SLURM gives each task GPUs that no other task of the node gets."""


def choose_mig_device(info: RankInfo, environ: Mapping[str, str]) -> str | None:
    """Return the name of the MIG device for this rank; None if CUDA_VISIBLE_DEVICES names no MIG devices."""
    names = visible_mig_devices(environ)
    index = choose_device(info, environ, len(names))
    if index is None:
        return None
    return names[index]


def choose_device(info: RankInfo, environ: Mapping[str, str], visible: int) -> int | None:
    """Return the CUDA index of the GPU for this rank; None if the rank is to compute on the CPU.

    If SLURM binds GPUs to tasks, the index is 0, the first GPU that the rank sees. If all ranks of the node
    see the same GPUs, the index is the local rank. Emulated nodes share this machine's GPUs; if there are
    fewer GPUs than ranks on all emulated nodes, all ranks compute on CPUs.

    Args:
        info: this rank.
        environ: the environment of this rank.
        visible: the number of GPUs that CUDA shows to this rank.

    Raises:
        MismatchError: there are GPUs, but fewer than ranks.
    """
    if visible == 0:
        return None
    if info.emulated and info.nodes > 1:
        return info.rank if visible >= info.world_size else None

    if visible >= info.local_world_size:
        return info.local_rank
    if _sees_bound_gpus(info, environ, visible):
        return 0

    ranks = info.local_world_size
    raise MismatchError(
        f"{ranks} ranks on this node see {visible} GPU(s); each rank needs its own.{ignored_names(environ)}",
        hint=f"Ask for `--gpus-per-node={ranks}` and no `--gpu-bind`, or start {visible} rank(s) "
        f"per node (`--ntasks-per-node={visible}`), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to use CPUs.",
    )


def _sees_bound_gpus(info: RankInfo, environ: Mapping[str, str], visible: int) -> bool:
    """Decide whether SLURM shows this rank GPUs that no other rank of the node sees."""
    if info.environment not in ("slurm", "mpi") or info.emulated:
        return False

    bound = _BOUND_TO_TASK.search(environ.get("SLURMD_TRES_BIND", ""))
    if bound:
        return visible == int(bound[1] or 1)

    # A rank that sees several GPUs may share them with other ranks, for example under
    # `--gpu-bind=closest`, and can't know with which.
    if visible > 1:
        return False
    return info.gpus_on_node is None or info.gpus_on_node >= info.local_world_size


def foreign_gpus(info: RankInfo, environ: Mapping[str, str], visible: int) -> str | None:
    """Return a warning if CUDA shows this rank more GPUs than SLURM gave the job on this node, else None.

    Under `--gpu-bind=none` SLURM does not set CUDA_VISIBLE_DEVICES. At sites that don't confine jobs to their
    devices, a job then sees the GPUs of other jobs.
    """
    if info.emulated or VISIBLE in environ or not 0 < (info.gpus_on_node or 0) < visible:
        return None

    return (
        f"SLURM has given {info.gpus_on_node} GPU(s) of this node, but {visible} can be seen. Ranks may take "
        "GPUs of other jobs. Leave out `--gpu-bind=none`."
    )


def choose_backend(asked: str, device_index: int | None) -> str:
    """Return the backend of the process group; `auto` becomes nccl on a GPU and gloo on the CPU.

    In a device string such as `cpu:gloo,cuda:nccl`, a rank without a GPU keeps the backend of the CPU only.

    Args:
        asked: the setting `backend`: `auto`, a name, or a device string.
        device_index: the CUDA index of this rank's GPU; None for the CPU.

    Raises:
        ConfigError: a device string is malformed.
        MismatchError: there is no backend for the device of this rank.
    """
    if asked == "auto":
        return "gloo" if device_index is None else "nccl"
    if ":" in asked:
        return _for_device_type(asked, "cpu" if device_index is None else "cuda")

    if asked == "nccl" and device_index is None:
        raise MismatchError(
            "backend=nccl needs a GPU for every rank, and this rank has none.",
            hint="Ask for GPUs (gpus_per_node=N, or --gpus-per-node=N of srun), check that torch is a CUDA "
            "build, or use backend=auto.",
        )

    return asked


def _for_device_type(asked: str, kind: str) -> str:
    """Return the device string `asked`; without its part for `cuda` if this rank computes on the CPU.

    Raises:
        MismatchError: `asked` names no backend for the device type `kind`.
    """
    backends = split_devices(asked)
    if kind not in backends:
        usual = {"cpu": "gloo", "cuda": "nccl"}[kind]
        raise MismatchError(
            f"backend={asked!r} names no backend for {kind}, the device of this rank.",
            hint=f"Add one, as in backend={asked},{kind}:{usual}.",
        )

    if kind == "cpu":
        backends.pop("cuda", None)

    return ",".join(f"{device}:{name}" for device, name in backends.items())


def choose_threads(info: RankInfo, usable_cpus: int) -> int:
    """Return the number of threads for this rank.

    Args:
        info: this rank; `info.cpus` is the number of processors that SLURM gave to it.
        usable_cpus: the number of processors that this process may run on.
    """
    share = max(1, usable_cpus // ranks_on_machine(info))
    if info.cpus is None:
        return share

    # Ranks of all emulated nodes run on this machine, so each gets at most its share of the processors.
    if info.emulated:
        return min(info.cpus, share)
    return min(info.cpus, usable_cpus)


def ranks_on_machine(info: RankInfo) -> int:
    """Return how many ranks run on this machine; emulated nodes all run on this machine."""
    if info.emulated:
        return info.world_size
    return info.local_world_size
