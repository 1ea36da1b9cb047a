"""Scripts of other libraries: their own process group, and the threads of their ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from slurmddp import Distributon
from slurmddp.environments.scrub import scrub
from slurmddp.errors import MismatchError
from support.distributed.ranks import place_environments

pytestmark = pytest.mark.distributed

ADOPTS = """
import os, signal, sys, time, torch, torch.distributed as dist
from slurmddp import Distributon
from slurmddp.errors import StoppedAtCheckpoint

dist.init_process_group("gloo")
for attempt in (1, 2):
    try:
        with Distributon(seed=0) as d:
            d.launch()
            model = d.setup_model(torch.nn.Linear(1, 1, bias=False))
            d.backward(model(torch.full((1, 1), 1.0 + d.rank)).sum())
            assert not d.should_stop()
            if d.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while not d.should_stop():
                time.sleep(0.01)
            d.save(attempt, model=model)
            gradient = model.module.weight.grad.item()
            d.stop()
    except StoppedAtCheckpoint as stopped:
        assert "SIGTERM on rank 1" in str(stopped)
with Distributon() as d:
    d.launch()
total = torch.ones(1)
dist.all_reduce(total)
open(f"found-{dist.get_rank()}", "w").write(f"{total.item():g} {gradient:g}")
dist.destroy_process_group()
"""


def train(folder: Path, text: str, *more: str, **environ: str) -> None:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "slurmddp", "train", "program.script=script.py", "name=script", *more]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command, cwd=folder, env=scrub(environment) | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_launch_uses_the_process_group_of_the_program(tmp_path: Path) -> None:
    train(tmp_path, ADOPTS)
    assert [(tmp_path / f"found-{rank}").read_text() for rank in range(2)] == ["2 1.5", "2 1.5"]


def test_a_group_that_contradicts_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with Distributon(1) as d:
            assert d.launch().world_size == 1
        assert distributed.is_initialized()
        for name, value in place_environments(2)[1].items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MismatchError, match=r"says rank 0 of 1, .* says rank 1 of 2"):
            Distributon(2).launch()
    finally:
        distributed.destroy_process_group()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    text = """
import pytest
from slurmddp import Distributon, SlurmddpError
with Distributon() as first:
    first.launch()
    with pytest.raises(SlurmddpError, match="has not been closed"):
        Distributon().launch()
"""
    train(tmp_path, text)


@pytest.mark.parametrize("given", [None, "2"])
def test_ranks_of_a_script_share_the_cores(tmp_path: Path, given: str | None) -> None:
    text = "import os, torch\nopen('threads-' + os.environ['RANK'], 'w').write(str(torch.get_num_threads()))"
    train(tmp_path, text, **({} if given is None else {"OMP_NUM_THREADS": given}))
    most = max(1, len(os.sched_getaffinity(0)) // 2)
    found = [int((tmp_path / f"threads-{rank}").read_text()) for rank in range(2)]
    assert all(threads == 2 if given else threads <= most for threads in found)
