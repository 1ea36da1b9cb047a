"""The arguments of the program of a run, for each start of its ranks."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.settings.spec import saved_files


def arguments_of(folder: RunFolder, program: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of a start, with the values of `{run_dir}` and `{attempt}`.

    After the first start, `resume_args` follow. If `checkpoints` is set, they follow once such a file exists.

    Args:
        folder: the run folder, which replaces `{run_dir}`.
        program: the section `program` of the configuration.
        environ: the environment of the rank, which names the attempt.
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
    """Return whether a file of `program.checkpoints` exists; True if the setting is empty."""
    return not pattern or bool(glob.glob(str(Path(pattern).expanduser())))  # noqa: PTH207
