"""From a laptop over ssh to a real SLURM: submit, look, cancel, resume and see the end."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.errors import EXIT_SLURM
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

REFUSE_SECOND = """#!/bin/sh
case "$*" in
*--test-only* | --help | --version) ;;
*) mkdir ~/taken 2>/dev/null || {{ echo "sbatch: error: no more" >&2; exit 1; }} ;;
esac
exec {} "$@"
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
        assert "is cancelled (job" in said("cancel", "far")
        wait('"state": "cancelled"', "status", "far", "--json")
        assert f"run     {name}" in said("resume", "far")
        wait('"state": "finished"', "status", "far", "--json")
        assert "rank 0 of 2 in attempt 1" in said("logs", "far")

        run = slurmddp.submit("math.sqrt", 2.0, cluster="sandbox", ssh="login1", ranks_per_node=1)
        assert run.status().active and run.name.startswith("sqrt-")
        assert run.result(240) == 2.0**0.5
        assert "finished" in run._repr_html_() and run.metrics() == [] and "login1:" in str(run.report())
        settings = {"cluster": "sandbox", "ssh": "login1", "ranks_per_node": 1}
        runs = slurmddp.map_array("math.pow", [2.0, 3.0, 2.0], [10.0, 2.0, 10.0], **settings)
        assert [run.result(240) for run in runs] == [1024.0, 9.0, 1024.0]
        assert f"{runs[1].status().job_id}".endswith("_1")

        # SLURM takes the first array of a sweep and refuses the second.
        (node.home / "bin" / "sbatch").write_text(REFUSE_SECOND.format(shutil.which("sbatch")))
        (node.home / "bin" / "sbatch").chmod(0o755)
        sweep = ["+cluster=sandbox", "ssh=login1", "--multirun", "nodes=1,2", "seed=1,2", "work.py"]
        assert main(["run", *sweep]) == EXIT_SLURM
        assert "2 points not started" in capfd.readouterr().err
        *_, first, second, name = ssh_runs.ssh_runs()
        assert name.is_sweep
        for words in ([name.name], ["--name", "work"]):
            listed = json.loads(said("list", *words, "--json"))["runs"]
            assert {run["name"] for run in listed} == {first.name, second.name}
            assert all(run["active"] for run in listed)
        said("cancel", name.name)
        for run in (first, second):
            assert slurmddp.Run(run.name).wait(240).state == "cancelled"
