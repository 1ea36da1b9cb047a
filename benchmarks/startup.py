"""Measure how long a person waits before a training starts.

Two commands count: `slurmddp --help`, and `slurmddp train --dry-run`. The second is compared with a bare
script that imports Hydra and composes the same configuration.

    python benchmarks/startup.py [--runs N] [--output FILE]

The commands take turns, so that a machine that slows down slows all of them. The ratio is the median of the
ratios of the rounds. All commands keep the bytecode of what they import, as after an installation by pip.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import yaml
from record import as_json, in_turn, keep, parser, ratio

from slurmddp.settings.keys import GROUPS, defaults

ROOT = Path(__file__).parents[1]
HELP_LIMIT_S = 0.1
DRY_RUN_LIMIT = 1.4
SETTINGS = ["+cluster=a100x8", "nodes=3"]

# The same keys from one file and the same groups, in as few lines as Hydra's manual needs.
BARE = """
import sys
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    config = compose("config", overrides=sys.argv[2:])
"""


def write_config(folder: Path) -> None:
    """Write slurmddp's defaults as a `config.yaml` that plain Hydra composes."""
    choices = [{group: choice} for group, choice in GROUPS.items() if choice]
    header = {
        "defaults": [*choices, "_self_"],
        "hydra": {"searchpath": [f"file://{ROOT / 'slurmddp' / 'conf'}"]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(header | defaults(), sort_keys=False))


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands by name, after writing the files that they read into `folder`."""
    script = folder / "bare.py"
    script.write_text(BARE)
    write_config(folder)

    slurmddp = str(Path(sys.executable).with_name("slurmddp"))
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "slurmddp --help": [slurmddp, "--help"],
        "bare hydra compose": [sys.executable, str(script), str(folder), *SETTINGS],
        "slurmddp train --dry-run": [slurmddp, "train", "--dry-run", *SETTINGS],
    }


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of the commands: Python keeps bytecode in `folder`.

    Pip has compiled Hydra, but not a checkout of slurmddp. Where PYTHONDONTWRITEBYTECODE is set, every start
    from the checkout would compile it again.
    """
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


def measure(runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run of each command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command_of = commands(folder)
        environ = environment(folder)

        def seconds(name: str) -> float:
            started = time.perf_counter()
            subprocess.run(command_of[name], cwd=folder, env=environ, check=True, capture_output=True)
            return time.perf_counter() - started

        return in_turn(command_of, runs, seconds)


def report(times: dict[str, list[float]]) -> dict[str, object]:
    """Print the times of the commands and compare them with the limits; return the results for a file."""
    runs = len(times["python -c pass"])
    print(f"{'command':<28}{'median':>10}{'min':>10}{'max':>10}   ({runs} runs each)")
    for name, values in times.items():
        figures = (statistics.median(values), min(values), max(values))
        print(f"{name:<28}" + "".join(f"{1000 * value:>7.0f} ms" for value in figures))

    help_s = statistics.median(times["slurmddp --help"])
    dry_run_to_bare = ratio(times["slurmddp train --dry-run"], times["bare hydra compose"])
    print(f"\n--help        {1000 * help_s:.0f} ms   (at most {1000 * HELP_LIMIT_S:.0f} ms)")
    print(f"--dry-run     {dry_run_to_bare:.2f} x bare hydra compose   (at most {DRY_RUN_LIMIT} x)")
    return {
        **as_json(times),
        "dry_run_to_bare": round(dry_run_to_bare, 3),
        "held": help_s < HELP_LIMIT_S and dry_run_to_bare <= DRY_RUN_LIMIT,
        "hydra": metadata.version("hydra-core"),
    }


def main() -> int:
    """Measure, report and return 1 if a limit is exceeded."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=15, help="runs of each command (default: 15)")
    arguments = options.parse_args()

    results = report(measure(arguments.runs))
    keep(arguments.output, results)
    return 0 if results["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
