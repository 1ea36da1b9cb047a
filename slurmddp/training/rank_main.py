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
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.signals import StopSignals
from slurmddp.training.stopping.stop_controller import StopController

_SCRIPT_KEYS = ("script", "args", "free_args", "resume_args", "resumable", "checkpoints")
NOT_OPTIONS = ("_target_", *_SCRIPT_KEYS)
"""Keys of `program` that are not arguments of its function."""
TIMEOUTS = ("rendezvous_timeout_s", "collective_timeout_s")
"""Keys of `policy` that are arguments of Distributon."""
_SIGNAL_WAIT_S = 2.5
"""Seconds that a rank, after others have left, waits for the stop signal that may be their reason."""
_GLOO_LOST = re.compile(
    r"\[[^]\s]*/gloo/\S+:\d+\] "
    r"(Connection (closed|reset) by|Connect timeout|Timed out waiting \d+ms|(Read|Write) error|Broken pipe)"
    r"|Application timeout caused pair closure$"
)
"""Matches messages of gloo about a lost connection: gloo raises a plain RuntimeError for any error."""


def main(run_dir: str) -> int:
    """Run the program of a run as one rank; return its exit code.

    Args:
        run_dir: the run folder. The environment contains the number of the rank.
    """
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
    """Run `main` of the module of slurmddp in `program.script`; return the exit code.

    Signal handlers are installed only if the code of the module calls `should_stop`.
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
        raise ConfigError("program has no _target_.", hint="Name the function to run, or omit program.")
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
        # Let the watchdog expect heartbeats already now: the default trainer writes them from its start on. A
        # user's function may not.
        if is_own_trainer(program):
            distributon.heartbeat("loading")
        target(distributon, config, folder, **options)


def _launch(distributon: Distributon, info: RankInfo, config: dict[str, Any], folder: RunFolder) -> None:
    """Join the other ranks, and then run the preflight, if it is on.

    Raises:
        UnhealthyNodeError: the next attempt excludes an unhealthy node.
        SlurmddpError: the ranks can't meet, or a check failed.
    """
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
    """Record a warning in the run folder if SLURM gave this job GPUs but its ranks compute on CPUs."""
    run = RunContext.read(os.environ, folder)
    gpus = context.info.gpus_on_node
    if context.info.rank == 0 and gpus and context.device.type == "cpu" and not run.is_superseded:
        text = f"SLURM granted {gpus} GPU(s) on node 0, but torch sees none: the ranks compute on CPUs."
        run.add_event("warned", about="device", text=text)


def _code_after(error: Exception, guard: ExitGuard) -> int:
    """Print the error and return the rank's exit code.

    It is EXIT_STOPPED (75) if the error is the loss of another rank and a stop signal has arrived: that rank
    has left because of the stop.
    """
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

    # Before the training begins, a rank exits soon after a stop signal. So another rank may have left because
    # of a signal that has not arrived at this rank yet: wait for it.
    if not guard.begun:
        time.sleep(_SIGNAL_WAIT_S)
    if guard.signals.poll() is None:
        return code

    print_to_log(f"{guard.signals.received} arrived, and other ranks have left: this rank leaves too.")
    return EXIT_STOPPED


def is_lost_rank(error: BaseException | None) -> bool:
    """Decide whether the error, or one of its causes, means that the connection to another rank was lost.

    Such errors are RankFailure of slurmddp, DistError of torch's store and NCCL, and RuntimeError of gloo
    with certain messages.
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
    # If the error has a cause and the general exit code, its cause explains more. Then report no text, and
    # the agent uses the traceback of the cause that is printed below.
    if error.__cause__ is not None and error.exit_code == EXIT_FAILED and not is_lost:
        text = ""
    HeartbeatPage.attach(os.environ).report_error(ReportedError(text, error.hint, is_lost))

    if error.__cause__ is not None:
        print_to_log("".join(traceback.format_exception(error.__cause__)).rstrip())
    if not (isinstance(error, StoppedAtCheckpoint) and error.is_printed):
        print_to_log(f"{type(error).__name__}: {error.message}\n{error.hint}".rstrip())
    return error.exit_code
