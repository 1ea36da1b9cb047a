"""Check this rank's device and node before a training starts, without waiting for another rank.

A check yields a finding for each fault, and leaves nothing behind. All checks together take well under a
second on a CPU.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from slurmddp.checkpoint.files.manifest import checkpoint_folders, load_manifest
from slurmddp.checkpoint.files.space import free_bytes, size_text
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import CheckpointError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.short_text import typed_first_line
from slurmddp.training.device.visible_devices import visible_names
from slurmddp.training.preflight.timeout import within

NODE = "node"
RUN = "run"
NOBODY = "nobody"
_MATRIX = 256
"""Rows and columns of the multiplied matrices."""
_SHIFTS = (0, 1, 5)
"""The first matrix is the sum of unit matrices whose columns are shifted by these numbers."""
_CPU_BYTES = 64 << 20
"""Bytes of host memory that the check allocates for a rank on a CPU."""
_GPU_BYTES = 256 << 20
"""Bytes of GPU memory that the check allocates for a rank on a GPU."""
_GPU_USED = 0.1
"""The share of a GPU's memory that a CUDA context may take; more belongs to another process."""
_DISK_BYTES = 100 << 20
"""Free bytes on a disk that a training needs before its first checkpoint."""
_FILES = 4096
"""Number of open files that a rank with loader workers may need."""
_SHM_PER_WORKER = 64 << 20
"""Bytes of shared memory for the batches of one loader worker."""
_RDMA = Path("/sys/class/infiniband")
SHM = Path("/dev/shm")
TMP = Path("/tmp")


@dataclass(frozen=True, kw_only=True)
class NodeFault:
    """A finding of a check: what is wrong on a node, and what to do about it."""

    node: str
    text: str
    """The fault, as a sentence that follows the node's name."""
    hint: str
    """The remedy, as a sentence."""
    fault: str = NODE
    """The cause. NODE: the check would pass on another node. RUN: it would fail on every node. NOBODY: the
    finding is a warning, and the training starts."""

    @property
    def sentence(self) -> str:
        """The finding as a message: the name of the node, the fault and the remedy."""
        return f"{self.node}: {self.text} {self.hint}"


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The arguments of each check: the rank, its device, its node and the run folder."""

    info: RankInfo
    device: torch.device
    node: str
    """The name of this rank's node in findings."""
    folder: RunFolder
    """The run folder."""
    workers: int = 0
    """The number of loader workers of each rank."""


Check = Callable[[CheckContext], Iterable[NodeFault]]


def run_checks(checks: Iterable[Check], context: CheckContext, limit_s: float) -> list[NodeFault]:
    """Run the checks of this rank, and return their findings.

    Args:
        checks: called one after the other.
        context: the argument of each check.
        limit_s: seconds that one check may take.

    Returns:
        The findings of all checks, and one for each check that raised or exceeded `limit_s`.
    """
    return [finding for check in checks for finding in _run_check(check, context, limit_s)]


def _run_check(check: Check, context: CheckContext, limit_s: float) -> list[NodeFault]:
    try:
        return within(limit_s, lambda: list(check(context)), context.device)
    except Exception as error:
        cause = typed_first_line(error)
        text = f"the check of its {check.__name__} failed on rank {context.info.rank}: {cause}."
        return [NodeFault(node=context.node, text=text, hint="Have the node examined.")]


def device(context: CheckContext) -> Iterable[NodeFault]:
    """Yield a finding if the device multiplies matrices wrongly, or if GPUs of the node are not visible.

    The matrices are multiplied in float32, on GPUs also in bfloat16; their product is known to the last bit.
    """
    yield from _unseen_gpus(context)

    dtypes = [torch.float32]
    if context.device.type == "cuda":
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        if not multiplies_right(context.device, dtype):
            text = f"{context.device} of rank {context.info.rank} multiplies matrices wrongly in {dtype}."
            yield NodeFault(node=context.node, text=text, hint="Have the device examined.")


def _unseen_gpus(context: CheckContext) -> Iterable[NodeFault]:
    """Yield a finding if the ranks of this node would compute on CPUs although SLURM gave them GPUs."""
    granted = context.info.gpus_on_node
    hidden = visible_names(os.environ) == ()
    if not granted or hidden or context.device.type != "cpu" or context.info.local_rank != 0:
        return

    text = f"SLURM has given {granted} GPU(s), and torch shows none: the ranks would compute on CPUs."
    if torch.version.cuda or torch.version.hip:
        yield NodeFault(node=context.node, text=text, hint="Have its driver examined (`nvidia-smi`).")
    else:
        hint = "This torch is built without CUDA: install one that fits the driver."
        yield NodeFault(node=context.node, text=text, hint=hint, fault=NOBODY)


