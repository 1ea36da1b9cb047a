"""A rank of a past attempt changes nothing in the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import publish
from slurmddp.checkpoint.files.manifest import WRITING
from slurmddp.errors import SupersededError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.run_log import RunLog

STATE = {"weight": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of which this process is attempt 0."""
    folder = RunFolder(tmp_path / "gpt-1")
    folder.claim_attempt()
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(folder.path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "0")
    return folder


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_past_attempt_saves_and_deletes_nothing(folder: RunFolder) -> None:
    checkpoint.write(folder.checkpoints_dir, 1, STATE, meta={}, keep_last=3)
    folder.claim_attempt()
    half_written = folder.checkpoints_dir / f"{WRITING}step-0000000002-77"
    half_written.mkdir()
    (half_written / "part").write_text("by the later attempt")
    before = contents(folder.path)
    with pytest.raises(SupersededError):
        checkpoint.write(folder.checkpoints_dir, 2, STATE, meta={}, keep_last=3)
    with pytest.raises(SupersededError):
        checkpoint.abandon(folder.checkpoints_dir, 0, 1)
    with pytest.raises(SupersededError):
        checkpoint.quarantine_newest(folder.checkpoints_dir, 1)
    assert contents(folder.path) == before


def test_an_attempt_that_is_superseded_during_a_write_does_not_publish(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(folder.checkpoints_dir, 1, STATE, meta={}, keep_last=3)
    before = contents(folder.checkpoints_dir)

    def complete(path: Path, manifest: object) -> None:
        folder.claim_attempt()

    monkeypatch.setattr(publish, "complete", complete)
    with pytest.raises(SupersededError):
        checkpoint.write(folder.checkpoints_dir, 2, STATE, meta={}, keep_last=3)
    assert contents(folder.checkpoints_dir) == before
    assert [path.name for path in folder.checkpoints_dir.iterdir() if path.is_dir()] == ["step-0000000001"]


def test_a_past_attempt_does_not_move_the_pointer_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(folder.checkpoints_dir, 5, STATE, meta={}, keep_last=3)

    def move_in(temporary: Path, target: Path) -> None:
        temporary.rename(target)
        folder.claim_attempt()

    monkeypatch.setattr(publish, "_move_in", move_in)
    with pytest.raises(SupersededError):
        checkpoint.write(folder.checkpoints_dir, 4, STATE, meta={}, keep_last=3)
    assert (folder.checkpoints_dir / "latest").read_text() == "step-0000000005\n"


def test_files_that_a_later_attempt_deletes_are_reported_as_superseded(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(path: Path, manifest: object) -> None:
        folder.claim_attempt()
        raise FileNotFoundError(path)

    monkeypatch.setattr(publish, "complete", complete)
    with pytest.raises(SupersededError):
        checkpoint.write(folder.checkpoints_dir, 1, STATE, meta={}, keep_last=3)


def test_a_past_attempt_writes_no_events_no_metrics_and_no_sample(folder: RunFolder) -> None:
    journal = RunLog(RunContext.read(os.environ, folder), active=True)
    journal.event("first_step", step=1)
    journal.step(1, loss=1.0, lr=0.1, rate=1.0)
    folder.claim_attempt()
    before = contents(folder.path)
    with pytest.raises(SupersededError):
        journal.event("saved", step=2)
    with pytest.raises(SupersededError):
        journal.step(2, loss=1.0, lr=0.1, rate=1.0)
    with pytest.raises(SupersededError):
        journal.metrics(2, {"eval_loss": 1.0})
    with pytest.raises(SupersededError):
        journal.sample("To be")
    assert contents(folder.path) == before


def test_other_ranks_of_a_past_attempt_stay_silent(folder: RunFolder) -> None:
    folder.claim_attempt()
    RunLog(RunContext.read(os.environ, folder), active=False).event("saved", step=2)
    assert not folder.attempts_file.exists()
