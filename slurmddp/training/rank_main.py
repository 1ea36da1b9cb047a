"""Run one rank of a run, from its environment to its exit code; the agent calls `main`."""

from __future__ import annotations

import importlib
import os
import re
import time
import traceback
from typing import Any

import torch.distributed as dist

from slurmddp.checkpoint.state.config_match import bound_to
from slurmddp.environments.detect import detect, require
from slurmddp.environments.names import PREFLIGHT_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.time_limits import read_limits
from slurmddp.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    HINT,
    ConfigError,
    RankFailure,
    SlurmddpError,
    StoppedAtCheckpoint,
)
from slurmddp.host.heartbeat_page import HeartbeatPage, ReportedError
from slurmddp.host.interpreter import note_uncaught
from slurmddp.host.streams import print_to_log
from slurmddp.plugins import locate
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.program_arguments import arguments_of
from slurmddp.runs.folder.program_hints import hint_of
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.settings.spec import MODULE, is_own_trainer
from slurmddp.strategies import build
from slurmddp.training.device.cpu_affinity import share_threads
from slurmddp.training.distributon import Distributon
from slurmddp.training.instantiate import instantiate
from slurmddp.training.preflight import preflight
from slurmddp.training.process_group.device_agreement import DevicesError
from slurmddp.training.process_group.setup import RankContext
from slurmddp.training.rank_session import log_to_stderr
from slurmddp.training.stopping.controller import StopController
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals

_SCRIPT_KEYS = ("script", "args", "free_args", "resume_args", "resumable", "checkpoints")
NOT_OPTIONS = ("_target_", *_SCRIPT_KEYS)
"""Keys of `program` that are not arguments of its function."""
TIMEOUTS = ("rendezvous_timeout_s", "collective_timeout_s")
"""Keys of `policy` that are arguments of Distributon."""
_SIGNAL_WAIT_S = 2.5
"""Seconds to wait for a stop signal after which other ranks have left already."""
_GLOO_LOST = re.compile(
    r"\[[^]\s]*/gloo/\S+:\d+\] "
    r"(Connection (closed|reset) by|Connect timeout|Timed out waiting \d+ms|(Read|Write) error|Broken pipe)"
    r"|Application timeout caused pair closure$"
)
"""Messages of a lost connection: gloo raises a plain RuntimeError, whose type does not distinguish it."""


def main(run_dir: str) -> int:
    """Run the program of the run folder as the rank that the environment describes; return the exit code."""
    folder = RunFolder(run_dir)
    try:
        config = folder.config()
    except SlurmddpError as error:
        return _report(error)

    program = config.get("program") or {}
    log_to_stderr("slurmddp" if program.get("script") else None)
    if program.get("script"):
        return _run_module(folder, program)

    with StopSignals() as signals, ExitGuard(signals, read_limits(os.environ)) as guard:
        try:
            _run(folder, config)
        except Exception as error:
            return _code_after(error, guard)

    return EXIT_FINISHED


def _run_module(folder: RunFolder, program: dict[str, Any]) -> int:
    """Run `main` of a module of slurmddp, such as the call of a function; return the exit code.

    The module handles stop signals itself, if it uses `should_stop`.
    """
    share_threads(detect(os.environ))
    module = importlib.import_module(program["script"].removeprefix(MODULE))
    code = module.main(arguments_of(folder, program, os.environ)) or EXIT_FINISHED

    if code == EXIT_FINISHED and StopController.is_leaving:
        return EXIT_STOPPED
    return int(code)


