"""What each rank looks at on its own node before a training starts; nothing here waits for another rank.

A check looks and returns what it found wrong. It must be cheap (all of them together well under a second on a
CPU) and leave nothing behind.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slurmddp.checkpoint.files.manifest import checkpoint_folders, load_manifest
from slurmddp.checkpoint.files.space import free_bytes, size_text
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.preflight.timeout import within
from slurmddp.training.process_group.device import visible_names

NODE, RUN, NOBODY = "node", "run", "nobody"
_MATRIX = 256
_SHIFTS = (0, 1, 5)
_CPU_BYTES, _GPU_BYTES = 64 << 20, 256 << 20
_GPU_USED = 0.1
"""The share of a GPU's memory that a context may take; more belongs to another process."""
_DISK_BYTES = 100 << 20
_FILES = 4096
_SHM_PER_WORKER = 64 << 20
_RDMA = Path("/sys/class/infiniband")
SHM = Path("/dev/shm")
TMP = Path("/tmp")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong on one node."""

    check: str
    node: str
    text: str
    """What was found, as a sentence."""
    hint: str
    """What to do about it, as a sentence."""
    blames: str = NODE
    """NODE: another node would do; RUN: every node would find it; NOBODY: a warning, training can start."""

    @property
    def sentence(self) -> str:
        return f"{self.node}: {self.text} {self.hint}"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the checks of one rank know."""

    info: RankInfo
    device: torch.device
    node: str
    folder: RunFolder
    workers: int = 0
    """Loader workers of each rank."""


Check = Callable[[Surroundings], Iterable[Finding]]


def look(checks: Iterable[Check], here: Surroundings, limit_s: float) -> list[Finding]:
    """Return what the checks find; one that raises, or does not end in time, has found something too."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += within(limit_s, partial(_results, check, here), here.device)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            text = f"looking at its {check.__name__} failed on rank {here.info.rank}: {said}."
            hint = "Have the node examined."
            found.append(Finding(check=check.__name__, node=here.node, text=text, hint=hint))
    return found


def _results(check: Check, here: Surroundings) -> list[Finding]:
    return list(check(here))


def device(here: Surroundings) -> Iterable[Finding]:
    """Multiply matrices whose product is known to the last bit, in every type that training uses there."""
    yield from _unseen_gpus(here)
    types = [torch.float32] + [torch.bfloat16] * (here.device.type == "cuda")
    for kind in types:
        if not multiplies_right(here.device, kind):
            text = f"{here.device} of rank {here.info.rank} multiplies matrices wrongly in {kind}."
            yield Finding(check="device", node=here.node, text=text, hint="Have the device examined.")


def _unseen_gpus(here: Surroundings) -> Iterable[Finding]:
    """Say whether the ranks of this node would compute on CPUs although there are GPUs for them."""
    granted, hidden = here.info.gpus_on_node, visible_names(os.environ) == ()
    if not granted or hidden or here.device.type != "cpu" or here.info.local_rank != 0:
        return
    text = f"SLURM has given {granted} GPU(s), and torch shows none: the ranks would compute on CPUs."
    if torch.version.cuda or torch.version.hip:
        hint = "Have its driver looked at (`nvidia-smi`)."
        yield Finding(check="device", node=here.node, text=text, hint=hint)
    else:
        hint = "This torch is built without CUDA: install one that fits the driver."
        yield Finding(check="device", node=here.node, text=text, hint=hint, blames=NOBODY)


def multiplies_right(on: torch.device, kind: torch.dtype) -> bool:
    """Return whether a product of small whole numbers, exact in every type, comes out right."""
    values = (torch.arange(_MATRIX * _MATRIX, device=on).reshape(_MATRIX, _MATRIX) * 5) % 7
    unit = torch.eye(_MATRIX, device=on)
    shifts = torch.stack([unit.roll(shift, 1) for shift in _SHIFTS]).sum(0)
    expected = torch.stack([values.roll(-shift, 0) for shift in _SHIFTS]).sum(0)
    return torch.equal((shifts.to(kind) @ values.to(kind)).long(), expected)


def memory(here: Surroundings) -> Iterable[Finding]:
    """Take some memory of the device; on a GPU look for what another process has left there."""
    if here.device.type != "cuda":
        torch.ones(_CPU_BYTES, dtype=torch.uint8)
        return
    free, whole = torch.cuda.mem_get_info(here.device)
    held = whole - free - torch.cuda.memory_reserved(here.device)
    if held > _GPU_USED * whole:
        yield Finding(
            check="memory",
            node=here.node,
            text=f"{size_text(held)} of the {size_text(whole)} of {here.device} are in use already.",
            hint="If it is no process of yours, ask for whole GPUs, or tell the site's administrators.",
            blames=NOBODY,
        )
    torch.ones(_GPU_BYTES, dtype=torch.uint8, device=here.device)
    torch.cuda.empty_cache()


def disk(here: Surroundings) -> Iterable[Finding]:
    """Write to the node's folder for temporary files, and count what is free there and in the run folder."""
    if here.info.rank == 0:
        yield from _run_disk(here)
    if here.info.local_rank == 0:
        named, usual = os.environ.get("TMPDIR"), TMP if TMP.is_dir() else Path(tempfile.gettempdir())
        if named and not Path(named).is_dir():
            text = f"TMPDIR is {named}, which is no folder there: {usual} is used instead."
            hint = "Unset it where you submit, or make the folder in the cluster file's setup lines."
            yield Finding(check="disk", node=here.node, text=text, hint=hint, blames=NOBODY)
            named = None
        # Python itself would pass over either where it can't write; not so others that write there.
        yield from _node_disk(here, Path(named) if named else usual)


