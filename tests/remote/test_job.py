"""The ranks of a job as workers of a script that runs beside rank 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.scrub import scrub
from slurmddp.errors import ConfigError
from slurmddp.remote import job
from slurmddp.training.process_group.setup import finish, start
from support.runs.train_runs import only_run

pytestmark = pytest.mark.distributed

SCRIPT = """
import os, sys
from slurmddp import remote

assert "RANK" not in os.environ
with remote.workers(9) as w:
    parts = [remote.ones(2, node=node) for node in range(len(w))]
    w.all_reduce(parts)
    ranks = [remote.call("own.rank", node=node).fetch() for node in range(len(w))]
    print("found", parts[1].tolist(), ranks, sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("words", "code"), [(["-n", "2", "--"], 3), (["name=own", "ranks_per_node=2", "snapshot=false"], 0)]
)
def test_the_script_runs_once_beside_rank_0_and_gives_the_exit_code(tmp_path, words, code):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text("import os\n\ndef rank():\n    return int(os.environ['RANK'])\n")
    command = [sys.executable, "-m", "slurmddp", "controller", *words, "script.py", str(code), "a b"]
    environ = {**scrub(os.environ), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count(f"found [2.0, 2.0] [0, 1] ['{code}', 'a b']") == 1, done.stdout + done.stderr
    if code == 0:
        assert (only_run(tmp_path).path / "config.yaml").is_file()


def test_a_script_that_uses_no_workers_or_fails_ends_all_ranks(tmp_path):
    for text, code in (("print('alone')", 0), ("raise SystemExit(5)", 5)):
        (tmp_path / "script.py").write_text(text)
        command = [sys.executable, "-m", "slurmddp", "controller", "-n", "2", "script.py"]
        done = subprocess.run(command, cwd=tmp_path, env=scrub(os.environ), capture_output=True, timeout=200)
        assert done.returncode == code, done.stderr


def test_g12_ranks_without_a_secret_serve_nobody(monkeypatch):
    monkeypatch.delenv("SLURMDDP_SECRET", raising=False)
    with pytest.raises(ConfigError, match="anybody could control"):
        job.main(["script.py"])


def test_a_rank_that_connects_after_the_script_has_ended_ends_without_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    context = start(RankInfo(environment="local"))
    assert job.serve(address, context) is None, "it returns, and raises nothing"
    finish(context)
