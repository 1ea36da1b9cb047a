"""Faults of file systems: transient errors, full disks, quotas, foreign folders, late visibility."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files import manifest, retry, space, visibility
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs.folder import owner
from support.distributed.checkpoint_files import hidden_in, save, steps_in


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Record sleeps instead of sleeping."""
    slept = []
    fake = SimpleNamespace(sleep=slept.append)
    monkeypatch.setattr(retry, "time", fake)
    monkeypatch.setattr(visibility, "time", fake)
    return slept


class Flaky:
    """Fails the n-th to m-th of the calls of several functions of `os`, and lets all others pass."""

    def __init__(self, patch, first, last, code, names=("fsync", "rename", "replace", "mkdir")):
        self.calls, self.first, self.last, self.code = 0, first, last, code
        for name in names:
            patch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real):
        def call(*args, **kwargs):
            self.calls += 1
            if self.first <= self.calls <= self.last:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


# Errors that pass.


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT], ids=errno.errorcode.get
)
def test_one_transient_error_at_any_call_costs_one_wait(tmp_path, waits, caplog, code):
    for at in range(1, 40):
        root = tmp_path / str(at)
        save(root, 1)
        waits.clear()
        with pytest.MonkeyPatch.context() as patch:
            calls = Flaky(patch, at, at, code)
            save(root, 2)
        assert checkpoint.read(checkpoint.latest(root)).state == {"step": 2}
        assert (steps_in(root), hidden_in(root)) == ([2, 1], [])
        if calls.calls < at:
            assert not waits
            return
        if at == 1:  # the folder is there already, so that its mkdir failed does not matter
            continue
        assert waits == [0.5]
        assert os.strerror(code) in caplog.text and "trying again in 0.5 s" in caplog.text
    raise AssertionError("the save never came to its end")


def test_a_lasting_error_is_raised_after_all_waits(tmp_path, waits, monkeypatch):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        Flaky(patch, 1, 10**9, errno.EIO, names=("fsync",))
        with pytest.raises(CheckpointError, match=r"Input/output error.*untouched"):
            save(tmp_path, 2)
    assert waits == list(retry.WAITS_S)
    assert sum(waits) < 60
    assert (steps_in(tmp_path), hidden_in(tmp_path)) == ([1], [])


def test_each_try_writes_every_file_anew(tmp_path, monkeypatch):
    """A page that a failed fsync has dropped would be missing from a file that is only synced again."""
    opened = []
    real = Path.open

    def spy(self, mode="r", *args, **kwargs):
        if mode == "xb":
            opened.append(self.name)
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    with monkeypatch.context() as patch:
        Flaky(patch, 2, 2, errno.EIO, names=("fsync",))
        save(tmp_path, 1)
    assert opened == [
        "state.safetensors", "state.json", "state.safetensors", "state.json", "manifest.json",
    ]  # fmt: skip


def test_reads_are_retried_too(tmp_path, waits, monkeypatch):
    path = save(tmp_path, 1)
    real, left = manifest.read_regular, [2]

    def flaky(path):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path)

    monkeypatch.setattr(manifest, "read_regular", flaky)
    assert checkpoint.latest(tmp_path) == path
    left[0] = 1
    assert checkpoint.read(path).step == 1
    assert waits == [0.5, 1.0, 0.5]


# Space.


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO], ids=errno.errorcode.get
)
def test_a_lasting_error_at_any_call_leaves_older_checkpoints_unchanged(tmp_path, waits, code):
    for passing in range(40):
        root = tmp_path / str(passing)
        for step in (1, 2):
            save(root, step, keep_last=2)
        with pytest.MonkeyPatch.context() as patch:
            calls = Flaky(patch, passing + 1, 10**9, code)
            try:
                save(root, 3, {"w": torch.ones(5)}, keep_last=2)
            except CheckpointError as error:
                assert "step 3" in error.message and "untouched" in error.message and error.hint
                assert steps_in(root) in ([2, 1], [3, 2, 1])
        assert hidden_in(root) in ([], [".deleting-step-0000000001"])
        assert checkpoint.latest(root).name in ("step-0000000002", "step-0000000003")
        if calls.calls <= passing:
            assert steps_in(root) == [3, 2]
            assert bool(waits) == (code == errno.EIO), "permanent errors are not retried"
            return
    raise AssertionError("the save never came to its end")


