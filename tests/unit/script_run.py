"""The batch script as bash runs it, between fakes of srun, scontrol, squeue and sbatch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from slurm_jobs import FakePrograms, make_job

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.script import render

RUNNING = "JobId=41 JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00"
ENDING = RUNNING.replace("RUNNING", "COMPLETING")
PARTITION = "PartitionName=low AllowGroups=ALL GraceTime=15 MaxTime=1-00:00:00 State=UP TotalNodes=4\n"
FINISH = 'for node in 0 1; do echo 0 >"$logs/exit-node-$node"; done; exit 0'
STOP = 'for node in 0 1; do echo 75 >"$logs/exit-node-$node"; done; exit 75'
SAVE = 'mkdir -p "$SLURMDDP_RUN_DIR/checkpoints"; echo step-9 >"$SLURMDDP_RUN_DIR/checkpoints/latest"\n'

PREEMPTED = ENDING.replace("Restarts=0", "Restarts=9")
GIVEN_UP = "JobState=PENDING Reason=BeginTime Restarts=1 NodeList="
TERM_THE_SCRIPT = (
    "parent=$PPID; while grep -q job.sbatch /proc/$parent/cmdline; do kill -TERM $parent;"
    " parent=$(cut -d ' ' -f 4 /proc/$parent/stat); done"
)
UNTIL_KILLED = '[ "$1" != 600 ] || kill -TERM "$PPID"'
TRAIN = (
    'printf \'{"event": "first_step", "time": 1, "attempt": %d, "step": 1}\\n\' "$SLURMDDP_ATTEMPT"'
    ' >>"$SLURMDDP_RUN_DIR/attempts.jsonl"\n'
)
"""A step in which rank 0 records that the training has begun."""


class Run:
    """One run folder, the SLURM around it, and the script in between."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.programs = FakePrograms(tmp_path / "slurm")
        self.folder = RunFolder(tmp_path / "runs" / "it's 50%j")
        self.folder.path.mkdir(parents=True)
        project = tmp_path / "project"
        project.mkdir()
        changes = {
            "run_dir": self.folder.path,
            "project_dir": project,
            "run_name": self.folder.name,
            **changes,
        }
        self.script = render(make_job(**changes))
        self.folder.script_file.write_text(self.script)
        self.programs.write("job", RUNNING)
        self.environ = {
            **os.environ,
            **self.programs.environ,
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }

    def succeed(self, **environ: str) -> int:
        """Run the script as a successor that another job has submitted, with ranks that finish."""
        return self.start(arguments=("successor",), **{"SLURM_JOB_ID": "42", **environ})

    def start(self, step: str = FINISH, *, arguments: tuple[str, ...] = (), **environ: str) -> int:
        """Run the script with `step` in place of the ranks and return its exit code."""
        self.programs.write("step", step)
        done = subprocess.run(
            ["bash", str(self.folder.script_file), *arguments],
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        return done.returncode

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.events() if event["event"] == name]

    @property
    def end(self) -> tuple[str, str]:
        return self.events("ended")[-1]["outcome"], self.events("ended")[-1]["next"]

    def asked(self) -> list[str]:
        """Return the changes that were asked of SLURM."""
        calls = self.programs.folder / "scontrol.calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line for line in lines if not line.startswith(("-o show", "show"))] + [
            "sbatch"
        ] * self.programs.calls("sbatch")
