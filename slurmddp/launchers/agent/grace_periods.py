"""The grace periods of a worker group: how long its other ranks may still run after a rank has failed."""

from __future__ import annotations

TOGETHER_S = 0.3
"""Seconds for other failing ranks to end by themselves after the first failure.

torchrun looks for failed ranks every 0.1 s.
"""
SAVE_S = 30.0
"""After another rank has failed: seconds from SIGTERM to SIGKILL for a program that may save by itself.

torchrun waits as long. A program that does not handle SIGTERM ends at once.
"""
KILL_GRACE_S = 1.0
"""Seconds from SIGTERM to SIGKILL for ranks that can't save alone: time to complete a running write."""
