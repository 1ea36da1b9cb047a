"""Runs a person's own script, unchanged, as every rank of a run.

    slurmddp train program.script=train.py program.args='--epochs 20'

The script finds its place by itself, as it does under srun or torchrun. `{run_dir}` in its arguments becomes
the run folder: with its checkpoints in `{run_dir}/checkpoints` the run knows whether an attempt got anywhere.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.stopping.controller import StopController


def run_script(folder: RunFolder, script: str, arguments: Sequence[object]) -> int:
    """Run `script` as the main program, as it was at submission; return this rank's exit code.

    If a script ends with 0 after `should_stop` returned True, the code is 75: it has not finished.
    """
    copy = folder.code_dir / script
    path = copy if copy.is_file() else Path(script).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"There is no script {script!r} in {Path.cwd()} (`program.script`).",
            hint="Give its path from the project folder.",
        )
    sys.argv = [str(path), *(str(one).replace("{run_dir}", str(folder.path)) for one in arguments)]
    sys.path.insert(0, str(path.parent.absolute()))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    return EXIT_STOPPED if StopController.is_leaving else EXIT_FINISHED
