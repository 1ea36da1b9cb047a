"""The state that only memory holds when an attempt ends without a save."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.checkpoint.files.manifest import TENSORS_FILE, checkpoint_folders, verify
from slurmddp.checkpoint.memory import shared_buffer
from slurmddp.checkpoint.memory.service import Keeper
from slurmddp.launchers.coordinator.records import Records
from slurmddp.runs.folder.layout import RunFolder
from support.runs.checkpoint_services import TENSORS, Rank, request, wait_for


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    return run


def steps(root: Path) -> list[int]:
    return [verify(path).step for path in checkpoint_folders(root)]


def test_the_newest_state_is_written_though_no_rank_has_asked(
    tmp_path: Path, folder: RunFolder, make_keeper: Callable[..., Keeper]
) -> None:
    root = tmp_path / "checkpoints"
    keeper = make_keeper()
    rank = Rank(keeper)
    for step in (1, 2, 3, 4):
        os.close(rank.lay(0, step, root=root))
        rank.line.send(request(root, 0, step, keep_last=9))
        wait_for(keeper)
    os.close(rank.lay(0, 8, root=root))
    os.close(rank.lay(1, 9, root=root))
    rank.line.close()
    assert keeper.save_newest(folder.path, 2) == 9
    assert keeper.save_newest(folder.path, 2) is None, "it is asked for already"
    wait_for(keeper)
    assert steps(root) == [9, 4, 3, 2, 1], "what else there is stays"
    assert (checkpoint_folders(root)[0] / TENSORS_FILE).read_bytes() == TENSORS
    (event,) = folder.events()
    assert (event["event"], event["step"], event["attempt"]) == ("saved", 9, 2)
    assert event["copied"] == 0.0, "when the state was laid there"
    assert not any(shared_buffer.is_busy(number) for number in keeper.memory_fds())
    assert keeper.save_newest(folder.path, 2) is None, "it is on the disk"


def test_a_copy_that_a_kill_cut_short_is_none(
    tmp_path: Path, folder: RunFolder, make_keeper: Callable[..., Keeper]
) -> None:
    keeper = make_keeper()
    rank = Rank(keeper)
    os.close(rank.lay(0, 7, root=tmp_path))
    os.close(rank.lay(1, 9, root=tmp_path, sealed=False))
    assert keeper.save_newest(folder.path, 0) == 7
    wait_for(keeper)
    assert steps(tmp_path) == [7]


def test_a_state_that_a_rank_has_asked_to_be_written_is_written_once(
    tmp_path: Path, folder: RunFolder, make_keeper: Callable[..., Keeper]
) -> None:
    keeper = make_keeper()
    rank = Rank(keeper)
    os.close(rank.lay(0, 7, root=tmp_path))
    rank.line.send(request(tmp_path, 0, 7))
    assert keeper.save_newest(folder.path, 0) is None
    wait_for(keeper)
    assert steps(tmp_path) == [7]


def test_nothing_is_written_where_memory_holds_nothing(
    folder: RunFolder, make_keeper: Callable[..., Keeper]
) -> None:
    assert make_keeper().save_newest(folder.path, 0) is None


def test_of_several_agents_that_hold_a_state_one_writes_it(
    tmp_path: Path, folder: RunFolder, make_keeper: Callable[..., Keeper]
) -> None:
    folder.log_dir(0).mkdir(parents=True)
    keepers = [make_keeper(), make_keeper()]
    for keeper in keepers:
        os.close(Rank(keeper).lay(0, 7, root=tmp_path))
        Records(folder, 0).save_newest(keeper)
    assert [keeper.busy() for keeper in keepers] == [True, False]
    os.close(Rank(keepers[1]).lay(1, 9, root=tmp_path))
    Records(folder, 0).save_newest(keepers[1])
    assert keepers[1].busy(), "a newer state is another one"
    for keeper in keepers:
        wait_for(keeper)
    assert steps(tmp_path) == [9, 7]


def test_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, folder: RunFolder, make_keeper: Callable[..., Keeper],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    keeper = make_keeper()
    os.close(Rank(keeper).lay(0, 7, root=tmp_path))

    def fails(root: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("slurmddp.checkpoint.memory.service.newest_step", fails)
    Records(folder, 0).save_newest(keeper)
    assert "Stale file handle" in capfd.readouterr().err
    assert not keeper.busy()