def _run(folder: RunFolder, config: dict[str, Any]) -> None:
    info = detect(os.environ)
    require(
        info,
        nodes=None if config.get("elastic") else config.get("nodes"),
        ranks_per_node=config.get("ranks_per_node"),
        gpus_per_node=config.get("gpus_per_node"),
    )

    settings = config.get("strategy", {"name": "ddp"})
    strategy = instantiate(settings, _key_="strategy") if "_target_" in settings else build(**settings)

    program = config.get("program") or {}
    if "_target_" not in program:
        raise ConfigError("program has no _target_.", hint="Name the function to run, or leave program out.")
    target = locate(program["_target_"], key="program._target_")
    options = {
        name: instantiate(value, _key_=f"program.{name}")
        for name, value in program.items()
        if name not in NOT_OPTIONS
    }

    policy = config.get("policy") or {}
    timeouts = {name: policy[name] for name in TIMEOUTS if name in policy}
    with Distributon(
        strategy=strategy,
        backend=config.get("backend", "auto"),
        precision=(config.get("train") or {}).get("precision", "32"),
        seed=config.get("seed"),
        config=bound_to(config),
        **timeouts,
    ) as distributon:
        _launch(distributon, info, config, folder)
        # The default trainer writes heartbeats from its start on, so the watchdog may expect them.
        if is_own_trainer(program):
            distributon.heartbeat("loading")
        target(distributon, config, folder, **options)


def _launch(distributon: Distributon, info: RankInfo, config: dict[str, Any], folder: RunFolder) -> None:
    """Join the process group, and run the preflight if it is on."""
    checks = config.get("preflight") and os.environ.get(PREFLIGHT_VARIABLE, "1") == "1"
    try:
        distributon.launch()
    except DevicesError as error:
        if checks:
            preflight.exclude_conflicting_nodes(info, folder, config, error)
        raise

    if checks:
        preflight.run(distributon._session.context, folder, config)
        distributon._session.startup.lap("preflight")
    else:
        _warn_of_cpus(distributon._session.context, folder)


def _warn_of_cpus(context: RankContext, folder: RunFolder) -> None:
    """Record a warning for `slurmddp status` if a job with GPUs computes on CPUs."""
    run = RunContext.read(os.environ, folder)
    gpus = context.info.gpus_on_node
    if context.info.rank == 0 and gpus and context.device.type == "cpu" and not run.is_superseded:
        text = f"SLURM granted {gpus} GPU(s) on node 0, but torch sees none: the ranks compute on CPUs."
        run.add_event("warned", about="device", text=text)


def _code_after(error: Exception, guard: ExitGuard) -> int:
    """Print the error and return the rank's exit code: 75 if other ranks have left because of a stop."""
    note_uncaught(error)
    if isinstance(error, SlurmddpError):
        code = _report(error)
    else:
        print_to_log(traceback.format_exc().rstrip())
        hint = hint_of(error)
        if hint:
            HeartbeatPage.attach(os.environ).report_error(ReportedError("", hint))
            print_to_log(f"{HINT}{hint}")
        code = EXIT_FAILED

    if code != EXIT_FAILED or not is_lost_rank(error):
        return code

    # The other ranks may have left because they received the stop signal before the training began. The
    # signal to this rank may arrive a moment later.
    if not guard.begun:
        time.sleep(_SIGNAL_WAIT_S)
    if guard.signals.poll() is None:
        return code

    print_to_log(f"{guard.signals.received} arrived, and other ranks have left: this rank leaves too.")
    return EXIT_STOPPED


def is_lost_rank(error: BaseException | None) -> bool:
    """Return whether the error, or one of its causes, is the loss of another rank.

    slurmddp raises RankFailure, torch's store and NCCL raise DistError, gloo a plain RuntimeError.
    """
    while error is not None:
        if isinstance(error, (RankFailure, dist.DistError)):
            return True
        if type(error) is RuntimeError and _GLOO_LOST.match(str(error)):
            return True
        error = error.__cause__

    return False


def _report(error: SlurmddpError) -> int:
    """Report the error to the agent, print its cause and the error, and return its exit code."""
    is_lost = is_lost_rank(error)
    text = f"{type(error).__name__}: {error.message}"
    # Unless the error is a refusal, its cause explains more. The agent then takes the printed cause.
    if error.__cause__ is not None and error.exit_code == EXIT_FAILED and not is_lost:
        text = ""
    HeartbeatPage.attach(os.environ).report_error(ReportedError(text, error.hint, is_lost))

    if error.__cause__ is not None:
        print_to_log("".join(traceback.format_exception(error.__cause__)).rstrip())
    if not (isinstance(error, StoppedAtCheckpoint) and error.is_printed):
        print_to_log(f"{type(error).__name__}: {error.message}\n{error.hint}".rstrip())
    return error.exit_code
