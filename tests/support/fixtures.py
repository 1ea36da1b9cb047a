"""Fixtures of several rooms: named run folders, a SLURM, links, checkpoint services, forked ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.host import process
from slurmddp.launchers.link.connection import Connection
from slurmddp.runs import index
from slurmddp.runs.folder.layout import RunFolder
from support.distributed import ranks
from support.runs.checkpoint_services import Rank, fork_writer
from support.runs.projects import make_project
from support.slurm.login_node import LoginNode, login_node
from support.slurm.slurm_in_memory import FakeSlurm
from support.slurm.slurm_jobs import FakePrograms

CONFIG = """\
name: gpt
nodes: 2
ranks_per_node: 2
train:
  steps: 400
"""


@pytest.fixture
def slurm(monkeypatch):
    fake = FakeSlurm()
    monkeypatch.setattr("slurmddp.cli.commands.logs.SlurmClient", lambda **options: fake)
    for action in ("stop", "cancel", "resume", "diff", "explain", "listing", "status", "logs", "report"):
        monkeypatch.setattr(f"slurmddp.control.{action}.SlurmClient", lambda **options: fake)
    return fake


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put the programs of `fake_slurm/` on the PATH; files in the returned folder determine their replies."""
    fake = FakePrograms(tmp_path / "slurm")
    for name, value in fake.environ.items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n")
    return path


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def make_run(tmp_path):
    def make(name="gpt-0a1b2c3d"):
        folder = RunFolder(tmp_path / "project" / "runs" / name)
        folder.path.mkdir(parents=True)
        folder.config_file.write_text(CONFIG)
        index.remember(folder)
        return folder

    return make


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no kernel acknowledge bytes, as if each silent host were off the network."""
    monkeypatch.setattr(Connection, "is_acknowledged", lambda self, within_s: False)


@pytest.fixture
def star():
    """Return a function that registers a star of links (`support.runs.links`) to close after the test."""
    with contextlib.ExitStack() as open_stars:

        def make(made):
            open_stars.callback(made.close)
            return made

        yield make


MakeService = Callable[..., CheckpointService]


@pytest.fixture
def make_service():
    """Make services with the writer of an agent, or with a forked writer that calls `perform`."""
    services = []

    def make(perform=None):
        start = (partial(fork_writer, perform),) if perform else ()
        services.append(CheckpointService(*start))
        return services[-1]

    yield make
    for service in services:
        service.finish(0.0)
        service.close()

    while Rank.channels:
        Rank.channels.pop().close()


@pytest.fixture
def service(make_service):
    """A checkpoint service with the writer of an agent."""
    return make_service()


@pytest.fixture
def alone():
    """A launched Distributon of one rank."""
    from slurmddp import Distributon

    with Distributon(1, seed=0) as d:
        yield d.launch()


@pytest.fixture(scope="session")
def rank_server():
    """Fork ranks from a server that has imported torch, so that a test of four ranks costs one import.

    The server starts before any test looks for processes that are left.
    """
    importlib.import_module("torch._dynamo")  # It sets a variable; the first optimizer would import it.
    ranks.start_server()
    yield
    ranks.stop_server()


@pytest.fixture
def forked_agents(forked_python, monkeypatch):
    """Fork the agents and ranks of local runs that the test starts from the server of forked ranks."""
    from support.distributed import forked_agents

    monkeypatch.setattr(process, "start_bound", partial(forked_agents.start, forked_python))


@pytest.fixture(scope="session")
def forked_python(rank_server):
    """The path of a program that acts as `sys.executable`, in forks of a server that has imported torch."""
    from support.distributed.forked_python import python_server

    with python_server() as python:
        yield python


@pytest.fixture(scope="module")
def forked_programs(forked_python):
    """Run each program that `sys.executable` starts in a fork of a server that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forked_python)
        yield


@pytest.fixture
def store_host(rank_server):
    """A process that hosts a store of torch, which the test may kill, and a connection to the store."""
    from torch.distributed import TCPStore

    ours, theirs = ranks.CONTEXT.Pipe(duplex=False)
    with ours, theirs:
        host = ranks.CONTEXT.Process(target=ranks.host_store, args=(theirs,))
        host.start()
        yield host, TCPStore("127.0.0.1", ours.recv(), is_master=False, wait_for_workers=False)
        host.kill()
        host.join()
        host.close()


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a project of the laptop that names a login node."""
    project = tmp_path / "laptop" / "project"
    (project / "conf" / "cluster").mkdir(parents=True)
    (project / "conf" / "cluster" / "far.yaml").write_text("ssh: login1\nranks_per_node: 2\n")
    (project / "train.py").write_text("print('first')\n")
    (project / "old.py").write_text("")
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data" / "large.bin").write_text("ignored")
    (project / ".env").write_text("TOKEN=secret")
    # On a laptop where each account has its own group, the group may write.
    for path in (project, *project.rglob("*")):
        path.chmod(0o775 if path.is_dir() else 0o664)
    subprocess.run(["git", "init", "--quiet", "."], cwd=project, check=True)
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def node(
    laptop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: str
) -> Iterator[LoginNode]:
    with login_node(tmp_path / "cluster", python=forked_python) as node:
        monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
        yield node


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder for the tests of the configuration."""
    return make_project(tmp_path / "project")
