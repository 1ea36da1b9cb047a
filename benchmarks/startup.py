"""Measure the times for which a person waits before a training starts.

That is `slurmddp --help`, and `slurmddp train --dry-run` against a bare script that imports Hydra and
composes the same configuration.

    python benchmarks/startup.py [--runs N] [--output FILE]

The commands take turns, so that a machine that slows down slows all of them. The ratio is the median of the
ratios of the rounds.
"""

from __future__ import annotations

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
    chosen = [{group: choice} for group, choice in GROUPS.items() if choice]
    whole = {
        "defaults": [*chosen, "_self_"],
        "hydra": {"searchpath": [f"file://{ROOT / 'slurmddp' / 'conf'}"]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(whole | defaults(), sort_keys=False))


def seconds(command: list[str], folder: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def commands(folder: Path) -> dict[str, list[str]]:
    bare = folder / "bare.py"
    bare.write_text(BARE)
    write_config(folder)
    slurmddp = str(Path(sys.executable).with_name("slurmddp"))
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "slurmddp --help": [slurmddp, "--help"],
        "bare hydra compose": [sys.executable, str(bare), str(folder), *SETTINGS],
        "slurmddp train --dry-run": [slurmddp, "train", "--dry-run", *SETTINGS],
    }


def measure(runs: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        measured = commands(Path(folder))
        return in_turn(measured, runs, lambda name: seconds(measured[name], folder))


def report(times: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'command':<28}{'median':>10}{'min':>10}{'max':>10}   ({len(times['python -c pass'])} runs each)")
    for name, values in times.items():
        figures = (medians[name], min(values), max(values))
        print(f"{name:<28}" + "".join(f"{1000 * value:>7.0f} ms" for value in figures))
    to_bare = ratio(times["slurmddp train --dry-run"], times["bare hydra compose"])
    help_s = medians["slurmddp --help"]
    print(f"\n--help        {1000 * help_s:.0f} ms   (at most {1000 * HELP_LIMIT_S:.0f} ms)")
    print(f"--dry-run     {to_bare:.2f} x bare hydra compose   (at most {DRY_RUN_LIMIT} x)")
    return {
        **as_json(times),
        "dry_run_to_bare": round(to_bare, 3),
        "held": help_s < HELP_LIMIT_S and to_bare <= DRY_RUN_LIMIT,
        "hydra": metadata.version("hydra-core"),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=15, help="runs of each command (default: 15)")
    asked = options.parse_args()
    result = report(measure(asked.runs))
    keep(asked.output, result)
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
