"""The real SLURM that these tests run on: one sandbox of three nodes for the whole session.

Without SLURM the tests fail, and the message says what to install: a test that is skipped tests nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub_runs import slurm, start

from slurmddp.errors import SlurmddpError
from slurmddp.slurm.sandbox import Sandbox

__all__ = ["slurm", "start"]


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox of three nodes that is up; as root each node is a host with an address of its own."""
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as folder:
        made = Sandbox(f"t{os.getpid()}", root=Path(folder) / "sandbox", nodes=3)
        try:
            made.up()
        except SlurmddpError as error:
            pytest.fail(f"{error.message} {error.hint}", pytrace=False)
        try:
            yield made
        finally:
            made.down()


@pytest.fixture(autouse=True)
def nothing_left_in_the_sandbox(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a test left, and bring back the nodes that it killed or cut off."""
    if "sandbox" not in request.fixturenames:
        yield
        return
    used: Sandbox = request.getfixturevalue("sandbox")
    yield
    assert used.cancel_jobs(), f"jobs that can't be cancelled: {used.jobs()}"
    for node in used.nodes:
        used.restore_node(node)
    wait_for_idle(used)


def wait_for_idle(used: Sandbox, timeout_s: float = 180) -> None:
    """Wait until every node can take a job."""
    deadline = time.monotonic() + timeout_s
    while set((states := used.status().nodes).values()) != {"idle"}:
        assert time.monotonic() < deadline, f"nodes did not come back: {states}"
        time.sleep(0.1)
