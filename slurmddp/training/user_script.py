"""Run a user's script, module or command, unchanged, as every rank of a run.

    slurmddp run train.py --epochs 20
    slurmddp run -m package.train --epochs 20
    slurmddp run ./solve.sh --grid 64

The program learns its rank from the environment, as under srun or torchrun. `{run_dir}` in its arguments
becomes the run folder, `{attempt}` the number of the attempt, from 0. Checkpoints in `{run_dir}/checkpoints`
show whether an attempt made progress.
"""

from __future__ import annotations

import glob
import os
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from slurmddp.environments.names import (
    CHANNEL_VARIABLE,
    HEARTBEAT_VARIABLE,
    MEMORY_VARIABLE,
    SIGNALS_ALL_VARIABLE,
)
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, HINT, ConfigError, SlurmddpError
from slurmddp.host.streams import log_size, tell
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.spec import MODULE, is_command, saved_files
from slurmddp.training.program_hints import hint_of
from slurmddp.training.stopping.controller import StopController

_STARTERS = (__file__, runpy.__file__, "<frozen runpy>")
"""Files whose frames stand above the script's own frames in a traceback."""
_DESCRIPTORS = (HEARTBEAT_VARIABLE, CHANNEL_VARIABLE, MEMORY_VARIABLE)


def run_script(folder: RunFolder, program: Mapping[str, Any]) -> int:
    """Run the script or module as the main program, as it was at submission; return this rank's exit code.

    If a script ends with 0 after `should_stop` returned True, the code is 75: it has not finished. A command
    takes the place of this process, and is the project's file of now.

    Args:
        folder: the run folder.
        program: the section `program` of the configuration.
    """
    _reset_signals()
    script, words = program["script"], _words(folder, program)
    try:
        if script.startswith(MODULE):
            name = script.removeprefix(MODULE).strip()
            sys.argv = [name, *words]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif is_command(script):
            _become(script, words)
        else:
            path = _file(folder, script)
            sys.argv = [str(path), *words]
            sys.path.insert(0, str(path.parent.absolute()))
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    except SlurmddpError:
        raise
    except BaseException as error:
        _show(error)
        return EXIT_FAILED
    return EXIT_STOPPED if StopController.is_leaving else EXIT_FINISHED


def _reset_signals() -> None:
    """Give the script the signals of a fresh program.

    Where SLURM sends its warning to every process, SIGUSR2 is ignored, because it would end a script that
    only handles SIGTERM. The agent sends SIGTERM to such a script.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_warned_by_slurm = os.environ.get(SIGNALS_ALL_VARIABLE) == "1"
    signal.signal(signal.SIGUSR2, signal.SIG_IGN if is_warned_by_slurm else signal.SIG_DFL)


def _show(error: BaseException) -> None:
    """Print an error of the script as Python does, by `sys.excepthook` if the script has set it."""
    # runpy raises some errors from another one, which has its frames too.
    for one in filter(None, (error, error.__cause__, error.__context__)):
        one.__traceback__ = _own_frames(one.__traceback__)
    if not _is_shown_by_hook(error):
        tell("".join(traceback.format_exception(error)).rstrip())
    if hint := hint_of(error):
        tell(f"{HINT}{hint}")


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the script on; None if the script has no frame in it."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _STARTERS:
        frames = frames.tb_next
    return frames


def _is_shown_by_hook(error: BaseException) -> bool:
    """Let the script's hook print the error; return False if there is no hook, or it fails or prints nothing.

    The reason of a failure is read from the log, so the traceback must stand there.
    """
    before = log_size()
    with suppress(Exception):
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            return log_size() != before
    return False


def _words(folder: RunFolder, program: Mapping[str, Any]) -> list[str]:
    """Return the arguments of this start."""
    run = RunContext.read(os.environ, folder)
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


def _become(command: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a program, which keeps the rank's process id, log and descriptors."""
    program = shutil.which(command)
    if program is None:
        raise ConfigError(
            f"There is no executable {command!r} in {Path.cwd()} or on PATH (`program.script`).",
            hint="The setup lines of the cluster file may add its folder to PATH.",
        )
    # A Python program on Distributon uses them as a forked rank does.
    numbers = ",".join(os.environ.get(name, "") for name in _DESCRIPTORS).split(",")
    for number in filter(str.isdecimal, numbers):
        os.set_inheritable(int(number), True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; other programs expect them.
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(program, [command, *arguments])


def _file(folder: RunFolder, script: str) -> Path:
    copy = folder.code_dir / script
    path = copy if copy.is_file() else Path(script).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"There is no script {script!r} in {Path.cwd()} (`program.script`).",
            hint="Give its path from the project folder.",
        )
    return path
