"""The newest state that only memory holds, when an attempt ends without a save: the next resumes from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from slurmddp.checkpoint.files.manifest import newest_step
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.memory.writer_process import Request

_KEEP_ALL = sys.maxsize
"""How many checkpoints stay is the trainer's to say, and it is gone."""


def newest_unsaved(
    slots: Mapping[int, int], asked_for: Collection[int], run_dir: Path, attempt: int
) -> Request | None:
    """Return what to ask of a writer, so that no state is lost; None where nothing is newer than the disk.

    `slots` are the memory files by number, `asked_for` those of them that are to be written anyway.
    Raises OSError when the checkpoints on the disk can't be listed.
    """
    states = {slot: found for slot, number in slots.items() if (found := shared_buffer.read_header(number))}
    if not states:
        return None
    slot = max(states, key=lambda slot: states[slot].order)
    if slot in asked_for:
        return None
    with shared_buffer.mapped(slots[slot], states[slot]) as parts:
        root = parts.about["root"]
    on_disk = newest_step(Path(root))
    if on_disk is not None and on_disk >= states[slot].step:
        return None
    return {
        "kind": "write", "slot": slot, "step": states[slot].step, "root": root, "keep_last": _KEEP_ALL,
        "background": False, "since": time.monotonic(), "stall_s": 0.0, "copied": states[slot].stamp / 1e9,
        "run_dir": str(run_dir), "attempt": attempt,
    }  # fmt: skip
