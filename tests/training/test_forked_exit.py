"""A program that forks: the end of a child does not affect process group and saves of its parent."""

from __future__ import annotations

import os
import subprocess
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
    d.save(1, root=root, wait=False, model=model)
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    d.save(2, root=root, wait=False, model=model)
    d.finish_saving()
print(*sorted(path.name for path in root.glob("step-*")))
"""

AGREES = """
import os, sys
import torch.distributed as dist
from slurmddp.training.stopping.agreement import StopAgreement

store = dist.FileStore(sys.argv[1], 2)
agreement = StopAgreement(store, 0, 2, poll_s=0.005)
assert not agreement.should_stop()
before = store.num_keys()
if os.fork() == 0:
    sys.exit(0)  # At its exit, a rank closes the agreement.
assert os.wait()[1] == 0
print(store.num_keys() - before, flush=True)
os._exit(0)  # The other rank never comes.
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [(SAVES, "step-0000000001 step-0000000002"), (AGREES, "0")],
    ids=["reads no answer of the writer", "takes no part in the agreement on a stop"],
)
def test_a_child_of_a_rank(tmp_path: Path, program: str, found: str, forked_python: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [forked_python, "-c", program, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, found), done.stderr
