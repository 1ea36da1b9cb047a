"""The flush of the newest in-memory state when an attempt ends without a save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.checkpoint.files.manifest import TENSORS_FILE, checkpoint_folders, verify
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder
from slurmddp.runs.folder.layout import RunFolder
from support.distributed.trainer_runs import new_folder
from support.fixtures import MakeService
from support.runs.checkpoint_services import TENSORS, Rank, request, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_folder(tmp_path / "run")


def steps(root: Path) -> list[int]:
    return [verify(path).step for path in checkpoint_folders(root)]


def test_the_newest_state_is_written_without_a_request(
    tmp_path: Path, folder: RunFolder, service: CheckpointService
) -> None:
    root = tmp_path / "checkpoints"
    rank = Rank(service)
    for step in (1, 2, 3, 4):
        os.close(rank.add_buffer(0, step, root=root))
        rank.channel.send(request(root, 0, step, keep_last=9))
        wait_for(service)
    os.close(rank.add_buffer(0, 8, root=root))
    os.close(rank.add_buffer(1, 9, root=root))
    rank.channel.close()
    assert service.flush_newest(folder.path, 2) == 9
    assert service.flush_newest(folder.path, 2) is None, "it is asked for already"
    wait_for(service)
    assert steps(root) == [9, 4, 3, 2, 1], "what else there is stays"
    assert (checkpoint_folders(root)[0] / TENSORS_FILE).read_bytes() == TENSORS
    (event,) = folder.events()
    assert (event["event"], event["step"], event["attempt"]) == ("saved", 9, 2)
    assert event["copied"] == 0.0, "when the state was laid there"
    assert not any(shared_buffer.is_writing(number) for number in service.memory_fds())
    assert service.flush_newest(folder.path, 2) is None, "it is on the disk"


def test_an_interrupted_copy_is_not_written(
    tmp_path: Path, folder: RunFolder, service: CheckpointService
) -> None:
    assert service.flush_newest(folder.path, 0) is None, "there is no state"
    rank = Rank(service)
    os.close(rank.add_buffer(0, 7, root=tmp_path))
    os.close(rank.add_buffer(1, 9, root=tmp_path, committed=False))
    assert service.flush_newest(folder.path, 0) == 7
    wait_for(service)
    assert steps(tmp_path) == [7]


def test_a_requested_state_is_written_once(
    tmp_path: Path, folder: RunFolder, service: CheckpointService
) -> None:
    rank = Rank(service)
    os.close(rank.add_buffer(0, 7, root=tmp_path))
    rank.channel.send(request(tmp_path, 0, 7))
    assert service.flush_newest(folder.path, 0) is None
    wait_for(service)
    assert steps(tmp_path) == [7]


def test_one_of_several_agents_writes_a_state(
    tmp_path: Path, folder: RunFolder, make_service: MakeService
) -> None:
    folder.log_dir(0).mkdir(parents=True)
    services = [make_service(), make_service()]
    for service in services:
        os.close(Rank(service).add_buffer(0, 7, root=tmp_path))
        RunFolderRecorder(folder, 0).flush_newest(service)
    assert [service.is_writing() for service in services] == [True, False]
    os.close(Rank(services[1]).add_buffer(1, 9, root=tmp_path))
    RunFolderRecorder(folder, 0).flush_newest(services[1])
    assert services[1].is_writing(), "a newer state is another one"
    for service in services:
        wait_for(service)
    assert steps(tmp_path) == [9, 7]


def test_an_unreadable_folder_is_reported(
    tmp_path: Path, folder: RunFolder, service: CheckpointService,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    os.close(Rank(service).add_buffer(0, 7, root=tmp_path))

    def fails(root: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("slurmddp.checkpoint.memory.service.newest_step", fails)
    RunFolderRecorder(folder, 0).flush_newest(service)
    assert "Stale file handle" in capfd.readouterr().err
    assert not service.is_writing()
