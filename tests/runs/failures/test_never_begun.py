"""An agent that can't begin on its node: what Python or SLURM says of it is told, not that it was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.failures.read import read_failure
from slurmddp.runs.folder.layout import RunFolder

CANCELLED = "slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-22T02:21:40 ***\n"
TRACEBACK = """Traceback (most recent call last):
  File "/site-packages/slurmddp/runs/durable.py", line 16, in <module>
    import xxhash
{}
"""
NO_PYTHON = "slurmstepd-n2: error: execve(): /no/python: No such file or directory\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.log_dir(0).mkdir(parents=True)
    run.add_event("ended", attempt=0, lost={0: "n1", 1: "n2"})
    return run


@pytest.mark.parametrize(
    ("said", "reason", "code"),
    [
        (TRACEBACK.format("ModuleNotFoundError: No module named 'xxhash'"), "No module named 'xxhash'", 1),
        (TRACEBACK.format("ImportError: libmpi.so: cannot open shared object file"), "libmpi.so", 1),
        ("/usr/bin/python3: No module named slurmddp\n", "No module named slurmddp", 1),
        (NO_PYTHON, "execve(): /no/python: No such file or directory", 2),
    ],
)
def test_what_kept_it_from_beginning_is_told(folder: RunFolder, said: str, reason: str, code: int) -> None:
    (folder.log_dir(0) / "node-0.log").write_text(CANCELLED)
    (folder.log_dir(0) / "node-1.log").write_text(said)
    found = read_failure(folder, 0)
    assert found is not None
    assert found.sentence.startswith(f"the agent of node 1 on n2 ended with exit code {code}: ")
    assert reason in found.reason
    assert found.last_lines == tuple(said.splitlines())


@pytest.mark.parametrize(
    "said",
    ["", CANCELLED, "a warning of some library\n", "slurmddp agent: node 1 of 2 on n2\n" + NO_PYTHON],
)
def test_one_that_was_killed_left_no_word(folder: RunFolder, said: str) -> None:
    (folder.log_dir(0) / "node-1.log").write_text(said)
    found = read_failure(folder, 0)
    assert found is not None
    assert found.sentence == "the agent on n1, n2 left no word: it was killed, or its host is gone"
