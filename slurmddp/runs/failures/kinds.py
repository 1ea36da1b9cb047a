"""The kinds of failures: a name, a phrase for sentences and a remedy for each.

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

ADVICE: Mapping[FailureKind, str] = {
    "out_of_memory": "Ask for more with mem_gb=, or use a smaller train.batch_size or fewer train.workers.",
    "out_of_gpu_memory": "Use a smaller train.batch_size. train.accumulate=N then keeps the number of "
    "samples per step.",
    "shared_memory_full": "Data workers pass batches to the rank through shared memory. Use fewer "
    "train.workers (0 needs no shared memory), or give the container more (--shm-size).",
    "disk_full": "Free space on that disk, or ask for a larger quota.",
    "too_many_files": "Raise the limit (`ulimit -n`), or use fewer train.workers.",
    "port_taken": "A script that starts its own ranks needs ranks_per_node=1. Any other script should use "
    "the port in MASTER_PORT.",
    "wrong_python": "With `python:` in the cluster file, name an interpreter that exists on the nodes and "
    "has slurmddp and torch.",
    "lost_peer": "Look for the rank or node that ended first.",
    "killed": "On a cluster the batch log and `sacct` may say who killed it.",
    "unhandled_signal": "`scancel --signal` or a program on the node sent the signal. Handle it in the "
    "program, or use `slurmddp stop`, which lets a run save and stop.",
    "crashed": "The crash is in compiled code. If the program runs in Python, the log of the rank has its "
    "whole stack.",
    "crashed_at_exit": "A thread of compiled code still ran while Python shut down, after the program's last "
    "line; threads of torch's gloo do so now and then, also under torchrun.",
    "crashed_worker": "The crash is in compiled code that Python called. With train.workers=0 the log "
    "shows where.",
    "ended_worker": "With train.workers=0 the log shows where.",
    "left_early": "All ranks have to take the same number of steps.",
    "stalled": "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    "stalled_together": "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    "lost_node": "Its host or its network went down, or its agent was killed.",
    "lost_contact": "The host or the network of one of these nodes went down; batch.log and excluded.jsonl "
    "may name the node.",
    "unfit_node": "rank-0.log says what to check on that node.",
    "unable_node": "The log of that node (node-N.log) shows the error.",
}
"""The advice to a person about a failure, by kind."""


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
