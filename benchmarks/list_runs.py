"""Measure `slurmddp list` of many runs by its CPU time, which a busy machine hardly changes.

    python benchmarks/list_runs.py [--runs N] [--rounds N] [--output FILE]

The runs are synthetic: folders with a configuration, the events of an attempt and its metrics, and the
index of the account. All of them have ended, so the command asks SLURM nothing.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from record import keep, parser

from slurmddp.settings.keys import defaults

LIMIT_S = 1.0
"""CPU seconds of a command, user and system."""
COMMANDS = {"list": ["list"], "list --json": ["list", "--json"]}


def jsonl(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a text with one record of JSON per line."""
    return "".join(f"{json.dumps(record)}\n" for record in records)


def files_of_run() -> dict[str, str]:
    """Return the files of a run folder by name: a finished run of 500 s with four saves."""
    config = {**defaults(), "name": "gpt", "nodes": 1, "ranks_per_node": 2}
    started = {"event": "started", "attempt": 0, "job_id": "7", "launcher": "slurm", "nodes": "n1"}
    ended = {"event": "ended", "attempt": 0, "job_id": "7", "exit_code": 0, "outcome": "finished"}
    saves = [
        {"event": "saved", "time": 1e9 + step, "attempt": 0, "step": step} for step in range(100, 500, 100)
    ]
    events = [{**started, "time": 1e9}, *saves, {**ended, "time": 1e9 + 500, "next": "none"}]
    metrics = [{"step": step, "attempt": 0, "time": 1e9 + step, "loss": 2.5} for step in range(10, 410, 10)]
    return {
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "attempts.jsonl": jsonl(events),
        "metrics.jsonl": jsonl(metrics),
    }


def make_runs(root: Path, count: int) -> dict[str, str]:
    """Write `count` run folders and their index; return the environment in which they are listed."""
    state = root / "state" / "slurmddp"
    state.mkdir(parents=True)
    files = files_of_run()
    with (state / "runs.jsonl").open("w", encoding="utf-8") as index:
        for number in range(count):
            path = root / "project" / "runs" / f"gpt-{number:08x}"
            path.mkdir(parents=True)
            for name, text in files.items():
                (path / name).write_text(text)
            (path / "overrides.txt").write_text(f"seed={number}\n")
            index.write(json.dumps({"name": path.name, "path": str(path)}) + "\n")
    return {**os.environ, "XDG_STATE_HOME": str(root / "state")}


def cpu_seconds(arguments: list[str], environ: dict[str, str], folder: Path) -> float:
    """Return the CPU seconds of a command of slurmddp."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "slurmddp", *arguments]
    subprocess.run(command, env=environ, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(runs: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each command, one for each round."""
    with tempfile.TemporaryDirectory(prefix="slurmddp-list-") as name:
        folder = Path(name)
        environ = make_runs(folder, runs)
        return {
            command: [cpu_seconds(arguments, environ, folder) for _ in range(rounds)]
            for command, arguments in COMMANDS.items()
        }


def main() -> int:
    """Measure, print the medians, and return 1 if a command exceeds the limit."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=10_000, metavar="N", help="run folders (default: 10000)")
    options.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns of each command (default: 5)"
    )
    arguments = options.parse_args()

    times = measure(arguments.runs, arguments.rounds)
    medians = {command: statistics.median(seconds) for command, seconds in times.items()}
    for command, median in medians.items():
        print(f"slurmddp {command} of {arguments.runs} runs: {median:.2f} s of CPU time, limit {LIMIT_S:g} s")

    is_held = max(medians.values()) < LIMIT_S
    keep(arguments.output, {"runs": arguments.runs, "cpu_s": times, "limit_s": LIMIT_S, "held": is_held})
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
