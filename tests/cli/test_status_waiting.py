"""`slurmddp status` names the nodes that have not joined."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmddp.cli.commands.status import _awaited

BEGUN = "slurmddp agent: node 0 of 3 on n1, attempt 0: imports took 2.10 s, ranks here: 8\n"
WAITS = "slurmddp agent: waiting for node 2 (n3); 2 of 3 nodes are here, and all start their ranks together\n"


@pytest.mark.parametrize(
    ("state", "name", "text", "is_shown"),
    [
        ("running", "node-0.log", BEGUN + WAITS + WAITS, True),
        ("running", "node-0.log", BEGUN + WAITS + "slurmddp agent: node 2 (n3) is lost\n", False),
        ("running", "node-0.log", "", False),
        ("running", "rank-0.log", WAITS, False),
        ("failed", "node-0.log", BEGUN + WAITS, False),
    ],
)
def test_the_nodes_for_which_the_others_wait_are_named(
    tmp_path: Path, state: str, name: str, text: str, is_shown: bool
) -> None:
    log = tmp_path / name
    log.write_text(text)
    one = SimpleNamespace(state=state, log=log)
    words = "node 2 (n3); 2 of 3 nodes are here, and all start their ranks together"
    assert list(_awaited(one)) == ([("waiting", words)] if is_shown else [])


def test_a_run_without_a_log_waits_for_nobody() -> None:
    assert list(_awaited(SimpleNamespace(state="running", log=None))) == []
