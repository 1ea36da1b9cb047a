"""Run a person's script once per device: start the command of this process again, N times.

`Distributon.launch()` in a plain `python script.py` calls this module. The first process trains nothing. It
has a launcher start the ranks, and exits with their code.
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
"""With it, Python writes its stack when compiled code crashes."""


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

    None as the folder stands for this process's folder.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    launch_id = secrets.token_hex(8)
    master = free_address(RankInfo(environment="local", launch_id=launch_id), "master")
    ranks = [rank_variables(os.environ, rank, num_devices, launch_id, master) for rank in range(num_devices)]
    return launcher.run(command, ranks, folder)


def rerun_command(
    orig_argv: Sequence[str], argv0: str, main_file: str | None, interactive: bool
) -> list[str]:
    """Return the command that starts the running program again, arguments and interpreter options intact."""
    # Python calls the file of a program on the standard input "<stdin>". Its ranks could not read it again.
    if interactive or (main_file in (None, "<stdin>") and "-c" not in orig_argv):
        raise ConfigError(
            "launch() has to start this program again, but it was typed into an interpreter, a notebook or "
            "the standard input.",
            hint="Put it into a file and run that, use launch(function), or num_devices=1 here.",
        )
    command = [sys.executable, *orig_argv[1:]]
    # A script given by a relative path is another file, or none, once the program has changed its folder.
    if main_file is not None and argv0 in command and Path(argv0).resolve() != Path(main_file).resolve():
        command[command.index(argv0)] = main_file
    return command


def of_hydra_job(command: Sequence[str], modules: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the command and the folder with which ranks repeat this job of a Hydra app.

    Each start of a Hydra app makes an output folder named by the time. The ranks use the first process's
    folder and write no second copy of its configuration.

    Args:
        command: the command that starts the program again.
        modules: the imported modules by name.

    Returns:
        The command with two more overrides, and the folder in which the app was started. Of a program that
        is no Hydra app: its command and None.

    Raises:
        ConfigError: the job is one of a sweep, which would end with the exit of its first job.
    """
    found = getattr(modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    if found is None or not found.initialized():
        return list(command), None
    config = found.get()
    if config.mode is not None and config.mode.name == "MULTIRUN":
        raise ConfigError(
            "launch() was called in a sweep of Hydra, and would end it with the first job's exit code.",
            hint="Use launch(function), which returns, or start each job of the sweep by its own command.",
        )
    # In Hydra's grammar, backslashes before a quote are doubled, and the quote gets one more.
    output = re.sub(r"(\\*)(')", r"\1\1\\\2", config.runtime.output_dir)
    more = [f"hydra.run.dir='{output}'", "hydra.output_subdir=null"]
    # Hydra accepts its overrides in one piece only, and options may stand after them.
    typed = modules["omegaconf"].OmegaConf.to_container(config.overrides, resolve=False)
    given = {*typed["task"], *typed["hydra"]}
    places = [place for place, word in enumerate(command, 1) if word in given]
    end = places[-1] if places else len(command)
    return [*command[:end], *more, *command[end:]], config.runtime.cwd


def rank_variables(
    environ: Mapping[str, str], rank: int, num_devices: int, launch_id: str, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of one rank; `master` is where ranks on plain torch meet."""
    values = dict(environ)
    if rank > 0:
        values.setdefault("PYTHONUNBUFFERED", "1")  # Into a pipe, Python would write by the block.
    values.setdefault(FAULTHANDLER_VARIABLE, "1")
    values |= rank_environment(RankInfo(environment="local"), rank, num_devices)
    values |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return values | {LAUNCHER_VARIABLE: "local", LAUNCH_ID_VARIABLE: launch_id}
