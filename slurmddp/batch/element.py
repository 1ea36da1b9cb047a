"""The first start of an element of a sweep's array: its run gets the files that the array holds for all runs.

So the submission of a sweep writes these files once, not for each point. The run gets copies: a script that
writes into its own `code/` changes no other run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.job_script import elements

_WITH_DIGITS = (RunFolder.job_file.name, RunFolder.script_file.name)
"""The files with the name of the run, in the order in which they are written: `job.sbatch` marks the end."""


def fill(folder: RunFolder, shared: Path, digits: str) -> None:
    """Give a run the files of its array; files of an interrupted call are replaced.

    Args:
        folder: the run folder.
        shared: the folder with the files.
        digits: the word in the files that stands for the digits at the end of the run's name.

    Raises:
        OSError: the run folder can't be written.
        SystemExit: the folder is not the folder of an element, so nothing in it may be replaced.
    """
    run = folder.path
    if run.name not in elements(str(shared.parent)) or not folder.config_file.is_file():
        raise SystemExit(f"{run} is no run folder of the array {shared.parent}. Nothing was started.")
    if (run / _WITH_DIGITS[-1]).exists():  # The script saw no file: a file system may fail for a moment.
        return

    folder.logs_dir.mkdir(0o755, exist_ok=True)
    for path in sorted(shared.iterdir()):
        if path.is_dir():
            shutil.rmtree(run / path.name, ignore_errors=True)
            shutil.copytree(path, run / path.name, symlinks=True)
        elif path.name not in _WITH_DIGITS:
            shutil.copy2(path, run / path.name)

    for name in _WITH_DIGITS:
        text = (shared / name).read_text(encoding="utf-8").replace(digits, run.name[-len(digits) :])
        draft = run / f".{name}"
        # Under any umask, only the owner may change what runs.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        draft.replace(run / name)
