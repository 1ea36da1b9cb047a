"""A run on this machine that can't write down what becomes of it: that changes nothing of it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from slurmddp.errors import RankFailure
from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from support.runs.local_runs import local_run

FULL = OSError(errno.ENOSPC, "No space left on device")


def full(*words: Any, **facts: Any) -> None:
    raise FULL


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail every event after the first one; return the lines shown to the person."""
    told: list[str] = []
    add = RunFolder.add_event

    def add_event(self: RunFolder, event: str, **facts: Any) -> None:
        full() if event == "ended" else add(self, event, **facts)

    monkeypatch.setattr(RunFolder, "add_event", add_event)
    return told


def test_a_training_that_finished_has_finished(tmp_path: Path, said: list[str]) -> None:
    run = local_run(tmp_path, "def main(run_dir): return 0", ranks_per_node=1, say=said.append)
    run.start()
    assert run.wait() == 0
    assert said == ["ended was not recorded: [Errno 28] No space left on device"]


def test_a_failure_is_told(tmp_path: Path, said: list[str]) -> None:
    run = local_run(tmp_path, "def main(run_dir): return 3", ranks_per_node=1, say=said.append)
    run.start()
    with pytest.raises(RankFailure, match="exit code 3"):
        run.wait()
    assert len(said) == 1


def test_an_agent_that_is_gone_ends_the_run_as_ever(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = local_run(tmp_path, command=["false"], say=said.append)
    monkeypatch.setattr(capture, "record", full)
    run.start()
    with pytest.raises(RankFailure, match=r"A rank failed\."):
        run.wait()
    assert [line.split(" was not ")[0] for line in said] == ["the failure", "ended"]
