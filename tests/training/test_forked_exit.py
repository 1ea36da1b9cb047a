"""A program that forks: the end of a child does not affect process group and saves of its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SAVES = """
import os, sys
from pathlib import Path
import torch
from slurmddp.training.distributon import Distributon

root, model = Path(sys.argv[1]), torch.nn.Linear(2000, 2000)
with Distributon() as d:
    d.launch()
    d.save(root, 1, wait=False, model=model)
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    d.save(root, 2, wait=False, model=model)
    d.finish_saving()
print(*sorted(path.name for path in root.glob("step-*")))
"""

AGREES = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from slurmddp.training.stopping.agreement import StopAgreement

store = dist.FileStore(sys.argv[1], 2)
with StopAgreement(store, 0, 2, poll_s=0.005, timeout_s=0.3) as agreement:
    assert not agreement.should_stop()
    before = store.num_keys()
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    print(store.num_keys() - before)
    os._exit(0)  # The other rank never comes.
"""


def told(program: str, path: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_child_reads_no_answer_of_the_writer(tmp_path: Path) -> None:
    assert told(SAVES, tmp_path / "checkpoints") == "step-0000000001 step-0000000002"


def test_a_child_takes_no_part_in_the_agreement_on_a_stop(tmp_path: Path) -> None:
    assert told(AGREES, tmp_path / "store") == "0"
