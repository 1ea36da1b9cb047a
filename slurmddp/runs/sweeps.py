"""A sweep: a file `NAME.sweep` beside the folders of its runs, with a line for each run."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import RunNotFoundError
from slurmddp.host.atomic_file import write_atomic
from slurmddp.runs import index
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder

_SUFFIX = ".sweep"


@dataclass(frozen=True)
class Sweep:
    """A sweep and the folders of its runs, in the order of its points."""

    file: Path
    runs: tuple[RunFolder, ...]

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(_SUFFIX)

    @property
    def report_file(self) -> Path:
        """The page that compares the runs."""
        return self.file.with_suffix(".html")

    @property
    def started(self) -> list[RunFolder]:
        """The runs that have a folder."""
        return [run for run in self.runs if run.config_file.is_file()]


def write(runs_dir: Path, name: str, runs: Sequence[tuple[str, Sequence[str]]]) -> Sweep:
    """Write the file of a sweep; the same runs give the same name.

    Args:
        runs_dir: the folder of its run folders.
        name: the first part of the sweep's name, such as the common name of its runs; may be empty.
        runs: the name of each run, and its settings as typed.
    """
    file = runs_dir / f"{name_of(name, [run for run, _ in runs])}{_SUFFIX}"
    runs_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"run": run, "settings": list(typed)}, ensure_ascii=False) for run, typed in runs]
    write_atomic(file, "".join(f"{line}\n" for line in lines))
    return _read(file)


def name_of(name: str, runs: Sequence[str]) -> str:
    """Return the name of the sweep of these runs, which begins with `name`."""
    digits = hashlib.sha256("\n".join(sorted(runs)).encode()).hexdigest()[:8]
    return f"{name}{name and '-'}sweep-{digits}"


def _read(file: Path) -> Sweep:
    return Sweep(file, tuple(RunFolder(file.parent / record["run"]) for record in read_lines(file)))


def names() -> list[str]:
    """Return the names of all sweeps beside known runs."""
    files = {file for parent in index.parents() for file in parent.glob(f"*{_SUFFIX}")}
    return sorted(file.name.removesuffix(_SUFFIX) for file in files)


def find(name: str | None) -> Sweep | None:
    """Return the sweep with this name, or with the only name that begins so; None if a run may be meant.

    Raises:
        RunNotFoundError: several sweeps have names that begin so.
    """
    if not name or "/" in name:
        return None
    pattern = f"{glob.escape(name)}*{_SUFFIX}"
    files = [file for parent in index.parents() for file in sorted(parent.glob(pattern))]
    exact = [file for file in files if file.name == f"{name}{_SUFFIX}"]
    if not exact and "sweep" not in name:
        return None
    found = exact or files
    if len(found) > 1:
        listed = ", ".join(str(file.with_suffix("")) for file in found[:5])
        raise RunNotFoundError(f"{name!r} fits {len(found)} sweeps: {listed}.", hint="Give more of the name.")
    return _read(found[0]) if found else None
