"""Measure the batch step on a real SLURM: from sbatch to the agents, and from SIGTERM to the requeue.

    python benchmarks/batch_step.py [--rounds N] [--before COMMIT] [--output FILE]

A sandbox of one node runs a job whose agent is a stub, so only the batch step and SLURM take time. Two
times of each attempt are measured: from the call of sbatch until the agent starts, and from
`scancel --signal=TERM` until SLURM has put the job back into the queue. With `--before`, the version of that
commit takes turns with HEAD. Ratios are medians of the ratios of the rounds.
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
# A program in the place of python. If it is started as the agent, it writes a time stamp, waits for SIGTERM
# and exits with 75. It passes any other command to Python.
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
from slurmddp.settings.schema import Cluster, PolicySettings
from slurmddp.runs.folder.create import prepare
project = Path(sys.argv[1])
job = Job(name="b", run_name="b-1", run_dir=project / "runs/b-1", project_dir=project, launcher="slurm",
          submitter="sbatch", python=sys.argv[2], cluster=Cluster(name="here", mem_request="none"),
          resources=Resources(nodes=1, ranks_per_node=1), snapshot=False,
          policy=PolicySettings(), program=Program(target="none", config={"name": "b"}))
prepare(job, render(job))
"""


def extract(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a new folder and return the folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def prepare(tree: Path, folder: Path) -> Path:
    """Let the version in `tree` prepare a run with the stub in a new folder; return the run folder."""
    folder.mkdir()
    stub = folder / "python"
    stub.write_text(STUB.format(python=shlex.quote(sys.executable)))
    stub.chmod(0o755)

    environ = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "-c", PREPARE, str(folder), str(stub)], env=environ, check=True, cwd=tree)
    return folder / "runs/b-1"


def wait(until: Callable[[], object]) -> None:
    """Wait until a condition holds; end the benchmark after two minutes."""
    deadline = time.monotonic() + 120
    while not until():
        if time.monotonic() > deadline:
            sys.exit("The job did not reach the expected state within two minutes.")
        time.sleep(0.005)


class Jobs:
    """Jobs of prepared run folders, one at a time."""

    def __init__(self, environ: dict[str, str], folders: dict[str, Path]) -> None:
        self._environ = environ
        self._folders = folders
        self.requeues: dict[str, list[float]] = {name: [] for name in folders}
        """The seconds from SIGTERM to the requeue, by the name of the version."""

    def _slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self._environ, check=True, capture_output=True, text=True).stdout

    def start(self, name: str) -> float:
        """Run one job to its requeue and cancel it.

        Returns:
            The seconds from the call of sbatch to the start of the agent. `requeues` gets the other time.
        """
        folder = self._folders[name]
        (folder / "attempts.jsonl").unlink(missing_ok=True)
        stamp = folder / "began"
        stamp.unlink(missing_ok=True)

        submitted = time.time()
        job_id = self._slurm("sbatch", "--parsable", str(folder / "job.sbatch")).strip()
        wait(stamp.exists)
        start_s = float(stamp.read_text()) - submitted

        signalled = time.monotonic()
        self._slurm("scancel", "--signal=TERM", job_id)
        wait(lambda: " Restarts=1 " in self._slurm("scontrol", "-o", "show", "job", job_id))
        self.requeues[name].append(time.monotonic() - signalled)

        self._slurm("scancel", job_id)
        wait(lambda: set(self._slurm("squeue", "-h", "-t", "all", "-o", "%T").split()) <= {"CANCELLED"})
        return start_s


def measure(before: str | None, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds by interval and version, one for each round.

    Args:
        before: the commit that is compared with HEAD; None to measure HEAD alone.
        rounds: the number of rounds that count.
    """
    commits = {"now": "HEAD"}
    if before is not None:
        commits = {"before": before, **commits}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {label: extract(commit, folder / label) for label, commit in commits.items()}
        runs = {label: prepare(tree, folder / f"{label}-project") for label, tree in trees.items()}
        sandbox = Sandbox(f"batch{os.getpid()}", root=folder / "sandbox", nodes=1, cpus=2)
        sandbox.up()
        try:
            jobs = Jobs(sandbox.environment(scrub(os.environ)), runs)
            starts = in_turn(runs, rounds, jobs.start)
        finally:
            sandbox.down()

    # `in_turn` drops the first round, which fills caches.
    requeues = {label: seconds[1:] for label, seconds in jobs.requeues.items()}
    return {"sbatch to agent": starts, "SIGTERM to requeue": requeues}


def main() -> None:
    """Measure and print the medians, with ratios if two versions were compared."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--before", metavar="COMMIT", help="the version to compare with")
    arguments = options.parse_args()

    results: dict[str, object] = {}
    for interval, times in measure(arguments.before, arguments.rounds).items():
        results[interval] = as_json(times)
        figures = [f"{label} {statistics.median(seconds):.2f} s" for label, seconds in times.items()]
        if "before" in times:
            now_to_before = round(ratio(times["now"], times["before"]), 3)
            results[f"{interval}, ratio"] = now_to_before
            figures.append(f"ratio {now_to_before}")
        print(f"{interval}: {', '.join(figures)}")
    keep(arguments.output, results)


if __name__ == "__main__":
    main()
