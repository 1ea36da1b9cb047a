"""Measure the time until the prompt is back after a sweep was submitted as one array.

    python benchmarks/sweep.py [--points N] [--rounds N] [--hydra-launcher FOLDER] [--output FILE]

Four programs submit as many points as one array each, on a sandbox whose partition starts no job:

- `slurmddp`: `slurmddp run --multirun`; its goal is 2.5 s for 1,000 points.
- `map_array`: `slurmddp.map_array` in a script of its own.
- `submitit`: submitit's `map_array` in a script of its own.
- `hydra`: an application with `@hydra.main` and hydra-submitit-launcher, the peer of `slurmddp` within Hydra.
  The launcher is not installed with slurmddp, since Hydra would import it for every command. Install it with
  `pip install --no-deps --target FOLDER hydra-submitit-launcher` and name the folder.

The programs take turns. A ratio is the median of the ratios of the rounds.
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

LIMIT_MS = 2.5
"""Most milliseconds for each point."""
PAIRS = (("slurmddp", "submitit"), ("map_array", "submitit"), ("slurmddp", "hydra"))
PROGRAMS = {
    "fit.py": "print('trained')\n",
    "map_array.py": """
import sys, slurmddp
calls = range(*map(int, sys.argv[1:]))
slurmddp.map_array("math.fabs", calls, cluster="sandbox", nodes=1, ranks_per_node=1)
""",
    "submitit_array.py": """
import sys, submitit
executor = submitit.SlurmExecutor("submitit")
executor.update_parameters(partition="low", time=10, array_parallelism=1000)
executor.map_array(abs, range(*map(int, sys.argv[1:])))
""",
    # The launcher waits for its jobs, which never start here: the results are there at once.
    "app.py": """
import hydra, submitit
from hydra.core.utils import JobReturn, JobStatus
submitit.Job.results = lambda self: [JobReturn(_return_value=0, status=JobStatus.COMPLETED)]
@hydra.main(version_base=None, config_path=None)
def main(config):
    print(config.seed)
main()
""",
}


def command(kind: str, points: int, number: int) -> list[str]:
    """Return the command of one round; the seeds of each round are new runs."""
    first, last = number * points, (number + 1) * points
    seeds = f"seed=range({first},{last})"
    slurmddp = str(Path(sys.executable).with_name("slurmddp"))
    resources = ["+cluster=sandbox", "nodes=1", "ranks_per_node=1"]
    launcher = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=low",
        "hydra.launcher.timeout_min=10",
    ]
    return {
        "slurmddp": [slurmddp, "run", "--multirun", *resources, seeds, "fit.py"],
        "map_array": [sys.executable, "map_array.py", str(first), str(last)],
        "submitit": [sys.executable, "submitit_array.py", str(first), str(last)],
        "hydra": [sys.executable, "app.py", "-m", *launcher, f"+{seeds}"],
    }[kind]


def measure(points: int, rounds: int, launcher: Path | None) -> dict[str, list[float]]:
    kinds = ["slurmddp", "map_array", "submitit", *(["hydra"] if launcher else [])]
    numbers = {kind: count() for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as name:
        folder = Path(name)
        for program, text in PROGRAMS.items():
            (folder / program).write_text(text)
        sandbox = Sandbox(f"b{os.getpid()}", root=folder / "sandbox", nodes=1)
        sandbox.up()
        environ = {**os.environ, **sandbox.environment(), "XDG_STATE_HOME": str(folder / "state")}

        def arrays() -> int:
            queue = ["squeue", "--noheader", "-o", "%F"]
            return len(subprocess.run(queue, env=environ, capture_output=True, text=True).stdout.split())

        def seconds(kind: str) -> float:
            words, before = command(kind, points, next(numbers[kind])), arrays()
            env = {**environ, "PYTHONPATH": str(launcher)} if kind == "hydra" else environ
            started = time.perf_counter()
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
            taken = time.perf_counter() - started
            assert done.returncode == 0 and arrays() == before + 1, f"{kind}: {done.stdout}{done.stderr}"
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
    options.add_argument("--hydra-launcher", type=Path, metavar="FOLDER", help="where it is installed")
    asked = options.parse_args()
    launcher = asked.hydra_launcher and asked.hydra_launcher.absolute()
    if not launcher or not (launcher / "hydra_plugins/hydra_submitit_launcher").is_dir():
        print("hydra      not measured: no --hydra-launcher FOLDER with hydra-submitit-launcher (see --help)")
        launcher = None
    times = measure(asked.points, asked.rounds, launcher)
    for name, values in times.items():
        print(f"{name:<10}{statistics.median(values):8.2f} s   ({min(values):.2f} to {max(values):.2f})")
    found = {f"{one}/{other}": ratio(times[one], times[other]) for one, other in PAIRS if other in times}
    for pair, value in found.items():
        print(f"{asked.points} points: {pair:<20}{value:6.2f} x")
    per_point_ms = 1000 * statistics.median(times["slurmddp"]) / asked.points
    print(f"goal: {per_point_ms:.2f} ms for each point, at most {LIMIT_MS} ms")
    ratios = {pair: round(value, 3) for pair, value in found.items()}
    keep(asked.output, {**as_json(times), "points": asked.points, "ratios": ratios})
    return 0 if per_point_ms <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
