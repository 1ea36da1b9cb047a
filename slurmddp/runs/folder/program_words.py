"""The arguments of the program of a run, at one start of it."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.settings.spec import saved_files


def words_of(folder: RunFolder, program: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of this start: with `resume_args` if it is a later one, and with real places.

    Args:
        folder: the run folder, which takes the place of `{run_dir}`.
        program: the section `program` of the configuration.
        environ: the environment of the rank, which names the attempt.
    """
    run = RunContext.read(environ, folder)
    words = [*(program.get("args") or []), *(program.get("free_args") or [])]
    if (run.attempt or run.restart_count) and _has_saved(saved_files(program, folder.path)):
        words += program.get("resume_args") or []
    places = {"{run_dir}": str(folder.path), "{attempt}": str(run.attempt)}
    for place, value in places.items():
        words = [str(word).replace(place, value) for word in words]
    return words


def _has_saved(pattern: str) -> bool:
    """Return whether a file of `program.checkpoints` is there; True if no files were named."""
    return not pattern or bool(glob.glob(str(Path(pattern).expanduser())))  # noqa: PTH207
