"""Which device a rank computes on, and which backend goes with it; pure decisions about names and numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, MismatchError, near_matches

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KINDS = (re.compile(r"\d+"), re.compile("GPU-."), re.compile("MIG-."))
"""Names of devices: the kernel's number (CUDA reads as much of it as is one), a UUID or its begin, MIG."""
_OWN = re.compile(r"\bgpu:(?:verbose,)?(?:per_task:(\d+)|single:)")
"""How SLURM tells the tasks of a step that each gets its own, also where that follows from other flags."""


def visible_names(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES names, as far as CUDA reads it; None where it is not set.

    CUDA stops at the first name that is none, and at the first of another kind than the one before. Raises
    MismatchError for a name that stands there twice: CUDA then shows no device at all.
    """
    text = environ.get(_VISIBLE)
    if text is None:
        return None
    listed = [name.strip() for name in text.split(",")]
    kind = next((kind for kind in _KINDS if kind.match(listed[0])), None)
    names: list[str] = []
    for name in listed:
        if kind is None or not kind.match(name):
            break
        if name in names:
            raise MismatchError(
                f"{_VISIBLE}={text!r} names {name} twice, and CUDA then shows no device.",
                hint="Name each once; a rank needs a device of its own.",
            )
        names.append(name)
    return tuple(names)


def own_mig_device(info: RankInfo, environ: Mapping[str, str]) -> str | None:
    """Return the one MIG device that this rank must see alone; None where names say nothing of the kind.

    CUDA shows a process the first MIG device that it is given, whatever else is named.
    """
    names = visible_names(environ) or ()
    if not names or not names[0].startswith("MIG-"):
        return None
    index = choose_device(info, environ, len(names))
    return None if index is None else names[index]


def choose_device(info: RankInfo, environ: Mapping[str, str], visible: int) -> int | None:
    """Return the CUDA index for this rank among the `visible` GPUs, or None for the CPU.

    A rank that sees GPUs of its own, where SLURM binds them to tasks, takes the first; ranks that see all of
    the node's take one each. Raises MismatchError when there are GPUs, but fewer than ranks. Nodes that are
    pretended share this machine's: where these don't suffice, it is a rehearsal on CPUs.
    """
    if visible == 0:
        return None
    if info.emulated and info.nodes > 1:
        return info.rank if visible >= info.world_size else None
    if visible >= info.local_world_size:
        return info.local_rank
    if _sees_its_own(info, environ, visible):
        return 0
    ranks = info.local_world_size
    raise MismatchError(
        f"{ranks} ranks on this node see {visible} GPU(s); each rank needs one of its own.{_unread(environ)}",
        hint=f"Ask for `--gpus-per-node={ranks}` and no `--gpu-bind`, or start {visible} rank(s) "
        f"per node (`--ntasks-per-node={visible}`), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to use CPUs.",
    )


def _unread(environ: Mapping[str, str]) -> str:
    """Return a sentence on what CUDA leaves out of the names that it was given; empty for nothing."""
    names, text = visible_names(environ), environ.get(_VISIBLE, "")
    left = text.split(",")[len(names or ()) :]
    return f" CUDA reads {_VISIBLE}={text!r} up to {left[0].strip()!r}." if names and left else ""


def _sees_its_own(info: RankInfo, environ: Mapping[str, str], visible: int) -> bool:
    """Whether what this rank sees is shown to no other rank of the node."""
    if info.environment not in ("slurm", "mpi") or info.emulated:
        return False
    if bound := _OWN.search(environ.get("SLURMD_TRES_BIND", "")):
        return visible == int(bound[1] or 1)
    if visible > 1:
        return False  # As with `closest`: some ranks see the same ones, and none knows which.
    return info.gpus_on_node is None or info.gpus_on_node >= info.local_world_size


def foreign_gpus(info: RankInfo, environ: Mapping[str, str], visible: int) -> str | None:
    """Return one line for when GPUs can be seen that may be those of other jobs; None where that is not so.

    SLURM names no devices under `--gpu-bind=none`, and not every site confines jobs to theirs.
    """
    if info.emulated or _VISIBLE in environ or not 0 < (info.gpus_on_node or 0) < visible:
        return None
    return (
        f"SLURM has given {info.gpus_on_node} GPU(s) of this node, but {visible} can be seen, and nothing "
        "tells them apart: ranks may take those of other jobs. Leave out `--gpu-bind=none`."
    )


def device_identity(environ: Mapping[str, str], index: int, uuid: object) -> str:
    """Return what tells the device of this rank from every other; MIG devices may share their GPU's UUID."""
    names = visible_names(environ) or ()
    return names[index] if index < len(names) and names[index].startswith("MIG-") else str(uuid)


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