def test_too_little_space_is_an_error_before_the_first_byte(tmp_path, monkeypatch):
    save(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(space, "free_bytes", lambda folder: 5_000_000)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 1, {"w": torch.zeros(2_000_000)})
    assert "it needs 8.0 MB and 1.0 MB to spare, but only 5.0 MB are free" in caught.value.message
    assert "train.keep_last" in caught.value.hint
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_leftovers_of_a_killed_writer_free_their_space_first(tmp_path, monkeypatch):
    left = tmp_path / ".writing-step-0000000001-77"
    left.mkdir()
    monkeypatch.setattr(space, "free_bytes", lambda folder: 0 if left.exists() else 10**9)
    assert save(tmp_path, 2).is_dir()


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "are free"), (errno.EDQUOT, "more than the quota has left")],
    ids=["disk", "quota"],
)
def test_a_refused_reservation_is_an_error(tmp_path, monkeypatch, code, words):
    save(tmp_path, 1)
    monkeypatch.setattr(space, "_fallocate", lambda descriptor, size: code)
    with pytest.raises(CheckpointError, match=r"it needs 8\.0 MB.*" + words):
        save(tmp_path, 2, {"w": torch.zeros(2_000_000)})
    assert (steps_in(tmp_path), hidden_in(tmp_path)) == ([1], [])


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR], ids=errno.errorcode.get)
def test_a_file_system_without_reservations_is_written_to(tmp_path, monkeypatch, code):
    monkeypatch.setattr(space, "_fallocate", lambda descriptor, size: code)
    assert checkpoint.read(save(tmp_path, 1)).step == 1


def test_a_reservation_reduces_the_free_space(tmp_path):
    with (tmp_path / "file").open("xb") as stream:
        space.reserve(stream.fileno(), 64 << 20, tmp_path)
        assert os.fstat(stream.fileno()).st_blocks * 512 >= 64 << 20
        assert os.fstat(stream.fileno()).st_size == 0


def test_no_reservation_exceeds_the_free_space(tmp_path, monkeypatch):
    """A call that can't be met takes what there is before it fails, and with it everybody's space."""
    asked = []
    monkeypatch.setattr(space, "_fallocate", lambda descriptor, size: asked.append(size) or 0)
    monkeypatch.setattr(space, "free_bytes", lambda folder: 50_000_000)
    with (tmp_path / "file").open("xb") as stream:
        with pytest.raises(space.NoRoomError, match=r"needs 60\.0 MB .*, but only 50\.0 MB are free"):
            space.reserve(stream.fileno(), 60_000_000, tmp_path)
        assert asked == []
        space.reserve(stream.fileno(), 40_000_000, tmp_path)
        assert asked == [40_000_000]


# The test save.


def test_a_check_leaves_no_files(tmp_path, caplog):
    save(tmp_path, 7)
    checkpoint.check_can_write(tmp_path, {"w": torch.zeros(1000)}, growth=8000, keep_last=3)
    assert (steps_in(tmp_path), hidden_in(tmp_path)) == ([7], [])
    assert (tmp_path / "latest").read_text() == "step-0000000007\n"
    assert caplog.text == ""


def test_a_check_finds_errors_of_this_save_and_of_larger_ones(tmp_path, monkeypatch, caplog):
    state = {"w": torch.zeros(1_000_000)}
    monkeypatch.setattr(space, "free_bytes", lambda folder: 10_000_000)
    checkpoint.check_can_write(tmp_path, state, keep_last=3)
    assert "has 10.0 MB of free space, but keeping 3 checkpoints of 4.0 MB takes up to 16.0 MB" in caplog.text
    with pytest.raises(CheckpointError, match=r"test save.*needs 12\.0 MB .*, but only 10\.0 MB are free"):
        checkpoint.check_can_write(tmp_path, state, growth=8_000_000, keep_last=3)
    with pytest.raises(CheckpointError, match=r"value at w is a builtins\.set"):
        checkpoint.check_can_write(tmp_path, {"w": {1}}, keep_last=3)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"test save to .* failed"):
        checkpoint.check_can_write(tmp_path / "file", state, keep_last=3)
    with monkeypatch.context() as patch:
        Flaky(patch, 1, 10**9, errno.EACCES, names=("mkdir",))
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpoint.check_can_write(tmp_path, state, keep_last=3)
    assert (steps_in(tmp_path), hidden_in(tmp_path)) == ([], [])


