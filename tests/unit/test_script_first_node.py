"""What people are told of an attempt whose first node is lost, and with it the script that would tell."""

from __future__ import annotations

import socket

from script_nodes import PUT_BACK, ask_hostless, first_is_lost, refusing, run, slurmd
from script_run import Run

from slurmddp.runs.failures.model import read_failure

__all__ = ["refusing", "run", "slurmd"]


def test_the_first_node_is_named(run: Run, refusing: int) -> None:
    assert ask_hostless(first_is_lost(run, port=refusing)) == PUT_BACK
    found = read_failure(run.folder, 0)
    assert found is not None
    assert found.sentence == "the agent on n1 left no word: it was killed, or its host is gone"


def test_a_first_node_that_answers_is_not(run: Run, slurmd: socket.socket) -> None:
    slurmd.listen()
    assert ask_hostless(first_is_lost(run, port=slurmd.getsockname()[1])) == []
    assert read_failure(run.folder, 0) is None
