"""Run a person's script once per device: start the command of this process again, N times.

`Distributon.launch()` in a plain `python script.py` calls this module. The first process trains nothing. It
lets a launcher start the ranks, and exits with their common exit code.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slurmddp.environments.emit import rank_environment
from slurmddp.environments.names import LAUNCH_ID_VARIABLE, LAUNCHER_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError
from slurmddp.host.ports import free_address
from slurmddp.launchers.local.launcher import Launcher

FAULTHANDLER_VARIABLE = "PYTHONFAULTHANDLER"
"""With this variable, Python prints its stack when compiled code crashes."""


def launch_script(num_devices: int, launcher: Launcher) -> NoReturn:
    """Start this program `num_devices` times as the ranks 0..N-1 of one job, and exit with their exit code.

    Raises:
        ConfigError: this is not the main thread, or the program can't be started again.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "launch() was called in a thread, which gets no signals.",
            hint="Call it in the main thread, before anything else is set up.",
        )

    main = sys.modules["__main__"]
    command = rerun_command(sys.orig_argv, sys.argv[0], getattr(main, "__file__", None), hasattr(sys, "ps1"))
    sys.exit(run_ranks(*of_hydra_job(command, sys.modules), num_devices, launcher))


def run_ranks(command: Sequence[str], folder: str | None, num_devices: int, launcher: Launcher) -> int:
    """Run `command` in `folder` as the ranks 0..N-1 of one job; return their common exit code.

    If `folder` is None, the ranks start in the working folder of this process.
    """
    # Flush, so that the output of this process comes before the output of the ranks.
    sys.stdout.flush()
    sys.stderr.flush()

    launch_id = secrets.token_hex(8)
    master = free_address(RankInfo(environment="local", launch_id=launch_id), "master")
    ranks = [rank_variables(os.environ, rank, num_devices, launch_id, master) for rank in range(num_devices)]
    return launcher.run(command, ranks, folder)


def rerun_command(
    orig_argv: Sequence[str], argv0: str, main_file: str | None, interactive: bool
) -> list[str]:
    """Return the command that starts the running program again, with its arguments and Python's options.

    Args:
        orig_argv: `sys.orig_argv`.
        argv0: `sys.argv[0]`.
        main_file: `__file__` of the module `__main__`; None without one.
        interactive: whether Python runs interactively.

    Raises:
        ConfigError: the program is not a file, a module or a `-c` text.
    """
    # Python reports the file "<stdin>" for a program from the standard input, which ranks can't read again.
    if interactive or (main_file in (None, "<stdin>") and "-c" not in orig_argv):
        raise ConfigError(
            "launch() has to start this program again, but it was typed into an interpreter, a notebook or "
            "the standard input.",
            hint="Put it into a file and run that file, use launch(function), or set num_devices=1.",
        )

    command = [sys.executable, *orig_argv[1:]]
    # If the program has changed its working folder, a relative path no longer leads to the script.
    if main_file is not None and argv0 in command and Path(argv0).resolve() != Path(main_file).resolve():
        command[command.index(argv0)] = main_file
    return command


def of_hydra_job(command: Sequence[str], modules: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the command and the working folder with which ranks run this job of a Hydra app again.

    Each start of a Hydra app creates an output folder named by the time. So the command lets the ranks use
    the output folder of this process, and write no second copy of its configuration.

    Args:
        command: the command that starts the program again.
        modules: the imported modules by name.

    Returns:
        The command with two more overrides, and the folder in which the app was started. If the program is
        not a Hydra app, the unchanged command and None.

    Raises:
        ConfigError: the job is part of a sweep, which would end when this process exits after its first job.
    """
    hydra_config = getattr(modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    if hydra_config is None or not hydra_config.initialized():
        return list(command), None

    config = hydra_config.get()
    if config.mode is not None and config.mode.name == "MULTIRUN":
        raise ConfigError(
            "launch() was called in a sweep of Hydra. It exits after one job, which would end the sweep.",
            hint="Use launch(function), which returns, or start each job of the sweep by its own command.",
        )

    # Quote the path by Hydra's grammar: double the backslashes before a quote, and add one for the quote.
    output = re.sub(r"(\\*)(')", r"\1\1\\\2", config.runtime.output_dir)
    added = [f"hydra.run.dir='{output}'", "hydra.output_subdir=null"]

    # Insert the overrides after the last override of the command: Hydra accepts overrides only as one block
    # of arguments, and options may follow the block.
    typed = modules["omegaconf"].OmegaConf.to_container(config.overrides, resolve=False)
    overrides = {*typed["task"], *typed["hydra"]}
    ends = [end for end, argument in enumerate(command, 1) if argument in overrides]
    end = ends[-1] if ends else len(command)
    return [*command[:end], *added, *command[end:]], config.runtime.cwd


def rank_variables(
    environ: Mapping[str, str], rank: int, num_devices: int, launch_id: str, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of one rank.

    Args:
        environ: the environment of this process.
        rank: the rank.
        num_devices: the number of ranks.
        launch_id: a random id, which all ranks share.
        master: MASTER_ADDR and MASTER_PORT.
    """
    values = dict(environ)
    # Only rank 0 writes to this process's output. The other ranks have pipes, into which Python would write
    # in blocks.
    if rank > 0:
        values.setdefault("PYTHONUNBUFFERED", "1")
    values.setdefault(FAULTHANDLER_VARIABLE, "1")
    values |= rank_environment(RankInfo(environment="local"), rank, num_devices)
    values |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return values | {LAUNCHER_VARIABLE: "local", LAUNCH_ID_VARIABLE: launch_id}
