"""The kinds of failures: a name, a phrase for sentences and a remedy for each.

Every decision about a failure goes by its kind. The reason beside it is a phrase for people.
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
"""A rank that hangs: alone, or in a collective that not all ranks have joined."""
LOST_NODES = frozenset[FailureKind]({"lost_node", "lost_contact", "unfit_node", "unable_node"})
"""A node that is gone for the others: silent, cut off, refused by the preflight, or without ranks."""

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
    "stalled_together": "stalled: in a collective that not all have joined",
    "lost_node": "was lost",
    "lost_contact": "lost each other",
    "unfit_node": "was lost to the preflight",
    "unable_node": "was lost to the ranks",
}
"""The first words of the reasons of each kind."""

ADVICE: Mapping[FailureKind, str] = {
    "out_of_memory": "Ask for more with mem_gb=, or take a smaller train.batch_size or fewer train.workers.",
    "out_of_gpu_memory": "Take a smaller train.batch_size; train.accumulate=N keeps what a step is made of.",
    "shared_memory_full": "Data workers pass batches on through it: take fewer train.workers (0 needs none), "
    "or give the container more (--shm-size).",
    "disk_full": "Make room there, or ask for a larger quota.",
    "too_many_files": "Raise the limit (`ulimit -n`), or take fewer train.workers.",
    "port_taken": "A script that starts its own ranks needs ranks_per_node=1; others should use MASTER_PORT.",
    "wrong_python": "Name an interpreter that is there, and that has slurmddp and torch, with `python:` in "
    "the cluster file.",
    "lost_peer": "Look for the rank or node that ended first.",
    "killed": "On a cluster the batch log and `sacct` may say who killed it.",
    "unhandled_signal": "`scancel --signal` or a program on the node sent it. Handle it in the program; "
    "`slurmddp stop` lets a run save and stop.",
    "crashed": "The crash is in compiled code. The output of the rank has the whole stack of a Python "
    "program.",
    "crashed_at_exit": "A thread of compiled code still ran while Python shut down, after the program's last "
    "line; threads of torch's gloo do so now and then, also under torchrun.",
    "crashed_worker": "The crash is in compiled code below Python; with train.workers=0 the log shows where.",
    "ended_worker": "With train.workers=0 the log shows where.",
    "left_early": "All ranks have to take the same number of steps.",
    "stalled": "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    "stalled_together": "Read the stacks of all ranks: stacks-rank-R.txt beside the logs.",
    "lost_node": "Its host or its network went down, or its agent was killed.",
    "lost_contact": "The host or the network of one of them went down; "
    "batch.log and excluded.jsonl may name it.",
    "unfit_node": "rank-0.log says what to check on that node.",
    "unable_node": "The log of that node says more.",
}
"""The advice for the failures of each kind."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended: a kind with a name, and a phrase."""

    kind: FailureKind
    reason: str
    """One phrase for people; empty if unknown."""

    @classmethod
    def of(cls, kind: FailureKind, detail: str = "") -> Cause:
        """Return a cause of a kind; its reason is the phrase in `PHRASES`, with a detail after a colon."""
        phrase = PHRASES[kind]
        return cls(kind, f"{phrase}: {detail}" if detail else phrase)


UNKNOWN = Cause("other", "")
