"""The ranks of a job as workers of a script that runs beside rank 0."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from slurmddp.cli.main import main
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.scrub import scrub
from slurmddp.errors import ConfigError
from slurmddp.remote import job
from slurmddp.runs.failures.read import rank_exits
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


OWN = "import os\n\ndef rank():\n    return int(os.environ['RANK'])\n"


def test_the_script_runs_once_beside_rank_0_and_gives_the_exit_code(tmp_path, forked_python):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text(OWN)
    command = [forked_python, "-m", "slurmddp", "controller", "-n", "2", "--", "script.py", "3", "a b"]
    environ = {**scrub(os.environ), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("found [2.0, 2.0] [0, 1] ['3', 'a b']") == 1, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "code", "ends", "said"),
    [
        (SCRIPT, 0, 0, "found [2.0, 2.0] [0, 1] ['0', 'a b']"),
        ("print('alone')", 0, 0, "alone"),
        ("print('alone', flush=True)\nraise SystemExit(5)", 5, 1, "alone"),
    ],
    ids=["workers", "no workers", "a failure"],
)
def test_with_settings_the_script_and_its_workers_are_a_run(
    tmp_path, monkeypatch, capfd, forked_agents, text, code, ends, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "own.py").write_text(OWN)
    settings = ["name=own", "ranks_per_node=2", "snapshot=false"]
    assert main(["controller", *settings, "script.py", str(code), "a b"]) == ends
    assert capfd.readouterr().out.count(said) == 1
    run = only_run(tmp_path)
    assert run.config_file.is_file()
    assert [end.exit_code for end in rank_exits(run, 0)] == [code, 0]


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
