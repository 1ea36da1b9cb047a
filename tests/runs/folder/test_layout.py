"""Two attempts of a run are alive at once: the run belongs to the later attempt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.errors import EXIT_NO_PROGRESS, SupersededError
from slurmddp.launchers.agent import worker
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from support.runs.agent_runs import make_run, start_agent


def environ(folder: RunFolder, attempt: int) -> dict[str, str]:
    return {"SLURMDDP_RUN_DIR": str(folder.path), "SLURMDDP_ATTEMPT": str(attempt)}


def test_the_attempt_claimed_last_has_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "gpt-1")
    older, newer = folder.claim_attempt(), folder.claim_attempt()
    assert folder.is_superseded(older)
    assert not folder.is_superseded(newer)
    RunContext.read(environ(folder, newer)).refuse_superseded()
    with pytest.raises(
        SupersededError, match=r"Attempt 0 of gpt-1 still runs.*a later attempt has started"
    ) as caught:
        RunContext.read(environ(folder, older)).refuse_superseded()
    assert caught.value.exit_code == EXIT_NO_PROGRESS


def test_a_process_of_no_attempt_and_a_folder_without_logs_are_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    RunContext.read({}).refuse_superseded()
    RunContext.read(environ(folder, 0)).refuse_superseded()
    assert not folder.is_superseded(0)


def test_a_new_attempt_is_never_taken_for_an_old_one_because_logs_were_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log_dir(7).mkdir(parents=True)
    folder.log_dir(7).with_name("attempt-of-mine").mkdir()
    assert folder.claim_attempt() == 8
    assert not folder.is_superseded(8)


def test_a_run_of_which_nothing_can_be_read_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.stop_file.touch()
    with monkeypatch.context() as broken:
        broken.setattr(os, "scandir", lambda *arguments: os.open(tmp_path / "absent", os.O_RDONLY))
        assert not folder.is_over(0)
    assert folder.is_over(0)


LATER = """
import os

def main(run_dir):
    os.makedirs(run_dir + "/logs/attempt-1", exist_ok=True)
    return 79
"""
"""A program that starts a later attempt while it runs."""


def test_an_attempt_after_which_another_has_begun_starts_no_ranks(tmp_path: Path) -> None:
    folder = make_run(tmp_path, LATER)
    folder.log_dir(1).mkdir(parents=True)
    with start_agent(folder) as agent:
        assert agent.wait(timeout=240) == 0
    assert not list(folder.log_dir(0).glob("rank-*.log"))
    assert not folder.attempts_file.exists()


def test_the_agent_of_a_past_attempt_leaves_events_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path, LATER)
    with start_agent(folder) as agent:
        assert agent.wait(timeout=240) == 0, "after a failure srun would cancel the step with the same id"
    assert (folder.log_dir(0) / "exit-node-0").read_text() == "79\n"
    assert (folder.log_dir(0) / "failure.json").exists()
    assert not folder.attempts_file.exists()


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_no_other_account_can_put_a_link_where_a_rank_opens_its_log(tmp_path: Path, umask: int) -> None:
    folder, precious = RunFolder(tmp_path / "run"), tmp_path / "precious"
    precious.touch()
    before = os.umask(umask)
    try:
        attempt = folder.claim_attempt()
    finally:
        os.umask(before)
    for path in (folder.path / "logs", folder.log_dir(attempt)):
        assert path.stat().st_mode & 0o777 == 0o755 & ~umask
    folder.rank_log(attempt, 0).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        worker._write_to(folder.rank_log(attempt, 0))
