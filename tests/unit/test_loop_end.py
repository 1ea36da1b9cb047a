"""An agent that writes a checkpoint to its end, when all is over, and what it may hear meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurmddp.environments.limits import Limits
from slurmddp.environments.rank_info import RankInfo
from slurmddp.launchers.control.link import Message
from slurmddp.launchers.crew import Crew
from slurmddp.launchers.events import Happened, Line
from slurmddp.launchers.generation import Rules
from slurmddp.launchers.keeper import Keeper
from slurmddp.launchers.loop import AgentLoop
from slurmddp.launchers.records import Records
from slurmddp.launchers.watch.node_watch import Watch
from slurmddp.runs.folder import RunFolder

GO = {"kind": "go", "generation": 0, "agents": [0, 1], "master": ("", 0), "look": True, "unfit": []}


class Script:
    """Node 1's agent: at each turn it hears the next word; after the last one its checkpoint is written."""

    def __init__(self, folder: Path, *words: Message) -> None:
        self._words = list(words)
        node = RankInfo(environment="slurm", node_rank=1, rank=1, nodes=2, world_size=2, hosts=("n0", "n1"))
        link = SimpleNamespace(send=lambda to, message: None, missing=list)
        self.done: list[str] = []
        keeper = SimpleNamespace(
            handle=lambda: None,
            hurry=lambda: self.done.append("hurry"),
            busy=lambda: bool(self._words),
            finish=lambda timeout_s: True,
        )
        crew = SimpleNamespace(step=7, reap=list, failures=lambda ended: [], start=lambda *a, look: None)
        crew.end = lambda grace_s: None
        watch = SimpleNamespace(look=lambda now: [], next_look=lambda: float("inf"))
        self.loop = AgentLoop(
            Line(node, cast(Any, link), cast(Any, self)),
            Rules(nodes=2),
            cast(Crew, crew),
            cast(Keeper, keeper),
            cast(Watch, watch),
            Records(RunFolder(folder), 0),
            Limits(),
        )

    def wait(self, until: float) -> Happened:
        self.done.append(self._words[0]["kind"])
        return Happened([], [(0, self._words.pop(0))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs/attempt-0").mkdir(parents=True)
    return tmp_path


def test_what_an_attempt_has_ended_with_stands_though_node_0_is_lost_then(folder: Path) -> None:
    script = Script(folder, GO, {"kind": "end", "code": 1}, {"kind": "lost", "why": "connection closed"})
    assert script.loop.run() == 1
    assert script.loop.lost_lead, "the batch script may be gone with it"
    assert not RunFolder(folder).failure_file(0).exists()


def test_an_agent_that_stays_for_a_checkpoint_lets_it_be_written_in_a_hurry(folder: Path) -> None:
    script = Script(folder, GO, {"kind": "leave", "code": 75}, {"kind": "other"})
    assert script.loop.run() == 75
    assert script.done == ["go", "leave", "hurry", "other"]
