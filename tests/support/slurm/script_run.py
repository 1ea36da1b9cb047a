"""The rendered batch script as bash runs it, between fakes of srun, scontrol, squeue and sbatch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from slurmddp.runs.folder.create import prepare
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.script import render
from support.slurm.slurm_jobs import FakePrograms, make_job

FINISH = 'for node in 0 1; do echo 0 >"$logs/exit-node-$node"; done; exit 0'
STOP = 'for node in 0 1; do echo 75 >"$logs/exit-node-$node"; done; exit 75'
FAIL = 'echo 1 >"$logs/exit-node-0"; exit 137'
"""Step in which an agent fails and srun is killed, so that the script waits for no other exit code."""
SAVE = 'mkdir -p "$SLURMDDP_RUN_DIR/checkpoints"; echo step-9 >"$SLURMDDP_RUN_DIR/checkpoints/latest"\n'
RUNNING = "JobId=41 JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00"
PREEMPTED = RUNNING.replace("RUNNING", "COMPLETING") + " PreemptTime=2026-01-01T00:00:00"


class Script:
    """A run folder, fake programs of SLURM, and the batch script that uses both."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.programs = FakePrograms(tmp_path / "slurm")
        self.folder = RunFolder(tmp_path / "runs" / "it's 50%j")
        self.folder.path.mkdir(parents=True)
        project = tmp_path / "project"
        project.mkdir()
        values = {"run_dir": self.folder.path, "project_dir": project, "run_name": self.folder.name}
        job = make_job(**{**values, **changes})
        prepare(job, "")
        self.folder.script_file.write_text(render(job))  # The script may be one that bash can't read.
        self.programs.write("job", RUNNING)
        self.python = tmp_path / "bin" / "python3"
        """The Python of this machine; the Python of the ranks does not exist."""
        self.python.parent.mkdir()
        self.python.symlink_to(Path(sys.executable).resolve())
        own_path = f"{self.python.parent}:{self.programs.environ['PATH']}"
        self.environ = {
            **os.environ,
            **self.programs.environ,
            "PATH": own_path,
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }

    def start(self, step: str = FINISH, **environ: str) -> int:
        """Run the script with `step` in place of the ranks and return its exit code."""
        return self.run(step, **environ).returncode

    def run(self, step: str = FINISH, **environ: str) -> subprocess.CompletedProcess[str]:
        self.programs.write("step", step)
        command = ["bash", str(self.folder.script_file)]
        environ = {**self.environ, **environ}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.events() if event["event"] == name]

    @property
    def end(self) -> tuple[str, str]:
        return self.events("ended")[-1]["outcome"], self.events("ended")[-1]["next"]

    def log(self, attempt: int = 0) -> str:
        return (self.folder.log_dir(attempt) / "batch.log").read_text()

    def requeued(self) -> int:
        return self.programs.read("scontrol.calls").splitlines().count("requeue 41")

    @property
    def srun_began(self) -> bool:
        return (self.programs.folder / "srun.argv").exists()
