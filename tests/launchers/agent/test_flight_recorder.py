"""NCCL's flight recorder where a node has no room for its pipes."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.agent.agent import Agent
from slurmddp.runs.folder.layout import RunFolder


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(RunFolder(tmp_path), 0, RankInfo(environment="slurm"), SignalInbox(()))


def test_a_node_without_a_folder_for_pipes_trains_without_the_recorder(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*words: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert agent._flight_recorder(8) is None
    said = capsys.readouterr().err
    assert "NCCL's flight recorder stays off on this node: [Errno 28] No space left on device" in said


def test_it_is_for_nodes_with_gpus(agent: Agent) -> None:
    assert agent._flight_recorder(0) is None
    recorder = agent._flight_recorder(8)
    assert recorder is not None
    recorder.close()
