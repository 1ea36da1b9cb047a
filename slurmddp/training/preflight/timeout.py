"""Run an action with a time limit, because a broken GPU or a silent node may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def within(seconds: float, action: Callable[[], T], device: torch.device) -> T:
    """Call `action` with a time limit, and return its result.

    The action runs in a daemon thread, which can't be killed and so runs on after a time-out. The time-out of
    gloo itself is no alternative: it closes all connections of the rank.

    Args:
        seconds: the time limit.
        action: its errors are raised again in the calling thread.
        device: the current CUDA device in the thread of the action.

    Raises:
        TimeoutError: the action takes longer than `seconds`.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            # A new thread starts with GPU 0 as its current device.
            if device.type == "cuda":
                torch.cuda.set_device(device)

            results.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="slurmddp-preflight", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))

    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it did not end within {max(0.0, seconds):.0f} s")

    return results[0]
