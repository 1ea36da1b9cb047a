"""Run an action with a time limit, because a broken GPU or a silent node may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def within(seconds: float, action: Callable[[], T], device: torch.device) -> T:
    """Call `action` with a time limit; return its result, or raise its error.

    The action runs in a daemon thread whose current device is `device`. After a time-out the thread runs on.
    A time-out of gloo is no alternative: it closes all connections of the rank.

    Raises:
        TimeoutError: the action takes longer than `seconds`.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            # Each thread has its own current device.
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
