"""Shared parts of all benchmarks: run in turn, compare round by round, keep the results.

Figures are printed. They are written only into the file that `--output` names, so that a short run, or one
on a busy machine, never replaces those of `benchmarks/results/`, which the docs tell.
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


def parser(about: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring and knows `--output`; also `--rounds`, if given."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--output", type=file_to_write, metavar="FILE", help="write what was found there, as JSON"
    )
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help=f"rounds that count ({rounds})")
    return made


def file_to_write(text: str) -> Path:
    """Refuse a file that could not be written before anything is measured."""
    file = Path(text)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or there is no folder to write it in")
    return file


def in_turn(names: Iterable[str], rounds: int, measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Return what `measure` found for each name; the first round, which fills caches, does not count."""
    names = list(names)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            taken = measure(name)
            if number:
                found[name].append(taken)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ratio(ones: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def as_json(times: Times) -> dict[str, object]:
    """Return medians and all times, in seconds."""
    return {
        "medians_s": {name: round(statistics.median(values), 4) for name, values in times.items()},
        "times_s": {name: [round(value, 4) for value in values] for name, values in times.items()},
    }


def facts() -> dict[str, object]:
    """Return what figures must be read with: where, when and by which command they were found."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def keep(output: Path | None, found: Mapping[str, object]) -> None:
    """Write what was found, with the facts, if a file was named."""
    if output is not None:
        output.write_text(json.dumps({**found, **facts()}, indent=1) + "\n")
        print(f"\nwritten to {output}")
