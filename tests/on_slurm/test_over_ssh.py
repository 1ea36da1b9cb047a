"""From a laptop over ssh to a real SLURM: submit, look, cancel, resume and see the end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.runs import ssh_runs
from slurmddp.sandbox import Sandbox
from support.slurm.login_node import login_node

pytestmark = pytest.mark.slurm

SCRIPT = """
import os
import time

rank, size, attempt = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "SLURMDDP_ATTEMPT"))
print(f"rank {rank} of {size} in attempt {attempt}", flush=True)
while attempt == "0":
    time.sleep(0.1)
"""


def test_a_job_of_a_real_slurm_is_handled_from_a_laptop(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    laptop = tmp_path / "laptop"
    laptop.mkdir()
    (laptop / "work.py").write_text(SCRIPT)
    monkeypatch.chdir(laptop)

    def said(*words: str) -> str:
        capfd.readouterr()
        assert main(list(words)) == 0
        return capfd.readouterr().out

    def wait(ready: str, *words: str) -> None:
        deadline = time.monotonic() + 240
        while ready not in (text := said(*words)):
            assert time.monotonic() < deadline, text
            time.sleep(0.5)

    with login_node(tmp_path / "cluster", sandbox.environment()) as node:
        monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
        start = ["+cluster=sandbox", "ssh=login1", "name=far", "nodes=2", "ranks_per_node=1", "work.py"]
        assert "job     " in said("run", *start)
        name = ssh_runs.ssh_runs()[-1].name
        assert (node.home / "slurmddp" / "laptop" / "runs" / name).is_dir()
        wait("rank 0 of 2 in attempt 0", "logs", "far")
        assert json.loads(said("status", "far", "--json"))["state"] == "running"
        assert "was told to end" in said("cancel", "far")
        wait('"state": "cancelled"', "status", "far", "--json")
        assert f"run     {name}" in said("resume", "far")
        wait('"state": "finished"', "status", "far", "--json")
        assert "rank 0 of 2 in attempt 1" in said("logs", "far")

        run = slurmddp.submit("math.sqrt", 2.0, cluster="sandbox", ssh="login1", ranks_per_node=1)
        assert run.status().active and run.name.startswith("sqrt-")
        assert run.result(240) == 2.0**0.5
        settings = {"cluster": "sandbox", "ssh": "login1", "ranks_per_node": 1}
        runs = slurmddp.map_array("math.pow", [2.0, 3.0, 2.0], [10.0, 2.0, 10.0], **settings)
        assert [run.result(240) for run in runs] == [1024.0, 9.0, 1024.0]
        assert f"{runs[1].status().job_id}".endswith("_1")
