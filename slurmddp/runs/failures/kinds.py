"""The kinds of failures: a name and a phrase for each; `causes.ADVICE` has the advice.

Every decision about a failure depends on its kind alone. The reason beside the kind is a phrase for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FailureKind = Literal[
    "other",
    "out_of_memory",
    "out_of_gpu_memory",
    "shared_memory_full",
    "disk_full",
    "too_many_files",
    "port_taken",
    "wrong_python",
    "lost_peer",
    "killed",
    "unhandled_signal",
    "crashed",
    "crashed_at_exit",
    "crashed_worker",
    "ended_worker",
    "left_early",
    "ended_by_agent",
    "not_started",
    "stalled",
    "stalled_together",
    "lost_node",
    "lost_contact",
    "unfit_node",
    "unable_node",
]

STALLS = frozenset[FailureKind]({"stalled", "stalled_together"})
"""Kinds for a rank that hangs: alone, or in a collective that not all ranks have joined."""
LOST_NODES = frozenset[FailureKind]({"lost_node", "lost_contact", "unfit_node", "unable_node"})
"""Kinds for a node that the attempt has lost: silent, cut off, unfit by the preflight, or without ranks."""

PHRASES: Mapping[FailureKind, str] = {
    "out_of_memory": "out of memory",
    "out_of_gpu_memory": "out of GPU memory",
    "shared_memory_full": "shared memory (/dev/shm) is full",
    "disk_full": "no space left",
    "too_many_files": "too many open files",
    "port_taken": "a port is taken",
    "wrong_python": "not the right Python on the node",
    "lost_peer": "lost another rank",
    "killed": "by a person, the site or SLURM",
    "unhandled_signal": "its program does not handle this signal",
    "crashed": "crashed",
    "crashed_at_exit": "crashed at its exit",
    "crashed_worker": "crashed in a data worker",
    "ended_worker": "a data worker ended by itself",
    "left_early": "left while others continued",
    "ended_by_agent": "ended by its agent",
    "not_started": "was not started by SLURM",
    "stalled": "stalled",
    "stalled_together": "stalled: in a collective that not all ranks have joined",
    "lost_node": "was lost",
    "lost_contact": "lost contact with each other",
    "unfit_node": "failed the preflight",
    "unable_node": "can run no ranks",
}
"""The phrase with which the reason of a failure begins, by kind."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended: the kind of failure, and a phrase."""

    kind: FailureKind
    reason: str
    """The cause as one phrase for people; empty if it is not known."""

    @classmethod
    def of(cls, kind: FailureKind, detail: str = "") -> Cause:
        """Return a cause of a kind; its reason is the phrase in `PHRASES`, with a detail after a colon."""
        phrase = PHRASES[kind]
        return cls(kind, f"{phrase}: {detail}" if detail else phrase)


UNKNOWN = Cause("other", "")
