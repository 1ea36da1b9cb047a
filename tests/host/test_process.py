"""Requests to the kernel at the start of a process."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmddp.host import process


def refuse(*arguments: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def test_the_starter_is_seen_through_a_shell_with_the_same_variables() -> None:
    program = "import os; from slurmddp.host.process import starter; print(starter(os.environ, ['PMI_RANK']))"
    shell = ["sh", "-c", f'{sys.executable} -c "{program}"; exit $?']
    environ = {**os.environ, "PMI_RANK": "1"}
    result = subprocess.run(shell, env=environ, stdout=subprocess.PIPE, check=True, timeout=400)
    assert int(result.stdout) == os.getpid()


@pytest.mark.parametrize("ask", [lambda: process.die_with_parent(signal.SIGTERM), process.adopt_orphans])
def test_a_request_that_the_kernel_refuses_is_reported(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "platform", "linux")
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(prctl=refuse))
    with pytest.warns(UserWarning, match="Operation not permitted") as warned:
        ask()
    assert len(warned) == 1


def test_a_process_without_a_command_line_may_become_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as orphan:
        children = tmp_path / str(os.getpid()) / "task" / str(os.getpid()) / "children"
        children.parent.mkdir(parents=True)
        children.write_text(str(orphan.pid))
        fields = tmp_path / str(orphan.pid)
        fields.mkdir()
        (fields / "stat").write_text(f"{orphan.pid} (sleep) R {os.getpid()} {orphan.pid} 0")
        (fields / "cmdline").touch()
        monkeypatch.setattr(process, "PROC", tmp_path)

        begin = time.monotonic()
        process.end_group_of_dead(orphan.pid, timeout_s=0.3)

        assert orphan.wait(timeout=60) == -signal.SIGKILL
        assert time.monotonic() - begin >= 0.3, "the process had time to end"
