"""Measure the time until the prompt is back after a sweep was submitted as one array.

It is compared with submitit's array of as many functions, on a sandbox whose partition starts no job.

    python benchmarks/sweep.py [--points N] [--rounds N] [--output FILE]

The commands take turns. The ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from record import as_json, in_turn, keep, parser, ratio

from slurmddp.sandbox import Sandbox

LIMIT = 1.2
MARK = "array   "

SUBMITIT = """
import sys, submitit
executor = submitit.SlurmExecutor(sys.argv[1])
executor.update_parameters(partition="low", time=10, array_parallelism=1000)
print(executor.map_array(abs, range(int(sys.argv[2])))[0].job_id)
"""


def commands(folder: Path, points: int, number: int) -> dict[str, list[str]]:
    """Return the commands of one round; the seeds of each round are new runs."""
    slurmddp = [str(Path(sys.executable).with_name("slurmddp")), "run", "--multirun", "+cluster=sandbox"]
    seeds = f"seed=range({number * points},{(number + 1) * points})"
    return {
        "slurmddp": [*slurmddp, "nodes=1", "ranks_per_node=1", seeds, "fit.py"],
        "submitit": [sys.executable, str(folder / "peer.py"), str(folder / "submitit"), str(points)],
    }


def measure(points: int, rounds: int) -> dict[str, list[float]]:
    numbers = {name: count() for name in ("slurmddp", "submitit")}
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as name:
        folder = Path(name)
        (folder / "fit.py").write_text("print('trained')\n")
        (folder / "peer.py").write_text(SUBMITIT)
        sandbox = Sandbox(f"b{os.getpid()}", root=folder / "sandbox", nodes=1)
        sandbox.up()
        environ = {**os.environ, **sandbox.environment(), "XDG_STATE_HOME": str(folder / "state")}

        def seconds(kind: str) -> float:
            command = commands(folder, points, next(numbers[kind]))[kind]
            started = time.perf_counter()
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
            taken = time.perf_counter() - started
            one = kind == "submitit" or done.stdout.count(MARK) == 1
            assert done.returncode == 0 and one, f"{done.stdout}{done.stderr}"
            return taken

        try:
            down = ["scontrol", "update", "PartitionName=low", "State=DOWN"]
            subprocess.run(down, env=environ, check=True)
            return in_turn(numbers, rounds, seconds)
        finally:
            sandbox.down()


def main() -> int:
    options = parser(__doc__, rounds=3)
    options.add_argument("--points", type=int, default=1000, help="points of the sweep (default: 1000)")
    asked = options.parse_args()
    times = measure(asked.points, asked.rounds)
    for name, values in times.items():
        print(f"{name:<10}{statistics.median(values):8.2f} s   ({min(values):.2f} to {max(values):.2f})")
    found = ratio(times["slurmddp"], times["submitit"])
    print(f"{asked.points} points: {found:.2f} x submitit's array   (at most {LIMIT} x)")
    keep(asked.output, {**as_json(times), "points": asked.points, "ratio": round(found, 3)})
    return 0 if found <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
