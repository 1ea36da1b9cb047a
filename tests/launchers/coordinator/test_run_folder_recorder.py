"""An agent that can't read its run folder for a while assumes nothing and continues."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder
from slurmddp.runs.failures.failure import lost_node
from slurmddp.runs.folder.layout import RunFolder


def stale(*words: Any, **options: Any) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_a_failure_that_can_not_be_read_now_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.log_dir(0).mkdir(parents=True)
    folder.failure_file(0).write_text('{"rank": 1, "host": "n1", "exit_code": 1, "signal": null}')
    records = RunFolderRecorder(folder, 0)
    with monkeypatch.context() as broken:
        broken.setattr(os, "open", stale)
        assert records.failure() is None
    found = records.failure()
    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize(("step", "told"), [(40, "; they had completed step 40."), (-1, "on 2 node(s).")])
def test_ranks_that_had_completed_no_step_are_not_said_to_have_come_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, told: str
) -> None:
    (tmp_path / "logs" / "attempt-0").mkdir(parents=True)
    cause = lost_node(1, ["a", "b", "c"], "no heartbeat for 10 s")
    after, before = Assignment(1, (0, 2)), Assignment(0, (0, 1))
    RunFolderRecorder(RunFolder(tmp_path), 0).restarted(after, before, cause, step, 10.25)
    assert capsys.readouterr().err.endswith(f"{told}\n")
    (event,) = RunFolder(tmp_path).events()
    assert event.get("silent_s") == (10.25 if step >= 0 else None)


def test_the_nodes_that_are_awaited_are_an_event_of_the_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    RunFolderRecorder(folder, 0).awaits("node 2 (n3)")
    assert [(event["event"], event["attempt"], event["nodes"]) for event in folder.events()] == [
        ("awaits", 0, "node 2 (n3)")
    ]
