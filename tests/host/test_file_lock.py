"""On file systems without locks, no caller crashes, and no live process counts as ended."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from slurmddp.batch import staged_environment
from slurmddp.batch.attempt import Attempt
from slurmddp.checkpoint.files import publish, retention
from slurmddp.host.atomic_file import replacing
from slurmddp.runs.folder.jsonl import append_line, read_lines
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.sandbox.machine import machine_lock
from slurmddp.training.process_group import rendezvous
from support.slurm.slurm_jobs import batch_settings

WITHOUT_LOCKS = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL]


def write_a_file(folder: Path) -> None:
    with replacing(folder / "latest") as stream:
        stream.write(b"step-0000000001\n")
        retention.clear_leftovers(folder)
    assert (folder / "latest").read_text() == "step-0000000001\n"


def append_a_line(folder: Path) -> None:
    append_line(folder / "events.jsonl", {"event": "started"})
    assert list(read_lines(folder / "events.jsonl")) == [{"event": "started"}]


def lock_a_run(folder: Path) -> None:
    first, second = RunLock(RunFolder(folder)), RunLock(RunFolder(folder))
    assert first.acquire() and not second.acquire()
    first.release()
    assert second.acquire()
    second.release()


def clear_a_folder_of_checkpoints(folder: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = folder / f".writing-step-0000000001-{ended.pid}"
    deleted = folder / ".deleting-step-0000000000"
    for path in (dead, deleted):
        path.mkdir()
        (path / "state.json").write_text("{")
    with (
        publish.fresh_folder(folder, "step-0000000001", 0) as first,
        publish.fresh_folder(folder, "step-0000000002", 0) as second,
    ):
        assert sorted(folder.iterdir()) == sorted([first, second]), "only the files of live writers are left"
    # The writer may write again if a removal failed once, or if a container has a process of the same pid.
    first.mkdir()
    with publish.fresh_folder(folder, "step-0000000001", 0) as again:
        assert again == first


def start_an_agent_from_a_copy(folder: Path) -> None:
    environment = folder / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    python = environment / "bin" / "python"
    python.touch(mode=0o755)
    run = RunFolder(folder / "run")
    run.path.mkdir()
    (folder / "disk").mkdir()
    lines: list[str] = []
    settings = batch_settings(python=str(python), stage=str(folder / "disk"))
    started: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "execvp", lambda program, _words: started.append(program))
        staged_environment.start_agent(Attempt(run, 0, settings, "41", lines.append))
    assert started == [str(python)] and "The ranks there use the original" in lines[0]


def lock_the_machine(_folder: Path) -> None:
    with machine_lock():
        pass


def leave_a_store_to_torch(folder: Path) -> None:
    (folder / "store").write_bytes(b"cut")
    rendezvous._refuse_damaged(str(folder / "store"))


CALLERS = [
    write_a_file,
    append_a_line,
    lock_a_run,
    clear_a_folder_of_checkpoints,
    start_an_agent_from_a_copy,
    lock_the_machine,
    leave_a_store_to_torch,
]


@pytest.mark.parametrize("code", WITHOUT_LOCKS, ids=errno.errorcode.get)
@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
def test_each_caller_does_its_work_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caller: Callable[[Path], None], code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    caller(tmp_path)


@pytest.mark.parametrize("caller", [write_a_file, append_a_line, lock_a_run, lock_the_machine])
def test_each_caller_does_its_work_on_a_file_system_that_locks_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caller: Callable[[Path], None]
) -> None:
    """NFS locks bytes in place of the file, and refuses an exclusive lock on a file open for reading."""
    flock = fcntl.flock

    def as_on_nfs(file: int | IO[bytes], operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if is_file and operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    caller(tmp_path)
