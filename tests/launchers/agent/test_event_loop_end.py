"""An agent that writes a checkpoint to its end, when all is over, and what it may hear meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.time_limits import TimeLimits
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.agent import stop_requests
from slurmddp.launchers.agent.event_loop import AgentLoop
from slurmddp.launchers.agent.node_watch import NodeWatch
from slurmddp.launchers.agent.worker_group import ForkedWorkers
from slurmddp.launchers.coordinator.messages import Fail, Joined, Leave, Lost, Message, StartWorkers, encode
from slurmddp.launchers.coordinator.restart_policy import rules_of
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder
from slurmddp.launchers.link.link import Link
from slurmddp.runs.failures.failure import from_json, lost_node
from slurmddp.runs.folder.layout import RunFolder

START = StartWorkers(restart_count=0, agents=(0, 1))
LOST = Lost(why="connection closed")


class Workers:
    """The ranks of node 1; `ended` are the exit codes that the next poll finds."""

    left = failed = ()
    save_by_themselves = False

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.codes: list[int] = []
        self.restart_count = 0
        self._begun = False

    @property
    def good_codes(self) -> list[int]:
        return self.codes

    def __bool__(self) -> bool:
        return self._begun

    def start(self, order: StartWorkers) -> None:
        self._begun = True

    def poll(self) -> list[Any]:
        if self._begun and self.ended:
            self.codes, self._begun = self.ended, False
        return []

    def ranks_apart(self) -> int:
        return 0

    def progress(self) -> tuple[int, float]:
        return 7, 0.0

    def wait(self, timeout_s: float) -> None:
        pass

    def stop(self, grace_s: float) -> None:
        self._begun = False


class Script:
    """Node 1's agent: it gets one message a turn; after the last one its checkpoint is written."""

    def __init__(self, folder: Path, *messages: Message, writes: bool = True) -> None:
        self._messages = list(messages)
        node = RankInfo(environment="slurm", node_rank=1, rank=1, nodes=2, world_size=2, hosts=("n0", "n1"))
        # The last message is node 0's farewell.
        link = SimpleNamespace(
            send=lambda to, message: None,
            missing=lambda: [] if self._messages else [0],
            descriptors=list,
            next_deadline=lambda: 0.0,
            handle=self.handle_link,
        )
        self.done: list[str] = []
        service = SimpleNamespace(
            descriptors=list,
            handle=lambda: None,
            take_unhealthy=dict,
            expedite=lambda: self.done.append("expedite"),
            flush_newest=self.flush_newest,
            is_writing=lambda: writes and bool(self._messages),
            finish=lambda timeout_s: True,
        )
        self.workers = Workers()
        watch = SimpleNamespace(deadline=float("inf"))
        self.loop = AgentLoop(
            node,
            cast(SignalInbox, SimpleNamespace(wait=lambda wait_s, others: [])),
            cast(Link, link),
            rules_of({}, 2),
            cast(ForkedWorkers, self.workers),
            cast(CheckpointService, service),
            cast(NodeWatch, watch),
            RunFolderRecorder(RunFolder(folder), 0),
            TimeLimits(),
            is_over=lambda: False,
        )

    def flush_newest(self, run_dir: Path, attempt: int, claim: Callable[[int, bool], bool]) -> None:
        """Note whether this agent may write a state that it holds alone, and its part of a sharded one."""
        self.done += [kind for kind, is_part in (("state", False), ("part", True)) if claim(3, is_part)]

    def handle_link(self) -> list[tuple[int, Any]]:
        self.done.append(type(self._messages[0]).__name__)
        return [(0, encode(self._messages.pop(0)))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs/attempt-0").mkdir(parents=True)
    return tmp_path


def test_what_an_attempt_has_ended_with_stands_though_node_0_is_lost_then(folder: Path) -> None:
    script = Script(folder, START, Fail(code=1), LOST)
    assert script.loop.run() == 1
    assert script.loop.lost_coordinator, "the batch script may be gone with it"
    assert not RunFolder(folder).failure_file(0).exists()


def test_an_agent_that_stays_for_a_checkpoint_has_it_written_urgently(folder: Path) -> None:
    script = Script(folder, START, Leave(code=75), Joined())
    assert script.loop.run() == 75
    assert script.done == ["StartWorkers", "Leave", "part", "expedite", "Joined"]


def test_an_agent_stays_as_long_as_node_0_which_may_have_a_state_to_write(folder: Path) -> None:
    script = Script(folder, START, Fail(code=1), Joined(), writes=False)
    assert script.loop.run() == 1
    assert script.done == ["StartWorkers", "Fail", "part", "expedite", "Joined"]


@pytest.mark.parametrize("agents", [(0, 1), (0, 2, 1)])
def test_every_agent_that_trains_may_save_what_memory_holds_when_the_first_is_lost(
    folder: Path, agents: tuple[int, ...]
) -> None:
    script = Script(folder, replace(START, agents=agents), LOST)
    script.loop.run()
    assert "state" in script.done and "part" not in script.done


def test_an_agent_that_no_longer_hears_the_first_one_can_not_tell_which_was_cut_off(folder: Path) -> None:
    script = Script(folder, START, Lost(why="no heartbeat for 10 s", together=1))
    script.loop.run()
    found = from_json(RunFolder(folder).failure_file(0).read_text())
    assert found is not None
    assert (found.node_rank, found.host) == (None, "n0, n1")


def test_a_spare_that_loses_the_first_agent_saves_nothing(folder: Path) -> None:
    script = Script(folder, replace(START, agents=(0, 2)), LOST)
    script.loop.run()
    assert not {"state", "part"} & set(script.done)


def test_what_has_finished_stays_finished_whatever_another_node_has_recorded(folder: Path) -> None:
    RunFolder(folder).failure_file(0).write_text(
        '{"rank": null, "host": "n2", "exit_code": 78, "signal": null}'
    )
    script = Script(folder, START, Leave(code=0))
    script.workers.ended = [0]
    assert script.loop.run() == 0


@pytest.mark.parametrize(("spare_nodes", "recorded"), [(0, True), (1, False)])
def test_an_agent_that_gives_up_without_node_0_ends_only_an_attempt_that_needs_it(
    folder: Path, spare_nodes: int, recorded: bool
) -> None:
    script = Script(folder)  # It has no link to node 0.
    script.loop._rules = rules_of({"nodes": 2, "spare_nodes": spare_nodes}, 2)
    script.loop.give_up(lost_node(1, ["n0", "n1"], "it can't go on"))
    assert RunFolder(folder).failure_file(0).exists() == recorded


def test_what_has_finished_needs_no_other_save(folder: Path) -> None:
    script = Script(folder, START, LOST)
    script.workers.ended = [0]
    assert script.loop.run() == 0
    assert script.loop.lost_coordinator
    assert not {"state", "part"} & set(script.done)


def test_a_state_is_still_written_when_slurm_is_about_to_kill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SIGKILL comes in 3.5 seconds: too late for ranks, and the batch script has to be left some of it.
    monkeypatch.setattr(stop_requests, "time", SimpleNamespace(time=lambda: 116.5))
    script = Script(folder, START, Joined())
    stops = script.loop._stops
    stops._limits, stops._terminated = TimeLimits(kill_wait_s=20.0), 100.0
    assert script.loop.run() == 75
    assert script.done == ["StartWorkers", "part", "expedite", "Joined"]
