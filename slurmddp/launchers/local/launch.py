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
    """Run this program `num_devices` times as the ranks 0..N-1 of one job, then exit with their code."""
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
    # The output of this process comes before the output of the ranks.
    sys.stdout.flush()
    sys.stderr.flush()

    launch_id = secrets.token_hex(8)
    master = free_address(RankInfo(environment="local", launch_id=launch_id), "master")
    ranks = [rank_variables(os.environ, rank, num_devices, launch_id, master) for rank in range(num_devices)]
    return launcher.run(command, ranks, folder)


def rerun_command(
    orig_argv: Sequence[str], argv0: str, main_file: str | None, interactive: bool
) -> list[str]:
    """Return the command that starts the running program again, with its arguments and Python's options."""
    # Python calls a program on the standard input "<stdin>". The ranks could not read it again.
    if interactive or (main_file in (None, "<stdin>") and "-c" not in orig_argv):
        raise ConfigError(
            "launch() has to start this program again, but it was typed into an interpreter, a notebook or "
            "the standard input.",
            hint="Put it into a file and run that file, use launch(function), or set num_devices=1.",
        )

    command = [sys.executable, *orig_argv[1:]]
    # A relative path of the script is wrong once the program has changed its working folder.
    if main_file is not None and argv0 in command and Path(argv0).resolve() != Path(main_file).resolve():
        command[command.index(argv0)] = main_file
    return command


def of_hydra_job(command: Sequence[str], modules: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the command and the folder with which ranks repeat this job of a Hydra app.

    Each start of a Hydra app makes an output folder named by the time. The ranks use the output folder of the
    first process, and write no second copy of its configuration.

    Args:
        command: the command that starts the program again.
        modules: the imported modules by name.

    Returns:
        The command with two more overrides, and the folder in which the app was started. If the program is
        not a Hydra app, the unchanged command and None.

    Raises:
        ConfigError: the job is part of a sweep, which would end with the exit of its first job.
    """
    hydra_config = getattr(modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    if hydra_config is None or not hydra_config.initialized():
        return list(command), None

    config = hydra_config.get()
    if config.mode is not None and config.mode.name == "MULTIRUN":
        raise ConfigError(
            "launch() was called in a sweep of Hydra, and would end it with the first job's exit code.",
            hint="Use launch(function), which returns, or start each job of the sweep by its own command.",
        )

    # In Hydra's grammar, backslashes before a quote are doubled, and the quote gets one more.
    output = re.sub(r"(\\*)(')", r"\1\1\\\2", config.runtime.output_dir)
    added = [f"hydra.run.dir='{output}'", "hydra.output_subdir=null"]

    # Hydra accepts overrides only as one block of arguments, and options may follow the block.
    typed = modules["omegaconf"].OmegaConf.to_container(config.overrides, resolve=False)
    overrides = {*typed["task"], *typed["hydra"]}
    ends = [end for end, argument in enumerate(command, 1) if argument in overrides]
    end = ends[-1] if ends else len(command)
    return [*command[:end], *added, *command[end:]], config.runtime.cwd


def rank_variables(
    environ: Mapping[str, str], rank: int, num_devices: int, launch_id: str, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of one rank; ranks on plain torch meet at `master`."""
    values = dict(environ)
    # The output of these ranks goes through a pipe, into which Python would write in blocks.
    if rank > 0:
        values.setdefault("PYTHONUNBUFFERED", "1")
    values.setdefault(FAULTHANDLER_VARIABLE, "1")
    values |= rank_environment(RankInfo(environment="local"), rank, num_devices)
    values |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return values | {LAUNCHER_VARIABLE: "local", LAUNCH_ID_VARIABLE: launch_id}
