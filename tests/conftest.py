"""What holds for every test: nothing that it started or set may outlive it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

# pytest sets the one, torch the other at the first step of an optimizer.
VOLATILE = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


def children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks an environment variable, a child process or a torch process group."""
    environment, processes = dict(os.environ), children()
    yield
    deadline = time.monotonic() + 5
    while (left := children() - processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [" ".join(process.cmdline())[:120] for process in left if process.is_running()]
    allowed = [name for name in names if "resource_tracker" in name]
    changed = {key for key, _ in set(environment.items()) ^ set(os.environ.items())} - VOLATILE
    assert len(names) == len(allowed), f"processes left running: {names}"
    assert not changed, f"environment variables changed: {sorted(changed)}"
    distributed = sys.modules.get("torch.distributed")
    open_group = distributed and distributed.is_available() and distributed.is_initialized()
    assert not open_group, "a process group is left"


@pytest.fixture(autouse=True)
def own_state_home(
    nothing_is_left_behind: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the index of runs of the person who tests out of the tests, and theirs out of it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
