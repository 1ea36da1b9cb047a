"""Runs on this machine whose ranks need no torch, for the tests of the local launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slurmddp.config.schema import Cluster, Policy
from slurmddp.launchers.local.run import LocalRun
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import Job, Program, Resources
from support import TESTS
from support.runs.agent_runs import agent_command, make_run


def job_of(folder: RunFolder, *, nodes: int = 1, ranks_per_node: int = 2, **changes: object) -> Job:
    fields = {
        "name": "test",
        "run_name": folder.name,
        "run_dir": folder.path,
        "project_dir": folder.path.parents[1] / "project",
        "launcher": "local",
        "submitter": "sbatch",
        "python": sys.executable,
        "cluster": Cluster(name="local", env={"FROM_CLUSTER": "a b"}),
        "resources": Resources(nodes=nodes, ranks_per_node=ranks_per_node),
        "policy": Policy(),
        "program": Program(target="rank_program.main", config={}),
    }
    return Job(**(fields | changes))


def local_run(
    tmp_path: Path, program: str, *, nodes: int = 1, ranks_per_node: int = 2, **changes: object
) -> LocalRun:
    folder = make_run(tmp_path, program, nodes=nodes, ranks_per_node=ranks_per_node)
    if "program_spec" in changes:
        changes["program"] = changes.pop("program_spec")
    job = job_of(folder, nodes=nodes, ranks_per_node=ranks_per_node, **changes)
    return LocalRun(job, folder, command=[*agent_command(tmp_path), str(folder.path)], say=lambda text: None)


HANGUP_ON = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
"""For tests that run under `nohup` themselves."""


def terminal(tmp_path: Path, program: str, *, first: str = HANGUP_ON) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own, to press Ctrl-C on; that process does `first` before."""
    folder = make_run(tmp_path, program)
    script = tmp_path / "person.py"
    command = [*agent_command(tmp_path), str(folder.path)]
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
        "from support.runs.local_runs import LocalRun, RunFolder, job_of\n"
        f"folder = RunFolder({str(folder.path)!r})\n"
        f"run = LocalRun(job_of(folder), folder, command={command!r})\n{first}\n"
        "run.start()\nsys.exit(run.wait())\n"
    )
    return terminal_again(tmp_path)


def terminal_again(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start the same run once more, as a person types the same command again."""
    return subprocess.Popen([sys.executable, str(tmp_path / "person.py")], stderr=subprocess.PIPE)
