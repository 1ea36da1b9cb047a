"""The laptop's side: a host that prints without an end is left, and an error holds the words of ssh."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from slurmddp.control.ssh import connection
from slurmddp.control.ssh.connection import LoginNode, exchange
from slurmddp.errors import LoginNodeError


def become_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo hello >&2; echo 'ssh: connect to host c: refused.' >&2; exit 255",
         "c can't be reached by ssh, or the connection broke: ssh: connect to host c: refused. Nothing was "
         "done."),
        ("exit 255", "c can't be reached by ssh, or the connection broke. Nothing was done."),
        ("echo 'bash: slurmddp: command not found' >&2; exit 127",
         "c can't run `slurmddp` (exit code 127): bash: slurmddp: command not found. Nothing was done."),
    ],
    ids=["refused", "silent", "no slurmddp"],
)  # fmt: skip
def test_an_error_holds_the_words_of_ssh_as_in_a_notebook_nobody_sees_its_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str, quiet: bool
) -> None:
    become_ssh(tmp_path, monkeypatch, script)
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    node, request = LoginNode(host="c", folder="project"), {"words": ["status"]}
    with pytest.raises(LoginNodeError) as raised, exchange(node, request, quiet=quiet):
        raise AssertionError("there is no proof that slurmddp runs")
    assert raised.value.message == error
    assert bool(stderr.getvalue()) == (">&2" in script and not quiet)


def test_a_host_that_prints_one_line_without_an_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_ssh(tmp_path, monkeypatch, "exec cat /dev/zero")
    monkeypatch.setattr(connection, "_MAX_GREETING_BYTES", 10_000_000)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with (
        pytest.raises(LoginNodeError, match="login1 prints endless output"),
        exchange(LoginNode(host="login1", folder="project"), {"words": ["status"]}),
    ):
        raise AssertionError("there is no proof that slurmddp runs")
