"""A sweep: a file `NAME.sweep` beside the folders of its runs, with a line for each run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import ConfigError, RunNotFoundError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs import index
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.index import SWEEP_SUFFIX
from slurmddp.short_text import first_items


@dataclass(frozen=True)
class Sweep:
    """The content of the file of a sweep: its runs and its points, in the order of the points."""

    file: Path
    runs: tuple[RunFolder, ...]
    points: tuple[tuple[str, list[str]], ...]
    """The run of each point and its settings as typed; two trials of a search may be the same run."""
    best: str
    """The metric of a search, such as "max accuracy"; if empty, the report chooses a metric."""

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(SWEEP_SUFFIX)

    @property
    def report_file(self) -> Path:
        """The path of the page that compares the runs."""
        return self.file.with_suffix(".html")

    @property
    def started(self) -> list[RunFolder]:
        """The runs whose run folder exists; the other points have not started."""
        return [run for run in self.runs if run.config_file.is_file()]


def write(runs_dir: Path, name: str, runs: Sequence[tuple[str, Sequence[str]]], best: str = "") -> None:
    """Write the file `NAME.sweep`, which lists the runs of a sweep.

    Args:
        runs_dir: the folder of its run folders.
        name: the name of the sweep.
        runs: the name of each run, and its settings as typed.
        best: for a search, the mode and the name of its metric, such as "max accuracy".
    """
    file = runs_dir / f"{name}{SWEEP_SUFFIX}"
    runs_dir.mkdir(parents=True, exist_ok=True)

    further = {"best": best} if best else {}
    records = [{"run": run, "settings": list(typed), **further} for run, typed in runs]
    write_atomic(file, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))


def name_of(name: str, parts: Sequence[str]) -> str:
    """Return the name of a sweep, which ends with a hash of `parts`; their order does not matter.

    Args:
        name: the beginning of the result, such as the common name of the runs; may be empty.
        parts: the names of its runs, or the arguments of a search, whose runs are not known at its start.
    """
    digits = hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:8]
    return f"{name}{name and '-'}sweep-{digits}"


def refuse_other(runs_dir: Path, name: str, is_of: Callable[[str, Sequence[str]], bool]) -> None:
    """Raise ConfigError if the file with the name of a sweep belongs to another sweep, whose hash is equal.

    Args:
        runs_dir: the folder of its run folders.
        name: the name of the sweep.
        is_of: takes the name of a run and its settings as typed, and returns whether they are a point of the
            sweep.
    """
    sweep = read(runs_dir, name)
    foreign = [run for run, typed in sweep.points if not is_of(run, typed)]

    if foreign:
        raise ConfigError(
            f"{sweep.file} belongs to another sweep, whose name has the same hash: it lists {foreign[0]}. "
            "Nothing was started.",
            hint="Start this sweep with another name=.",
        )


def read(runs_dir: Path, name: str) -> Sweep:
    """Return the sweep with this name in the folder `runs_dir`; it has no runs if its file does not exist."""
    file = runs_dir / f"{name}{SWEEP_SUFFIX}"
    if not file.exists():
        return Sweep(file, (), (), best="")

    records = list(read_lines(file))
    points = tuple((record["run"], record["settings"]) for record in records)
    runs = tuple(RunFolder(runs_dir / run) for run in dict.fromkeys(run for run, _ in points))
    best = records[0].get("best", "") if records else ""
    return Sweep(file, runs, points, best)


def names() -> list[str]:
    """Return the sorted names of the sweeps in `./runs` and in the folders of the runs in the index."""
    files = {file for parent in index.parents() for file in parent.glob(f"*{SWEEP_SUFFIX}")}
    return sorted(file.name.removesuffix(SWEEP_SUFFIX) for file in files)


def find_to_show(name: str | None) -> Sweep | None:
    """Return the sweep that a name means: the name of the sweep, its beginning, or the `name=` of its runs.

    The result is None if the name means a run, or nothing.

    Raises:
        RunNotFoundError: the name means several sweeps.
    """
    try:
        index.find(name)
    except RunNotFoundError:
        return find(name) or _of_runs(name or "")
    return find(name)


def _of_runs(name: str) -> Sweep | None:
    return _only(name, index.sweeps_of_name(name))


def find(name: str | None) -> Sweep | None:
    """Return the sweep whose name is or begins with `name`; None if there is none, or if a run may be meant.

    Raises:
        RunNotFoundError: the name means several sweeps.
    """
    return _only(name, index.sweep_files(name))


def _only(name: str | None, files: Sequence[Path]) -> Sweep | None:
    """Return the sweep in the single file of `files`; None if there is no file.

    Raises:
        RunNotFoundError: there are several files, so `name` is ambiguous.
    """
    if not files:
        return None
    if len(files) > 1:
        listed = first_items([file.with_suffix("") for file in files], 5)
        raise RunNotFoundError(
            f"{name!r} matches {len(files)} sweeps: {listed}.", hint="Give more of the name."
        )
    return read(files[0].parent, files[0].name.removesuffix(SWEEP_SUFFIX))
