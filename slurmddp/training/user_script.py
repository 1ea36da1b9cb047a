"""Run a user's script or module, unchanged, as every rank of a run.

    slurmddp run train.py --epochs 20
    slurmddp run -m package.train --epochs 20

The program learns its rank from the environment, as under srun or torchrun. `{run_dir}` in its arguments
becomes the run folder. Checkpoints in `{run_dir}/checkpoints` show whether an attempt made progress.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, ConfigError
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import MODULE
from slurmddp.training.stopping.controller import StopController


def run_script(folder: RunFolder, script: str, arguments: Sequence[object]) -> int:
    """Run the script or module as the main program, as it was at submission; return this rank's exit code.

    If a script ends with 0 after `should_stop` returned True, the code is 75: it has not finished.
    """
    words = [str(one).replace("{run_dir}", str(folder.path)) for one in arguments]
    try:
        if script.startswith(MODULE):
            name = script.removeprefix(MODULE).strip()
            sys.argv = [name, *words]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            path = _file(folder, script)
            sys.argv = [str(path), *words]
            sys.path.insert(0, str(path.parent.absolute()))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    return EXIT_STOPPED if StopController.is_leaving else EXIT_FINISHED


def _file(folder: RunFolder, script: str) -> Path:
    copy = folder.code_dir / script
    path = copy if copy.is_file() else Path(script).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"There is no script {script!r} in {Path.cwd()} (`program.script`).",
            hint="Give its path from the project folder.",
        )
    return path
