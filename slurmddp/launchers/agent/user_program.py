"""Start a person's script, module or command, unchanged, as every rank of a run.

    slurmddp run train.py --epochs 20
    slurmddp run -m package.train --epochs 20
    slurmddp run ./solve.sh --grid 64

Each rank is a separate program, as under torchrun: a new interpreter with the default actions of all signals.
The program reads its rank from the environment, as under srun or torchrun. `{run_dir}` in its arguments
becomes the run folder, `{attempt}` the number of the attempt, from 0. Checkpoints in `{run_dir}/checkpoints`
show whether an attempt made progress.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from slurmddp.environments.detect import detect
from slurmddp.environments.names import (
    SIGNALS_ALL_VARIABLE,
    SNAPSHOT_VARIABLE,
    THREADS_BY_AGENT_VARIABLE,
)
from slurmddp.errors import ConfigError
from slurmddp.launchers.agent.worker import descriptors_in
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.program_arguments import arguments_of
from slurmddp.settings.spec import MODULE, is_command

ENTRY = f"{__name__}:become"
_STARTUP = Path(__file__).with_name("startup")
"""The folder of the `sitecustomize` that prepares the interpreter of a script, a module or `python ...`."""
_THREADS = "OMP_NUM_THREADS"


def become(run_dir: str) -> NoReturn:
    """Replace this process by the program, which keeps the rank's process id, log and descriptors.

    Raises:
        ConfigError: there is no such script or command.
    """
    folder = RunFolder(run_dir)
    program = folder.config()["program"]
    command = _command(folder, program["script"], arguments_of(folder, program, os.environ))
    environ = {**os.environ, **_threads(os.environ)}

    is_program_of_python = not is_command(program["script"])
    if is_program_of_python or _is_this_python(command[0]):
        entries = [str(_STARTUP), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
        environ[SNAPSHOT_VARIABLE] = str(int(is_program_of_python))

    for descriptor in descriptors_in(environ):
        os.set_inheritable(descriptor, True)
    _reset_signals()
    os.execve(command[0], command[1:], environ)


def _command(folder: RunFolder, script: str, arguments: Sequence[str]) -> list[str]:
    """Return the path of the file to execute, and the command line: its name and its arguments."""
    if is_command(script):
        return [_executable(script), script, *arguments]

    # torchrun starts Python with -u as well.
    python = [sys.executable, sys.executable, "-u"]
    if script.startswith(MODULE):
        return [*python, "-m", script.removeprefix(MODULE).strip(), *arguments]

    file = _file(folder, script)
    # Python would take a file name that begins with "-" for an option.
    if file.startswith("-"):
        file = f"./{file}"
    return [*python, file, *arguments]


def _executable(command: str) -> str:
    program = shutil.which(command)
    if program is None:
        raise ConfigError(
            f"There is no executable {command!r} in {Path.cwd()} or on PATH (`program.script`).",
            hint="Correct the name, or let the setup lines of the cluster file add its folder to PATH.",
        )
    return program


def _is_this_python(executable: str) -> bool:
    """Return whether a command starts slurmddp's own interpreter, as `python app.pyz` may do."""
    python = Path(sys.executable)
    path = Path(executable).absolute()
    return path.parent == python.parent and path.resolve() == python.resolve()


def _file(folder: RunFolder, script: str) -> str:
    """Return the path of a script's copy in the snapshot; without a copy, the path as it was given.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(script).expanduser()
    # Try the path with its symbolic links first: if the script is a link in the project, its copy has the
    # name of the link. Then resolve the links: they may lead from elsewhere into the project.
    for candidate in (os.path.normpath(path.absolute()), os.path.realpath(path)):
        relative = Path(os.path.relpath(candidate, Path.cwd()))
        copy = folder.code_dir / relative
        if os.pardir not in relative.parts and is_there(copy) and copy.is_file():
            return str(copy)

    if not path.is_file():
        raise ConfigError(
            f"There is no script {script!r} in {Path.cwd()} (`program.script`).",
            hint="Give its path from the project folder.",
        )
    return str(path)


def _threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1, as torchrun sets it, if this machine runs several ranks.

    The result is empty for a single rank, and if `environ` has a value.
    """
    info = detect(environ)
    # Emulated nodes are all on this machine, so all ranks of the job share it.
    ranks_on_machine = info.world_size if info.emulated else info.local_world_size
    if environ.get(_THREADS) or ranks_on_machine == 1:
        return {}
    return {_THREADS: "1", THREADS_BY_AGENT_VARIABLE: "1"}


def _reset_signals() -> None:
    """Unblock all signals and give them their default actions, as torchrun does.

    If SLURM sends its warning to every process, SIGUSR2 is ignored, because it would end a script that only
    handles SIGTERM. The agent sends SIGTERM to such a script.
    """
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    if os.environ.get(SIGNALS_ALL_VARIABLE) == "1":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
