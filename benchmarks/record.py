"""Shared parts of all benchmarks: measure in turn, compare round by round, keep the results.

A benchmark prints its figures. It writes them only into the file that `--output` names. So a short run, or a
run on a busy machine, never replaces the figures of `benchmarks/results/`, which the docs quote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

Times = Mapping[str, Sequence[float]]


def parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the option `--output`.

    Args:
        description: the docstring of the benchmark, which `--help` prints as it stands.
        rounds: the default of the option `--rounds`; without it the parser has no such option.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--output", type=file_to_write, metavar="FILE", help="also write the results there, as JSON"
    )
    if rounds is not None:
        options.add_argument("--rounds", type=int, default=rounds, help=f"rounds that count ({rounds})")
    return options


def file_to_write(text: str) -> Path:
    """Return the path; refuse a file that could not be written, before anything is measured."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or its folder does not exist")
    return path


def in_turn(names: Iterable[str], rounds: int, measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Measure each name once in every round.

    Args:
        names: the names of the ways to compare, in the order of their turns.
        rounds: the number of rounds that count. One more round precedes them and fills caches.
        measure: returns the figure of one way, such as its seconds.

    Returns:
        The figures of each way, one for each round.
    """
    names = list(names)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            figure = measure(name)
            if number > 0:
                figures[name].append(figure)
    return figures


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Return the median of the ratios of the rounds."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(numerator / denominator for numerator, denominator in pairs)


def as_json(times: Times) -> dict[str, object]:
    """Return the medians and all times, in seconds."""
    return {
        "medians_s": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "times_s": {name: [round(value, 4) for value in values] for name, values in times.items()},
    }


def circumstances() -> dict[str, object]:
    """Return the command, date, versions and load of a measurement, without which figures mean little."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def keep(output: Path | None, results: Mapping[str, object]) -> None:
    """Write the results and their circumstances into a file, if `--output` named it."""
    if output is None:
        return

    output.write_text(json.dumps({**results, **circumstances()}, indent=1) + "\n")
    print(f"\nwritten to {output}")