def multiplies_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Decide whether `device` computes the right product of two matrices of small whole numbers.

    All values and sums are exact in `dtype`, so the product must be equal to the last bit.
    """
    values = (torch.arange(_MATRIX * _MATRIX, device=device).reshape(_MATRIX, _MATRIX) * 5) % 7
    unit = torch.eye(_MATRIX, device=device)
    shifts = torch.stack([unit.roll(shift, 1) for shift in _SHIFTS]).sum(0)

    product = (shifts.to(dtype) @ values.to(dtype)).long()
    expected = torch.stack([values.roll(-shift, 0) for shift in _SHIFTS]).sum(0)
    return torch.equal(product, expected)


def memory(context: CheckContext) -> Iterable[NodeFault]:
    """Allocate memory on the device; yield a warning if other processes hold over 10 % of a GPU's memory.

    An allocation that fails raises, which `run_checks` turns into a finding.
    """
    if context.device.type != "cuda":
        torch.ones(_CPU_BYTES, dtype=torch.uint8)
        return

    free, whole = torch.cuda.mem_get_info(context.device)
    held = whole - free - torch.cuda.memory_reserved(context.device)
    if held > _GPU_USED * whole:
        text = f"{size_text(held)} of the {size_text(whole)} of {context.device} are in use already."
        hint = "Ask for whole GPUs, or tell the site's administrators, unless the process is yours."
        yield NodeFault(node=context.node, text=text, hint=hint, fault=NOBODY)

    torch.ones(_GPU_BYTES, dtype=torch.uint8, device=context.device)
    torch.cuda.empty_cache()


def disk(context: CheckContext) -> Iterable[NodeFault]:
    """Yield a finding if the temporary folder can't be written to, or it or the run folder is almost full.

    Rank 0 checks the run folder, local rank 0 of each node its temporary folder.
    """
    if context.info.rank == 0:
        yield from _run_disk(context)

    if context.info.local_rank != 0:
        return

    folder = TMP if TMP.is_dir() else Path(tempfile.gettempdir())
    tmpdir = os.environ.get("TMPDIR")
    if tmpdir and not Path(tmpdir).is_dir():
        text = f"TMPDIR is {tmpdir}, which is no folder on this node: {folder} is used instead."
        hint = "Unset TMPDIR where you submit, or create the folder in the cluster file's setup lines."
        yield NodeFault(node=context.node, text=text, hint=hint, fault=NOBODY)
    elif tmpdir:
        # Check TMPDIR itself: `tempfile` would silently choose another folder if TMPDIR can't be written to,
        # but other libraries use TMPDIR in any case.
        folder = Path(tmpdir)
    yield from _node_disk(context, folder)


def _run_disk(context: CheckContext) -> Iterable[NodeFault]:
    needed = _DISK_BYTES
    use = "a training needs"
    checkpoint_bytes = _checkpoint_bytes(context.folder)
    if checkpoint_bytes is not None:
        needed = 2 * checkpoint_bytes
        use = "two checkpoints need"

    free = free_bytes(context.folder.path)
    if free < needed:
        text = f"{size_text(free)} are free in the run folder; {use} {size_text(needed)}."
        hint = "Delete files, or start the run in another runs_dir."
        yield NodeFault(node=context.node, text=text, hint=hint, fault=RUN)


def _node_disk(context: CheckContext, folder: Path) -> Iterable[NodeFault]:
    # If the temporary folder is on the disk of the run folder, every node would find the same fault.
    fault = RUN if folder.stat().st_dev == context.folder.path.stat().st_dev else NODE
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{folder} (TMPDIR) can't be written to: {error.strerror}."
        hint = "Have its disk examined, or set TMPDIR to another folder."
        yield NodeFault(node=context.node, text=text, hint=hint, fault=fault)
        return

    free = free_bytes(folder)
    if free < _DISK_BYTES:
        text = f"{size_text(free)} are free in {folder} (TMPDIR); a training needs {size_text(_DISK_BYTES)}."
        hint = "Remove the files of earlier jobs there, or set TMPDIR to another folder."
        yield NodeFault(node=context.node, text=text, hint=hint, fault=fault)


def _checkpoint_bytes(folder: RunFolder) -> int | None:
    """Return the bytes of the newest checkpoint with a readable manifest; None without such a checkpoint."""
    for path in checkpoint_folders(folder.checkpoints_dir):
        with suppress(CheckpointError, OSError):
            return sum(record.size for record in load_manifest(path).files.values())

    return None


def limits(context: CheckContext) -> Iterable[NodeFault]:
    """Yield a warning for each limit that may fail a training late: open files, locked and shared memory."""
    if context.info.local_rank != 0:
        return

    locked = resource.RLIM_INFINITY
    # Without RDMA hardware the limit of locked memory does not matter.
    if _has_rdma():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]

    yield from check_limits(
        context.node,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked=locked,
        shm=free_bytes(SHM) if SHM.is_dir() else None,
        workers=context.workers * context.info.local_world_size,
    )


def _has_rdma() -> bool:
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def check_limits(node: str, *, files: int, locked: int, shm: int | None, workers: int) -> Iterable[NodeFault]:
    """Yield a warning for each limit that is too low.

    Args:
        node: the node's name.
        files: the limit of open files of a process.
        locked: the limit of locked memory in bytes; RLIM_INFINITY if no hardware needs locked memory.
        shm: free bytes in /dev/shm; None if the node has no such folder.
        workers: the number of loader workers of the node.
    """
    unlimited = resource.RLIM_INFINITY

    def warning(text: str, hint: str) -> NodeFault:
        return NodeFault(node=node, text=text, hint=hint, fault=NOBODY)

    if files != unlimited and files < _FILES:
        text = f"the limit of open files is {files} per process, too few for a rank with loader workers."
        yield warning(text, f"Put `ulimit -n {_FILES}` into the cluster file's setup lines.")

    if locked != unlimited:
        text = f"a process may lock {size_text(locked)} of memory; RDMA must lock all memory that it sends."
        yield warning(text, "Ask the site for an unlimited memlock in jobs (PropagateResourceLimits).")

    if shm is not None and shm < workers * _SHM_PER_WORKER:
        text = f"{size_text(shm)} are free in {SHM}, but {workers} loader worker(s) share batches through it."
        yield warning(text, f"Enlarge {SHM} (in containers: --shm-size), or use fewer train.workers.")


CHECKS: tuple[Check, ...] = (device, memory, disk, limits)
