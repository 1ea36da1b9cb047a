"""Compute the command line arguments of a run's program, which may differ between starts."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.settings.spec import saved_files


def arguments_of(folder: RunFolder, program: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return the command line arguments of a program, with `{run_dir}` and `{attempt}` replaced.

    From the second start of the run on, `program.resume_args` are appended. If `program.checkpoints` is set,
    they are appended only if a file matches this pattern.

    Args:
        folder: the run folder, which replaces `{run_dir}`.
        program: the section `program` of the configuration.
        environ: the environment of the rank, with the attempt and the restart count.
    """
    run = RunContext.read(environ, folder)
    arguments = [*(program.get("args") or []), *(program.get("free_args") or [])]
    if (run.attempt or run.restart_count) and _has_saved(saved_files(program, folder.path)):
        arguments += program.get("resume_args") or []

    values = {"{run_dir}": str(folder.path), "{attempt}": str(run.attempt)}
    for placeholder, value in values.items():
        arguments = [str(argument).replace(placeholder, value) for argument in arguments]
    return arguments


def _has_saved(pattern: str) -> bool:
    """Return whether a file matches the pattern of `program.checkpoints`; True if the pattern is empty."""
    return not pattern or bool(glob.glob(str(Path(pattern).expanduser())))  # noqa: PTH207
