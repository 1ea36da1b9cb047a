"""Measure the batch step on a real SLURM: from sbatch to the agents, and from SIGTERM to the requeue.

    python benchmarks/batch_step.py [--rounds N] [--before COMMIT] [--output FILE]

A sandbox of one node runs a job whose agent is a stub, so that the batch step is all that takes time. Two
times of each attempt are taken: from the call of sbatch until the agent starts, and from `scancel
--signal=TERM` until SLURM has put the job back. With `--before`, the version of that commit takes turns with
this one; ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import as_json, in_turn, keep, parser, ratio

from slurmddp.environments.scrub import scrub
from slurmddp.sandbox import Sandbox

ROOT = Path(__file__).parents[1]
STUB = """#!/bin/bash
# As python: the agent leaves a stamp, waits for SIGTERM, and leaves with 75. All else is Python.
if [ "$2" != slurmddp.launchers.agent ]; then exec {python} "$@"; fi
logs=$SLURMDDP_RUN_DIR/logs/attempt-$SLURMDDP_ATTEMPT
trap 'echo 75 >"$logs/exit-node-0"; exit 75' TERM
date +%s.%N >"$SLURMDDP_RUN_DIR/began.new"; mv "$SLURMDDP_RUN_DIR/began.new" "$SLURMDDP_RUN_DIR/began"
while :; do sleep 0.02; done
"""
PREPARE = """
import sys
from pathlib import Path
from slurmddp.slurm.script import render
from slurmddp.settings.spec import Job, Program, Resources
from slurmddp.settings.schema import Cluster, Policy
from slurmddp.runs.folder.create import prepare
project, python = Path(sys.argv[1]), sys.argv[2]
job = Job(name="b", run_name="b-1", run_dir=project / "runs/b-1", project_dir=project, launcher="slurm",
          submitter="sbatch", python=python, cluster=Cluster(name="here", mem_request="none"),
          resources=Resources(nodes=1, ranks_per_node=1), snapshot=False,
          policy=Policy(), program=Program(target="none", config={"name": "b"}))
prepare(job, render(job))
"""


def prepared(tree: Path, folder: Path) -> Path:
    """Return a run folder that the version in `tree` has prepared."""
    folder.mkdir()
    stub = folder / "python"
    stub.write_text(STUB.format(python=shlex.quote(sys.executable)))
    stub.chmod(0o755)
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "-c", PREPARE, str(folder), str(stub)], env=environ, check=True, cwd=tree)
    return folder / "runs/b-1"


def of_commit(commit: str, folder: Path) -> Path:
    """Return the tree of a version."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def wait(until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not until():
        if time.monotonic() > deadline:
            sys.exit("The job did not get there within two minutes.")
        time.sleep(0.005)


class Jobs:
    """Jobs of prepared run folders, one at a time."""

    def __init__(self, environ: dict[str, str], folders: dict[str, Path]) -> None:
        self._environ, self._folders = environ, folders
        self.requeues: dict[str, list[float]] = {name: [] for name in folders}

    def _slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self._environ, check=True, capture_output=True, text=True).stdout

    def start(self, name: str) -> float:
        """Return the seconds from sbatch to the agent; keep those from SIGTERM to the requeue."""
        folder = self._folders[name]
        (folder / "attempts.jsonl").unlink(missing_ok=True)
        began = folder / "began"
        began.unlink(missing_ok=True)
        called = time.time()
        job = self._slurm("sbatch", "--parsable", str(folder / "job.sbatch")).strip()
        wait(began.exists)
        taken = float(began.read_text()) - called
        called = time.monotonic()
        self._slurm("scancel", "--signal=TERM", job)
        wait(lambda: " Restarts=1 " in self._slurm("scontrol", "-o", "show", "job", job))
        self.requeues[name].append(time.monotonic() - called)
        self._slurm("scancel", job)
        wait(lambda: set(self._slurm("squeue", "-h", "-t", "all", "-o", "%T").split()) <= {"CANCELLED"})
        return taken


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--before", metavar="COMMIT", help="the version to compare with")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commits = {"before": given.before, "now": "HEAD"}
        trees = {label: of_commit(commit, folder / label) for label, commit in commits.items() if commit}
        folders = {label: prepared(tree, folder / f"{label}-project") for label, tree in trees.items()}
        sandbox = Sandbox(f"batch{os.getpid()}", root=folder / "sandbox", nodes=1, cpus=2)
        sandbox.up()
        try:
            jobs = Jobs(sandbox.environment(scrub(os.environ)), folders)
            starts = in_turn(folders, given.rounds, jobs.start)
        finally:
            sandbox.down()
    found = {"sbatch to agent": starts, "SIGTERM to requeue": {k: v[1:] for k, v in jobs.requeues.items()}}
    told: dict[str, object] = {}
    for what, times in found.items():
        told[what] = as_json(times)
        words = [f"{label} {statistics.median(values):.2f} s" for label, values in times.items()]
        if "before" in times:
            told[f"{what}, ratio"] = round(ratio(times["now"], times["before"]), 3)
            words.append(f"ratio {told[f'{what}, ratio']}")
        print(f"{what}: {', '.join(words)}")
    keep(given.output, told)


if __name__ == "__main__":
    main()
