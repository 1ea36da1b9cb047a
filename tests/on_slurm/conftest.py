"""The real SLURM that these tests run on: one sandbox of three nodes for the whole session.

Without SLURM the tests fail, and the message says what to install: a test that is skipped tests nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import bring_back, mount_everywhere, own_sandbox
from support.slurm.stub_runs import slurm, start

__all__ = ["slurm", "start"]


@pytest.fixture(scope="session", autouse=True)
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the nodes of all sandboxes mount the folders of the tests, if pytest was started with --shared."""
    kind = request.config.getoption("--shared")
    if kind:
        mount_everywhere(kind, tmp_path_factory.getbasetemp())


def scope_of_the_sandbox(fixture_name: str, config: pytest.Config) -> str:
    """Return the scope of the common sandbox: a folder can be the brick of one sandbox at a time."""
    return "module" if config.getoption("--shared") == "glusterfs" else "session"


@pytest.fixture(scope=scope_of_the_sandbox)
def sandbox(shared_folder: None) -> Iterator[FaultySandbox]:
    """A sandbox of three nodes that is up; as root each node is a host with an address of its own."""
    with own_sandbox("t", nodes=3) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_in_the_sandbox(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a test left, and bring back the nodes that it killed or cut off."""
    if "sandbox" not in request.fixturenames:
        yield
        return
    used: FaultySandbox = request.getfixturevalue("sandbox")
    yield
    bring_back(used)
