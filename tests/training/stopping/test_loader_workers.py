"""Loader workers end with their rank, however it ends and whatever they are doing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

PROGRAM = '''
import ctypes
import os
import sys
import time

import torch

from slurmddp.training.stopping.signals import hold_in_worker, signals_held


class Stuck(torch.utils.data.Dataset):
    """Data that comes never, as from a file system that hangs."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        os.write(1, b"worker %d\\n" % os.getpid())  # whole, whatever the other worker writes meanwhile
        if sys.argv[1] == "fork":
            ctypes.PyDLL(None).sleep(600)  # no thread of Python's gets a turn meanwhile
        time.sleep(600)


if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Stuck(), num_workers=2, worker_init_fn=hold_in_worker, multiprocessing_context=sys.argv[1]
    )
    with signals_held():
        batches = iter(loader)
    next(batches)
'''


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_die_with_a_rank_that_is_killed(tmp_path: Path, context: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    rank = subprocess.Popen([sys.executable, str(program), context], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    try:
        workers = [int(rank.stdout.readline().split()[1]) for _ in range(2)]
        assert all(map(is_alive, workers))
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    # Torch's own watchdog looks every five seconds, and only between two batches.
    deadline = time.monotonic() + 60
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, workers))