def test_a_check_detects_a_disk_that_returns_other_bytes(tmp_path, monkeypatch):
    real = os.fsync

    def lying(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == "state.safetensors":
            path.write_bytes(bytes(path.stat().st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", lying)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        checkpoint.check_can_write(tmp_path, {"w": torch.ones(9)}, keep_last=3)
    assert hidden_in(tmp_path) == []


# Other accounts.


@pytest.fixture
def as_somebody_else(monkeypatch):
    monkeypatch.setattr(owner.os, "geteuid", lambda: 54321)


def test_nothing_is_written_into_a_folder_of_another_account(tmp_path, as_somebody_else):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    for act in (
        lambda: save(run / "checkpoints", 1),
        lambda: checkpoint.check_can_write(run / "checkpoints", {}, keep_last=3),
    ):
        with pytest.raises(ConfigError, match=r"belongs to .* runs as account 54321.*Nothing was written"):
            act()
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_a_damaged_checkpoint_of_another_account_is_skipped_and_not_renamed(tmp_path, monkeypatch, caplog):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / "state.json").unlink()
    first.rename(tmp_path / ".replaced-step-0000000001")
    save(tmp_path / "x", 1).rename(first)
    monkeypatch.setattr(owner.os, "geteuid", lambda: 54321)
    assert checkpoint.latest(tmp_path) == first
    assert checkpoint.quarantine_newest(tmp_path, 2) is None
    with pytest.raises(ConfigError, match="belongs to"):
        checkpoint.abandon(tmp_path, 1, 2)
    assert second.is_dir() and (tmp_path / ".replaced-step-0000000001").is_dir()
    assert (tmp_path / "latest").read_text() == "step-0000000002\n"
    assert "could not be renamed" in caplog.text


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o755, ""), (0o777, "everybody"), (0o1777, ""), (0o775, "its group"), (0o700, "")],
)
def test_a_folder_that_others_may_write_to_gives_one_warning(tmp_path, monkeypatch, caplog, mode, words):
    monkeypatch.setattr(owner, "_warned", set())
    real = Path.stat

    def stat(self, **options):
        found = real(self, **options)
        if self != tmp_path / "run":
            return found
        kind = found.st_mode & ~0o7777
        return SimpleNamespace(st_mode=kind | mode, st_uid=found.st_uid, st_gid=found.st_uid + 1)

    root = tmp_path / "run" / "checkpoints"
    save(root, 1)
    monkeypatch.setattr(Path, "stat", stat)
    for _ in range(2):
        checkpoint.latest(root)
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(words)
    assert not words or (str(tmp_path / "run") in said[0] and words in said[0] and "chmod go-w" in said[0])


# A host that does not see the checkpoint yet.


def test_a_host_waits_until_the_checkpoint_is_visible(tmp_path, waits, monkeypatch):
    there = save(tmp_path / "there", 5)
    here = tmp_path / "here" / there.name
    appear = iter([
        lambda: here.parent.mkdir(),
        lambda: save(here.parent, 5, {"other": 1}),
        lambda: (shutil.rmtree(here), shutil.copytree(there, here)),
    ])  # fmt: skip

    def sleep(seconds):
        waits.append(seconds)
        next(appear)()

    monkeypatch.setattr(visibility, "time", SimpleNamespace(sleep=sleep))
    visibility.wait_until_visible(here, visibility.fingerprint(there))
    assert waits == list(visibility.WAITS_S[:3])


def test_the_error_of_an_invisible_checkpoint_names_the_host(tmp_path, waits):
    there = save(tmp_path / "there", 5)
    with pytest.raises(CheckpointError) as caught:
        visibility.wait_until_visible(tmp_path / "here" / there.name, visibility.fingerprint(there))
    assert f"does not exist on {os.uname().nodename}" in caught.value.message
    assert "all nodes share" in caught.value.hint
    assert waits == list(visibility.WAITS_S)
    save(tmp_path / "here", 5, {"other": 1})
    with pytest.raises(CheckpointError, match="has another manifest on"):
        visibility.wait_until_visible(tmp_path / "here" / there.name, visibility.fingerprint(there))


def test_a_manifest_that_is_damaged_for_this_host_is_no_older_checkpoint(tmp_path, waits):
    there = save(tmp_path, 5)
    mark = visibility.fingerprint(there)
    path = there / manifest.MANIFEST_FILE
    path.write_text(path.read_text().replace("{", "$", 1))
    with pytest.raises(manifest.DamagedError, match=r"manifest\.json is damaged"):
        visibility.wait_until_visible(there, mark)
    assert waits == list(visibility.WAITS_S)


def test_a_host_without_permission_does_not_wait(tmp_path, waits, monkeypatch):
    there = save(tmp_path, 5)

    def refuse(self):
        raise OSError(errno.EACCES, "Permission denied")

    mark = visibility.fingerprint(there)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"can't be read on .*: Permission denied"):
        visibility.wait_until_visible(there, mark)
    assert waits == []
