"""Rules for every test: each process and variable that a test starts or sets ends with it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from slurmddp.sandbox.plan import SHARED

pytest_plugins = ["support.fixtures"]

# The same examples in every run, none of them on the clock, and none from a file of an earlier run.
settings.register_profile(
    "steady", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# A background job of a script inherits them as ignored, and so would the programs that tests interrupt.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# pytest sets the one, torch the other at the first step of an optimizer.
VOLATILE = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the nodes of the SLURM tests see the tests' folders through a shared file system."""
    parser.addoption("--shared", choices=SHARED, help="mount the folders of the tests on all nodes")


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process, and nothing of one that has ended meanwhile."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join(process.cmdline())[:120] or process.name()  # It has no command line while it starts.
    except psutil.NoSuchProcess:
        return ""


def children() -> dict[psutil.Process, str]:
    """Return the children that run; multiprocessing's tracker of resources stays as long as pytest does."""
    running = {}
    # psutil's children() reads every process of the machine, which adds up over thousands of tests.
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):
            for pid in file.read_text().split():
                with suppress(psutil.NoSuchProcess):
                    child = psutil.Process(int(pid))
                    running[child] = command_line(child)
    return {child: line for child, line in running.items() if line and "resource_tracker" not in line}


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and all that they have started: a test that fails should not disturb those after it."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for one in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks an environment variable, a child process or a torch process group."""
    environment, processes, begin = dict(os.environ), children(), time.time()

    def left_behind() -> set[psutil.Process]:
        # The kernel may skip a child in a read during which another one exits, so `processes` may lack some.
        return {one for one in children().keys() - processes if one.create_time() > begin - 1}

    yield
    deadline = time.monotonic() + 120
    while (left := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [command_line(process) for process in left]
    end(left)
    changed = {key for key, _ in set(environment.items()) ^ set(os.environ.items())} - VOLATILE
    assert not left, f"processes left running: {lines}"
    assert not changed, f"environment variables changed: {sorted(changed)}"
    distributed = sys.modules.get("torch.distributed")
    open_group = distributed and distributed.is_available() and distributed.is_initialized()
    assert not open_group, "a process group is left"


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests an index of runs apart from the person's, before a module copies the environment."""
    state = tempfile.TemporaryDirectory(prefix="slurmddp-state-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name


@pytest.fixture(scope="session", autouse=True)
def apart_from_the_person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run all tests in an empty folder: the one in which pytest was started may hold runs of the person."""
    folder = tmp_path_factory.mktemp("working-folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="session")
def state_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Name folders that do not exist; pytest would read all folders of the session for each name."""
    home = tmp_path_factory.mktemp("state")
    return (home / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_state_home(
    nothing_is_left_behind: None, state_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give each test an index of runs of its own, so that it never reads the runs of another test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(state_homes)))


@pytest.fixture(autouse=True)
def nothing_is_written_here(apart_from_the_person: Path) -> Iterator[None]:
    """Fail a test that writes into its working folder without entering a folder of its own."""
    yield
    written = sorted(path.name for path in apart_from_the_person.iterdir())
    for name in written:
        path = apart_from_the_person / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not written, f"files in the working folder: {written}"
