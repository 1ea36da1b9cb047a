"""Measure the time until the prompt is back after a sweep was submitted as one array.

    python benchmarks/sweep.py [--points N] [--rounds N] [--hydra-launcher FOLDER] [--output FILE]

Four programs each submit the same number of points as one array, on a sandbox whose partition starts no job:

- `slurmddp`: `slurmddp run --multirun`; its goal is at most 2.5 s for 1,000 points.
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
"""The largest accepted number of milliseconds per point."""
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
    # The launcher waits for its jobs, which never start on this sandbox. So replace the wait by results.
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


def command(program: str, points: int, number: int) -> list[str]:
    """Return the command of one round; the seeds of each round are new runs.

    Args:
        program: the name of the program.
        points: the number of points.
        number: the number of the round.
    """
    first = number * points
    last = first + points
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
    }[program]


class Submissions:
    """Submissions of the programs from one folder to one SLURM, whose queue shows whether each succeeded."""

    def __init__(self, folder: Path, environ: dict[str, str], points: int, launcher: Path | None) -> None:
        self._folder = folder
        self._environ = environ
        self._points = points
        self._launcher = launcher
        self._numbers: dict[str, count[int]] = {}

    def seconds(self, program: str) -> float:
        """Submit one array by a program and return the seconds until the program ends."""
        number = next(self._numbers.setdefault(program, count()))
        environ = self._environ
        if program == "hydra":
            environ = {**environ, "PYTHONPATH": str(self._launcher)}
        arrays_before = self._arrays()

        started = time.perf_counter()
        result = subprocess.run(
            command(program, self._points, number),
            cwd=self._folder,
            env=environ,
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - started

        output = f"{program}: {result.stdout}{result.stderr}"
        assert result.returncode == 0 and self._arrays() == arrays_before + 1, output
        return seconds

    def _arrays(self) -> int:
        """Return the number of arrays in the queue."""
        command = ["squeue", "--noheader", "-o", "%F"]
        return len(subprocess.run(command, env=self._environ, capture_output=True, text=True).stdout.split())


def measure(points: int, rounds: int, launcher: Path | None) -> dict[str, list[float]]:
    """Return the seconds of each program, one for each round.

    Args:
        points: the number of points of an array.
        rounds: the number of rounds that count.
        launcher: the folder of hydra-submitit-launcher; None to leave Hydra out.
    """
    programs = ["slurmddp", "map_array", "submitit"]
    if launcher is not None:
        programs.append("hydra")

    with tempfile.TemporaryDirectory(prefix="slurmddp-") as name:
        folder = Path(name)
        for program, text in PROGRAMS.items():
            (folder / program).write_text(text)

        sandbox = Sandbox(f"b{os.getpid()}", root=folder / "sandbox", nodes=1)
        sandbox.up()
        try:
            environ = {**os.environ, **sandbox.environment(), "XDG_STATE_HOME": str(folder / "state")}
            # Jobs that start would take the processors from the programs.
            down = ["scontrol", "update", "PartitionName=low", "State=DOWN"]
            subprocess.run(down, env=environ, check=True)
            submissions = Submissions(folder, environ, points, launcher)
            return in_turn(programs, rounds, submissions.seconds)
        finally:
            sandbox.down()


def usable_launcher(folder: Path | None) -> Path | None:
    """Return the absolute folder of hydra-submitit-launcher; None, after a message, if it is missing."""
    if folder is not None and (folder / "hydra_plugins/hydra_submitit_launcher").is_dir():
        return folder.absolute()
    print("hydra      not measured: no --hydra-launcher FOLDER with hydra-submitit-launcher (see --help)")
    return None


def main() -> int:
    """Measure, print medians and ratios, and return 1 if slurmddp exceeds its limit."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--points", type=int, default=1000, help="points of the sweep (default: 1000)")
    options.add_argument("--hydra-launcher", type=Path, metavar="FOLDER", help="where it is installed")
    arguments = options.parse_args()

    points = arguments.points
    times = measure(points, arguments.rounds, usable_launcher(arguments.hydra_launcher))
    for name, values in times.items():
        print(f"{name:<10}{statistics.median(values):8.2f} s   ({min(values):.2f} to {max(values):.2f})")

    ratios = {}
    for program, peer in PAIRS:
        if peer in times:
            value = ratio(times[program], times[peer])
            ratios[f"{program}/{peer}"] = round(value, 3)
            print(f"{points} points: {f'{program}/{peer}':<20}{value:6.2f} x")

    per_point_ms = 1000 * statistics.median(times["slurmddp"]) / points
    print(f"goal: {per_point_ms:.2f} ms for each point, at most {LIMIT_MS} ms")
    keep(arguments.output, {**as_json(times), "points": points, "ratios": ratios})
    return 0 if per_point_ms <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
