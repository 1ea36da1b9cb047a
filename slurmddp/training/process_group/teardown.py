"""Destroy the process group without a deadlock or an abort in gloo's threads."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

_GLOO_THREAD = "pt_gloo_runloop"
_IDLE_S = 1.0
"""Most seconds to wait until gloo's threads are idle."""
_IDLE_POLLS = 5
"""Polls in a row that must find a thread asleep before it counts as idle."""


def destroy_group() -> None:
    """Destroy the default process group, if there is one."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        # torch 2.13 can deadlock when the last reference to a gloo group (a DDP model holds one) goes just
        # after a collective: the caller holds the interpreter lock and waits for gloo's thread, which needs
        # that lock. An extra reference, never released, keeps the group until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        _wait_until_gloo_is_idle()
    dist.destroy_process_group()


def _wait_until_gloo_is_idle() -> None:
    """Return once gloo's threads have released the tensors of the last collective, or after a second.

    A collective returns before gloo's thread releases the tensors. The thread needs the interpreter lock for
    that. If the interpreter shuts down first, the process aborts ("terminate called without an active
    exception"). A thread that sleeps while this thread has released the lock has nothing left to release.
    """
    polls_asleep = 0
    deadline = time.monotonic() + _IDLE_S
    while polls_asleep < _IDLE_POLLS and time.monotonic() < deadline:
        time.sleep(0.002)  # Release the interpreter lock.
        polls_asleep = polls_asleep + 1 if set(_gloo_thread_states()) <= {"S"} else 0


def _gloo_thread_states() -> Iterator[str]:
    """Yield the kernel's state letter of each thread that runs gloo's collectives; on Linux only."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # The thread has ended meanwhile.
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
            if name == _GLOO_THREAD:
                yield rest.split()[0]
