"""The grace periods of a worker group: how long its ranks may run on after a rank has failed."""

from __future__ import annotations

TOGETHER_S = 0.3
"""Seconds for other failing ranks to end by themselves after the first failure.

torchrun looks for failed ranks every 0.1 s.
"""
SAVE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for a program that may save by itself after another rank has failed.

torchrun waits as long. A program that does not handle SIGTERM ends at once.
"""
KILL_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for other ranks: time to end a write, not to save."""
