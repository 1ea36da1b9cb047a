"""Measure the time from the file `stop` to its notice, on nodes that mount the run folder.

    python benchmarks/stop_notice.py [--shared nfs sshfs ...] [--rounds 5] [--output FILE]

For each file system a sandbox of two nodes mounts a project by it. This machine, as the login node, works on
the folder itself. In each round a run starts or resumes on both nodes, `slurmddp stop` is typed at a random
moment after its start, and the run ends:

trainer   slurmddp's own loop: rank 0 notices the file, and all ranks stop after the same step
script    a plain script: the agent of node 0 notices the file, and all ranks get SIGTERM

A time begins when `slurmddp stop` writes the file `stop`. It ends when rank 0 of the trainer records the
event `signalled`, or when the last rank of the script gets the signal. All hosts read one clock. `disk` is a
sandbox without mounts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from record import as_json, keep, parser

from slurmddp.sandbox import Sandbox

DISK = "disk"
PROGRAMS = ("trainer", "script")
NODES = 2
MAX_WAIT_S = 30.0
"""The longest time between the start of a run and the stop: clients cache up to a minute."""
PATIENCE_S = 300.0
SCRIPT = """
import os, signal, sys, time

def stamp(name):
    with open(f"{sys.argv[1]}/{name}-{os.environ['SLURMDDP_ATTEMPT']}-{os.environ['RANK']}", "w") as file:
        file.write(repr(time.time()))

def leave(*_):
    stamp("signalled")
    sys.exit(75)

signal.signal(signal.SIGTERM, leave)
stamp("begun")
while True:
    time.sleep(0.05)
"""


class Project:
    """A project of one run, and the `slurmddp` command in it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment, "XDG_STATE_HOME": str(folder / "state")}
        (folder / "stamps").mkdir()
        (folder / "script.py").write_text(SCRIPT)

    def type(self, *words: str) -> None:
        """Run a command of slurmddp."""
        subprocess.run(
            [sys.executable, "-m", "slurmddp", *words],
            cwd=self.folder,
            env=self.environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def run_dir(self, name: str) -> Path:
        (folder,) = (self.folder / "runs").glob(f"{name}-*")
        return folder

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Return the events of a run that are of one kind."""
        lines = (self.run_dir(name) / "attempts.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def stamps(self, name: str, attempt: int) -> list[float]:
        """Return the time stamps of the script's ranks."""
        texts = [path.read_text() for path in (self.folder / "stamps").glob(f"{name}-{attempt}-*")]
        return [float(text) for text in texts if text]


def wait(condition: Callable[[], object], subject: str) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it is not true within `PATIENCE_S` seconds.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {subject} within {PATIENCE_S:g} s")
        time.sleep(0.1)


def seconds(program: str, project: Project, attempt: int, wait_s: float) -> float:
    """Start or resume the run of a program, stop it, and return the seconds from the file to its notice."""
    size = ["+cluster=sandbox", f"nodes={NODES}", "ranks_per_node=1", f"name={program}"]
    if attempt > 0:
        project.type("resume", program)
    elif program == "trainer":
        project.type("train", *size, "model=gpt_tiny", "train.steps=1000000")
    else:
        project.type("run", *size, "script.py", str(project.folder / "stamps"))

    if program == "trainer":
        wait(lambda: len(project.events(program, "first_step")) > attempt, "first step")
    else:
        wait(lambda: len(project.stamps("begun", attempt)) == NODES, "start of the script")
    time.sleep(wait_s)

    project.type("stop", program)
    written = (project.run_dir(program) / "stop").stat().st_mtime
    wait(lambda: len(project.events(program, "ended")) > attempt, "end of the attempt")
    if program == "trainer":
        return float(project.events(program, "signalled")[attempt]["time"]) - written
    return max(project.stamps("signalled", attempt)) - written


def measure(kind: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of all rounds on one file system, by program."""
    folder = Path(tempfile.mkdtemp(prefix="stop-"))
    project_dir = folder / "project"
    project_dir.mkdir()
    shared = {} if kind == DISK else {"shared": kind, "shared_folder": project_dir}
    sandbox = Sandbox(f"stops-{kind}", root=folder / "sandbox", nodes=NODES, **shared)
    chooser = random.Random(0)
    try:
        sandbox.up()
        project = Project(project_dir, sandbox.environment())
        times: dict[str, list[float]] = {program: [] for program in PROGRAMS}
        for attempt in range(rounds):
            for program in PROGRAMS:
                figure = seconds(program, project, attempt, chooser.uniform(0, MAX_WAIT_S))
                print(f"{kind:<10} {program:<8} {figure:6.2f} s", flush=True)
                times[program].append(figure)
        return times
    finally:
        sandbox.down()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure each file system, and print medians and ranges."""
    options: argparse.ArgumentParser = parser(__doc__, rounds=5)
    options.add_argument("--shared", nargs="+", default=[DISK, "nfs", "sshfs"], metavar="KIND")
    arguments = options.parse_args()

    results = {kind: measure(kind, arguments.rounds) for kind in arguments.shared}
    print(f"\n{'':<10} {'program':<8} {'median':>8}   range")
    for kind, times in results.items():
        for program, values in times.items():
            bounds = f"{min(values):.1f} to {max(values):.1f} s"
            print(f"{kind:<10} {program:<8} {statistics.median(values):>6.1f} s   {bounds}")

    keep(arguments.output, {kind: as_json(times) for kind, times in results.items()})


if __name__ == "__main__":
    main()
