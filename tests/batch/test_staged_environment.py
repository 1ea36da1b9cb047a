"""The copy of an environment on a node's own disk: made once, whole or not at all, removed when unused."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurmddp.batch import staged_environment
from slurmddp.batch.attempt import Attempt
from slurmddp.batch.staged_environment import (
    UNUSED_S,
    environment_of,
    is_whole,
    key,
    remove_unused,
    staged,
)
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import wait_until
from support.slurm.slurm_jobs import batch_settings


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with one module."""
    made = tmp_path / "shared" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (packages_of(made) / "mine.py").write_text("print(__file__)\n")
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The node's own disk."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def packages_of(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def attempt_in(tmp_path: Path, **settings: str) -> tuple[Attempt, list[str]]:
    said: list[str] = []
    folder = RunFolder(tmp_path / "run")
    folder.log_dir(0).mkdir(parents=True, exist_ok=True)
    return Attempt(folder, 0, batch_settings(**settings), "41", said.append), said


def test_a_copy_has_the_packages_and_is_made_once(environment: Path, disk: Path, tmp_path: Path) -> None:
    attempt, said = attempt_in(tmp_path)
    pythons = {staged(str(environment / "bin/python"), str(disk), attempt) for _ in range(2)}
    (python,) = pythons
    assert [line.split(" in ")[0] for line in said] == [
        f"{environment} was copied to {Path(python).parents[1]}"
    ]
    show = "import sys, mine; print(sys.prefix)"
    lines = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.split()
    copy = disk / f"slurmddp-{os.getuid()}" / key(environment)
    assert lines == [str(packages_of(copy) / "mine.py"), str(copy)]


def test_two_jobs_at_once_make_one_copy(environment: Path, disk: Path, tmp_path: Path) -> None:
    attempt, said = attempt_in(tmp_path)
    arguments = (str(environment / "bin/python"), str(disk), attempt)
    jobs = [threading.Thread(target=staged, args=arguments) for _ in range(3)]
    [job.start() for job in jobs]
    [job.join() for job in jobs]
    assert len(said) == 1
    assert sorted(path.suffix for path in disk.glob("*/*")) == ["", ".lock"]


def test_an_installed_package_gives_another_copy(environment: Path) -> None:
    before = key(environment)
    assert key(environment) == before
    (packages_of(environment) / "mine-1.dist-info").mkdir()
    assert key(environment) != before


