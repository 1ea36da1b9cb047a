"""The laptop's side: a host that prints without an end is left."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from slurmddp.control.ssh import connection
from slurmddp.control.ssh.connection import LoginNode, exchange
from slurmddp.errors import LoginNodeError


def test_a_host_that_prints_one_line_without_an_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec cat /dev/zero\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(connection, "_MOST_GREETING_BYTES", 10_000_000)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with (
        pytest.raises(LoginNodeError, match="login1 prints without an end"),
        exchange(LoginNode(host="login1", folder="project"), {"words": ["status"]}),
    ):
        raise AssertionError("there is no proof that slurmddp runs")
