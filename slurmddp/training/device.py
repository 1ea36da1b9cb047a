"""Which device a rank computes on, and which backend goes with it; pure decisions about numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError, near_matches

_ONE_GPU_EACH = ("per_task", "single")


def choose_device(info: RankInfo, environ: Mapping[str, str], visible: int) -> int | None:
    """Return the CUDA index for this rank among the `visible` GPUs, or None for the CPU.

    A rank that sees one GPU, where SLURM binds GPUs to tasks, takes that one; ranks that see all GPUs of
    the node take one each. Raises MismatchError when there are GPUs, but fewer than ranks.
    """
    if visible == 0:
        return None
    if visible >= info.local_world_size:
        return info.local_rank
    if visible == 1 and _gpus_are_bound_to_tasks(info, environ):
        return 0
    ranks = info.local_world_size
    raise MismatchError(
        f"{ranks} ranks on this node see {visible} GPU(s); each rank needs one of its own.",
        hint=f"Ask for `--gpus-per-node={ranks}` (with `--gpu-bind=none`), or start {visible} rank(s) "
        f"per node (`--ntasks-per-node={visible}`), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to use CPUs.",
    )


def _gpus_are_bound_to_tasks(info: RankInfo, environ: Mapping[str, str]) -> bool:
    if info.environment not in ("slurm", "mpi"):
        return False
    binding = environ.get("SLURM_GPU_BIND", "") + environ.get("SLURM_TRES_BIND", "")
    per_task = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    if per_task or any(word in binding for word in _ONE_GPU_EACH):
        return True
    return info.gpus_on_node is None or info.gpus_on_node >= info.local_world_size


def choose_backend(asked: str, device_index: int | None, known: Collection[str] = ("gloo", "nccl")) -> str:
    """Return the process group's backend: `auto` is nccl on GPUs and gloo on the CPU."""
    if asked == "auto":
        return "gloo" if device_index is None else "nccl"
    if asked not in known:
        raise ConfigError(f"backend={asked!r} is not known.", hint=near_matches(asked, {"auto", *known}))
    if asked == "nccl" and device_index is None:
        raise MismatchError(
            "backend=nccl needs a GPU for every rank, and this rank has none.",
            hint="Ask for GPUs (`--gpus-per-node`), check that torch is a CUDA build, or use backend=auto.",
        )
    return asked


def choose_threads(info: RankInfo, usable_cpus: int) -> int:
    """Return how many threads this rank should compute with, out of the CPUs that it may run on."""
    ranks_here = info.world_size if info.emulated else info.local_world_size
    share = max(1, usable_cpus // ranks_here)
    if info.cpus is None:
        return share
    return min(info.cpus, share if info.emulated else usable_cpus)