def test_a_linked_environment_is_copied_whole(environment: Path, disk: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(environment)
    python = staged(str(tmp_path / "link/bin/python"), str(disk), attempt_in(tmp_path)[0])
    assert not Path(python).parents[1].is_symlink()


def test_a_failed_copy_leaves_nothing(environment: Path, disk: Path, tmp_path: Path) -> None:
    (environment / "bin/python").unlink()
    (environment / "bin/python").write_text("#!/bin/sh\necho /elsewhere\n")
    (environment / "bin/python").chmod(0o755)
    with pytest.raises(SlurmddpError, match="but /elsewhere"):
        staged(str(environment / "bin/python"), str(disk), attempt_in(tmp_path)[0])
    assert [path.suffix for path in disk.glob("*/*")] == [".lock"]


def test_what_no_job_uses_is_removed(environment: Path, disk: Path, tmp_path: Path) -> None:
    place = disk / f"slurmddp-{os.getuid()}"
    place.mkdir(mode=0o700)
    old = time.time() - UNUSED_S - 60
    unused = dict.fromkeys(("old", "used", "kept", "a.part", "b.part", "c.gone"), old)
    for name, touched in {**unused, "new": old + 120}.items():
        (place / name).mkdir()
        (place / name / "file").touch()
        os.utime(place / name, (touched, touched))

    # Its lock file was removed from outside, and is not the one that the next job finds.
    folder = os.open(place / "kept", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_SH)
    with open(place / "used.lock", "w") as lock, open(place / "b.lock", "w") as other:
        fcntl.flock(lock, fcntl.LOCK_SH)
        fcntl.flock(other, fcntl.LOCK_EX)
        staged(str(environment / "bin/python"), str(disk), attempt_in(tmp_path)[0])
    os.close(folder)

    def folders() -> set[str]:
        return {path.name for path in place.iterdir() if path.is_dir()}

    used = {"used", "kept", "new", "b.part", key(environment)}
    wait_until(lambda: folders() <= used, "the removal of what no job uses")
    assert folders() == used


def test_a_removal_that_is_interrupted_leaves_no_half_copy(
    environment: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, attempt = str(environment / "bin/python"), attempt_in(tmp_path)[0]
    copy = Path(staged(python, str(disk), attempt)).parents[1]
    for lock in open_locks(copy):
        os.close(lock)
    with monkeypatch.context() as patched:
        patched.setattr(staged_environment, "UNUSED_S", -60)
        patched.setattr(staged_environment.subprocess, "run", lambda *_, **__: None)  # The node goes down.
        remove_unused(copy.parent)
    assert not copy.exists()
    assert staged(python, str(disk), attempt) == str(copy / "bin/python") and is_whole(copy)


@pytest.mark.parametrize("damage", ["missing", "empty", "no list", "made by an earlier version"])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_copy_that_lost_files_is_made_again_unless_a_job_uses_it(
    environment: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, is_used: bool
) -> None:
    """Programs that remove old files from /tmp remove single ones."""
    attempt, said = attempt_in(tmp_path)
    copy = Path(staged(str(environment / "bin/python"), str(disk), attempt)).parents[1]
    if not is_used:
        for lock in open_locks(copy):
            os.close(lock)
    if damage == "missing":
        (packages_of(copy) / "mine.py").unlink()
    elif damage == "empty":
        (packages_of(copy) / "mine.py").write_text("")
    else:
        (copy / "slurmddp-files.json").write_text("{" if damage == "no list" else "")
    monkeypatch.setattr(staged_environment, "_IN_USE_S", 0.1)
    if is_used:
        with pytest.raises(SlurmddpError, match="while another job uses it"):
            staged(str(environment / "bin/python"), str(disk), attempt)
        return
    staged(str(environment / "bin/python"), str(disk), attempt)
    assert len(said) == 2 and (packages_of(copy) / "mine.py").read_text() == "print(__file__)\n"


def open_locks(copy: Path) -> list[int]:
    """Return the descriptors of this process that lock a copy."""
    names = {str(copy), f"{copy}.lock"}
    links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    return [int(link.name) for link in links if str(link.readlink()) in names]


def test_a_copy_is_locked_as_long_as_its_agent_lives(environment: Path, disk: Path, tmp_path: Path) -> None:
    staged(str(environment / "bin/python"), str(disk), attempt_in(tmp_path)[0])
    (lock,) = disk.glob("*/*.lock")
    for path in (lock, lock.with_suffix("")):
        other = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    assert all(map(os.get_inheritable, open_locks(lock.with_suffix(""))))


@pytest.mark.parametrize(
    ("folder", "said"), [("$NOT_THERE/x", "not an absolute path"), ("{open}", "only you can write")]
)
def test_unsafe_folders_are_refused(
    folder: str, said: str, environment: Path, disk: Path, tmp_path: Path
) -> None:
    place = disk / f"slurmddp-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(ConfigError, match=said):
        staged(str(environment / "bin/python"), folder.format(open=disk), attempt_in(tmp_path)[0])


def test_an_interpreter_of_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    with pytest.raises(ConfigError, match="no virtual environment"):
        environment_of(str(tmp_path / "bin/python"))
    with pytest.raises(ConfigError, match="no interpreter"):
        environment_of(str(tmp_path / "bin/other"))


def test_without_a_copy_the_agent_starts_from_the_original_and_a_warning_is_recorded(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(environment / "bin/python")
    attempt, said = attempt_in(tmp_path, python=python, stage=str(tmp_path / "no-disk"))
    started: list[list[str]] = []
    monkeypatch.setattr(staged_environment.os, "execvp", lambda _file, words: started.append(words))
    staged_environment.start_agent(attempt)
    assert started == [[python, "-m", "slurmddp.launchers.agent", str(attempt.folder.path)]]
    (event,) = attempt.folder.events()
    assert (event["event"], event["about"], event["text"]) == ("warned", "stage", said[0])
    assert "No such file or directory" in said[0] and "use the original" in said[0]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755])
def test_a_disk_where_others_can_replace_the_copy_is_not_used(
    environment: Path, disk: Path, tmp_path: Path, mode: int
) -> None:
    disk.chmod(mode)
    arguments = (str(environment / "bin/python"), str(disk), attempt_in(tmp_path)[0])
    if mode == 0o777:
        with pytest.raises(ConfigError, match=f"{disk} is writable for everybody"):
            staged(*arguments)
        assert not list(disk.iterdir())
    else:
        assert Path(staged(*arguments)).is_relative_to(disk)
