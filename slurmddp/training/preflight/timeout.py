"""Waiting for what may never end: a device that hangs, a partner that is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def within(seconds: float, action: Callable[[], T], device: torch.device) -> T:
    """Return what `action` returns or raise what it raises; TimeoutError when it takes longer.

    It then goes on in a thread of its own, which does not keep the process alive. (gloo has waits that end
    by themselves, but such an end closes all connections of its rank.)
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def act() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # Each thread has a current device of its own.
            answers.append(action())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=act, name="slurmddp-preflight", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"it did not end within {max(0.0, seconds):.0f} s")
    return answers[0]
