"""Measure `slurmddp list` of many runs by its CPU time, which a busy machine changes little.

    python benchmarks/list_runs.py [--runs N] [--rounds N] [--output FILE]

The runs are synthetic: folders with a configuration, the events of an attempt and its metrics, and the
index of the account. All have ended, so SLURM is not asked.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from record import keep, parser

from slurmddp.settings.keys import defaults

LIMIT_S = 1.0
"""CPU seconds of a command, user and system."""
WAYS = {"list": ["list"], "list --json": ["list", "--json"]}


def make_runs(root: Path, count: int) -> dict[str, str]:
    """Write `count` run folders and their index; return the environment in which they are listed."""
    state, runs = root / "state" / "slurmddp", root / "project" / "runs"
    state.mkdir(parents=True)
    config = yaml.safe_dump({**defaults(), "name": "gpt", "nodes": 1, "ranks_per_node": 2}, sort_keys=False)
    ended = {"attempt": 0, "job_id": "7", "exit_code": 0, "outcome": "finished", "next": "none"}
    events = [
        {"event": "started", "time": 1e9, "attempt": 0, "job_id": "7", "launcher": "slurm", "nodes": "n1"}
    ]
    events += [
        {"event": "saved", "time": 1e9 + step, "attempt": 0, "step": step} for step in range(100, 500, 100)
    ]
    events += [{"event": "ended", "time": 1e9 + 500, **ended}]
    metrics = [{"step": step, "attempt": 0, "time": 1e9 + step, "loss": 2.5} for step in range(10, 410, 10)]
    texts = ["".join(f"{json.dumps(line)}\n" for line in lines) for lines in (events, metrics)]
    with (state / "runs.jsonl").open("w", encoding="utf-8") as index:
        for number in range(count):
            path = runs / f"gpt-{number:08x}"
            path.mkdir(parents=True)
            (path / "config.yaml").write_text(config)
            (path / "overrides.txt").write_text(f"seed={number}\n")
            for name, text in zip(("attempts.jsonl", "metrics.jsonl"), texts, strict=True):
                (path / name).write_text(text)
            index.write(json.dumps({"name": path.name, "path": str(path)}) + "\n")
    return {**os.environ, "XDG_STATE_HOME": str(root / "state")}


def cpu_seconds(words: list[str], environ: dict[str, str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "slurmddp", *words]
    subprocess.run(command, env=environ, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=10_000, metavar="N", help="run folders (default: 10000)")
    options.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns of each command (default: 5)"
    )
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="slurmddp-list-") as folder:
        root = Path(folder)
        environ = make_runs(root, args.runs)
        times = {
            name: [cpu_seconds(words, environ, root) for _ in range(args.rounds)]
            for name, words in WAYS.items()
        }
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, median in medians.items():
        print(f"slurmddp {name} of {args.runs} runs: {median:.2f} s of CPU time, limit {LIMIT_S:g} s")
    held = max(medians.values()) < LIMIT_S
    keep(args.output, {"runs": args.runs, "cpu_s": times, "limit_s": LIMIT_S, "held": held})
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
