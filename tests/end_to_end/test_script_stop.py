"""A script or command without slurmddp: `slurmddp stop` ends it, and the messages promise no checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmddp.environments.scrub import scrub

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("forked_programs")]

ENDLESS = {
    "script.py": "import os, time\nopen('begun-' + os.environ['RANK'], 'w').close()\ntime.sleep(600)\n",
    "./command": "#!/bin/sh\n: > begun-$RANK\nexec sleep 600\n",
}


@pytest.mark.parametrize("program", ENDLESS)
def test_a_stop_ends_a_program_that_never_asks(tmp_path: Path, program: str) -> None:
    (tmp_path / program).write_text(ENDLESS[program])
    (tmp_path / program).chmod(0o755)
    environment = {**scrub(os.environ), "XDG_STATE_HOME": str(tmp_path / "state")}
    slurmddp = [sys.executable, "-m", "slurmddp"]
    training = subprocess.Popen(
        [*slurmddp, "train", f"program.script={program}", "name=script"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        while not all((tmp_path / f"begun-{rank}").exists() for rank in range(2)):
            assert training.poll() is None, training.communicate()[0]
            time.sleep(0.1)
        command = [*slurmddp, "stop", "script"]
        said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
        output, _ = training.communicate(timeout=120)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 75, output
    assert "gets SIGTERM, or SIGUSR2 if it handles SIGUSR2" in said
    assert "saves a checkpoint" not in said
    assert "resumes from there" not in output
    assert "The same command starts the script again" in output
    (log,) = (tmp_path / "runs").glob("*/logs/attempt-0/node-0.log")
    assert "stop at a checkpoint" not in log.read_text()