def _run_disk(here: Surroundings) -> Iterable[Finding]:
    size = _checkpoint_bytes(here.folder)
    needed = 2 * size if size is not None else _DISK_BYTES
    if (free := free_bytes(here.folder.path)) < needed:
        for_what = "two checkpoints take" if size is not None else "a training should find"
        text = f"{size_text(free)} are free in the run folder; {for_what} {size_text(needed)}."
        hint = "Make room, or begin in another runs_dir."
        yield Finding(check="disk", node=here.node, text=text, hint=hint, blames=RUN)


def _node_disk(here: Surroundings, folder: Path) -> Iterable[Finding]:
    # What lies on the run's own disk is nothing that another node would have.
    blames = RUN if folder.stat().st_dev == here.folder.path.stat().st_dev else NODE
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{folder} (TMPDIR) can't be written to: {error.strerror}."
        hint = "Have its disk looked at, or set TMPDIR to another folder."
        yield Finding(check="disk", node=here.node, text=text, hint=hint, blames=blames)
        return
    if (free := free_bytes(folder)) < _DISK_BYTES:
        text = f"{size_text(free)} are free in {folder} (TMPDIR); {size_text(_DISK_BYTES)} should be."
        hint = "Remove what earlier jobs have left there, or set TMPDIR to another folder."
        yield Finding(check="disk", node=here.node, text=text, hint=hint, blames=blames)


def _checkpoint_bytes(folder: RunFolder) -> int | None:
    """Return how many bytes the newest checkpoint has; None where there is none that tells."""
    for path in checkpoint_folders(folder.checkpoints_dir):
        with suppress(CheckpointError, OSError):
            return sum(record.size for record in load_manifest(path).files.values())
    return None


def limits(here: Surroundings) -> Iterable[Finding]:
    """Warn of limits that stop a training late: open files, locked memory, shared memory."""
    if here.info.local_rank != 0:
        return
    shm = free_bytes(SHM) if SHM.is_dir() else None
    yield from judge_limits(
        here.node,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if _has_rdma() else resource.RLIM_INFINITY,
        shm=shm,
        workers=here.workers * here.info.local_world_size,
    )


def _has_rdma() -> bool:
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def judge_limits(node: str, *, files: int, locked: int, shm: int | None, workers: int) -> Iterable[Finding]:
    """Say which limits are tight; `locked` counts only where there is hardware that locks memory."""
    unlimited = resource.RLIM_INFINITY

    def warning(check: str, text: str, hint: str) -> Finding:
        return Finding(check=check, node=node, text=text, hint=hint, blames=NOBODY)

    if files != unlimited and files < _FILES:
        text = f"a process may have {files} files open; with loader workers that is soon too few."
        yield warning("nofile", text, f"Put `ulimit -n {_FILES}` into the cluster file's setup lines.")
    if locked != unlimited:
        text = f"a process may lock {size_text(locked)} of memory; RDMA needs all that it sends locked."
        yield warning(
            "memlock", text, "Ask the site for an unlimited memlock in jobs (PropagateResourceLimits)."
        )
    if shm is not None and shm < workers * _SHM_PER_WORKER:
        text = f"{size_text(shm)} are free in {SHM}, where {workers} loader worker(s) put their batches."
        yield warning("shm", text, "Enlarge it (in containers --shm-size), or use fewer train.workers.")


CHECKS: tuple[Check, ...] = (device, memory, disk, limits)
