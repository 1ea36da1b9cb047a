"""Let the agent ask a rank for the recording of its last collectives, also with NCCL of torch 2.15.

Until torch 2.14 a thread of NCCL's process group reads requests from a named pipe, which the variable
TORCH_NCCL_DEBUG_INFO_PIPE_FILE names (`launchers/watchdog/nccl_trace.py`). The class of torch 2.15 reads no
pipe, so a thread of the rank does it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_END = b"\0"
"""The byte that ends the thread. Any other byte is a request."""
_log = logging.getLogger(__name__)


def start(rank: int, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Answer requests for this rank's recording in a thread, if torch does not do so itself.

    Args:
        rank: this rank in the default process group, which is initialised.
        device: the device of this rank.
        undo: gets a callback that ends the thread.
    """
    prefix = os.environ.get(PIPE_VARIABLE)
    if not prefix or device.type != "cuda" or not _is_nccl2(device):
        return

    functions: Any = torch._C._distributed_c10d
    # The arguments ask for all collectives, also completed ones, with their stacks.
    dump = partial(functions._dump_fr_trace_file, rank, True, True, False, "nccl2")
    try:
        answer_requests(Path(f"{prefix}{rank}.pipe"), dump, undo)
    except OSError as error:
        _log.warning("at a hang this rank will not write its last collectives: %s", error)


def _is_nccl2(device: torch.device) -> bool:
    """Return whether the default process group uses the class of torch 2.15 for this rank's GPU."""
    nccl2 = getattr(dist, "ProcessGroupNCCL2", None)
    group: Any = dist.group.WORLD
    # A process group over a transport, which is written in Python, has no backends of torch.
    if nccl2 is None or not group._device_types:
        return False
    return isinstance(group._get_backend(device), nccl2)


def answer_requests(pipe: Path, dump: Callable[[], object], undo: contextlib.ExitStack) -> None:
    """Create a named pipe, and call `dump` in a thread for each byte that is written into it.

    Args:
        pipe: the path of the pipe. A pipe of an earlier rank is replaced.
        dump: writes the recording.
        undo: gets a callback that ends the thread and removes the pipe.

    Raises:
        OSError: the pipe can't be created.
    """
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    # Open the pipe for writing as well: otherwise reading would end when a writer closes the pipe.
    descriptor = os.open(pipe, os.O_RDWR)

    def answer() -> None:
        with open(descriptor, "rb", buffering=0) as requests:
            while (request := requests.read(1)) != _END:
                if request != b"\n":
                    dump()

    thread = threading.Thread(target=answer, name="slurmddp-flight-recording", daemon=True)
    thread.start()
    undo.callback(pipe.unlink, missing_ok=True)
    undo.callback(_end, descriptor, thread)


def _end(descriptor: int, thread: threading.Thread) -> None:
    os.write(descriptor, _END)
    thread.join()
