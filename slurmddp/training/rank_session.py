"""Run one rank from start to exit: join the process group and leave it, without waiting for lost ranks."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed

from slurmddp.environments.detect import Environment, detect
from slurmddp.environments.names import ENVIRONMENT_VARIABLE, LAUNCHER_VARIABLE, RUN_DIR_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    MismatchError,
    SlurmddpError,
    StoppedAtCheckpoint,
)
from slurmddp.host.heartbeat_page import HeartbeatPage, descriptor_from
from slurmddp.host.streams import print_to_log
from slurmddp.launchers.local.launcher import Launcher
from slurmddp.launchers.local.launcher import build as build_launcher
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.device.cuda import visible_gpus
from slurmddp.training.heartbeat import Heartbeat
from slurmddp.training.loggers.logger_threads import Loggers
from slurmddp.training.process_group import setup
from slurmddp.training.run_log import Milestones
from slurmddp.training.startup_timer import StartupTimer
from slurmddp.training.stopping.exit_guard import ExitGuard
from slurmddp.training.stopping.stop_controller import StopController

_DRAIN_S = 0.1
"""Seconds to wait after the end of a gloo group. Its threads release the last gradients a moment later and
need the interpreter for that. A process that exits earlier dies of std::terminate (torch 2.13)."""


class RankSession:
    """This process as a rank: its run, process group, stop controller, heartbeat and records of the run.

    Args:
        environ: the environment variables of the process.
        before_leaving: called at an orderly end, before the rank leaves its process group.
        environment: the source of this process's rank, as for `detect`.
        launcher: starts the ranks if no launcher started this process.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        before_leaving: Callable[[], object],
        environment: str | Environment | type[Environment] | None = None,
        launcher: str | Launcher | type[Launcher] = "local",
    ) -> None:
        self._environ = environ
        self._before_leaving = before_leaving
        self._environment = environment
        self.launcher = build_launcher(launcher)

        self.run = RunContext.read(environ)
        self.stop = StopController(ExitGuard.standing, self.run)
        self.startup = StartupTimer(environ)
        self.heartbeat = Heartbeat(HeartbeatPage.attach(environ), self.startup)
        self.milestones = Milestones(self.run, self.startup)
        self.loggers = Loggers()
        self._context: setup.RankContext | None = None
        self._pid = os.getpid()
        """The process that has joined the process group; a forked child has another pid."""

    @property
    def context(self) -> setup.RankContext:
        """This process's connection to the other ranks: process group, store and device.

        Raises:
            SlurmddpError: `start` was not called, or `close` was.
        """
        if self._context is None:
            raise SlurmddpError(
                "This Distributon has not been launched, or is closed already.",
                hint="Call launch() first: right after the constructor, before the model is built.",
            )
        return self._context

    def start(self, num_devices: int | str, group: Mapping[str, Any]) -> None:
        """Join the process group, or start the ranks if no launcher did (see `Distributon.launch`).

        Args:
            num_devices: number of ranks on this machine, or "auto".
            group: settings of the process group, which are keyword arguments of `setup.start`.
        """
        if self._context is not None:
            raise SlurmddpError(
                "launch() was called a second time.", hint="Call it once, before any setup_ method."
            )

        info = detect(self._environ, self._environment)
        devices = num_devices if isinstance(num_devices, int) else _devices_of(info)
        if self.ranks_to_start(num_devices) > 1:
            from slurmddp.launchers.local.launch import launch_script

            launch_script(devices, self.launcher)
        _require_devices(info, devices)

        self.heartbeat.enter("meeting")
        try:
            self._context = setup.start(info, **group, stopped=lambda: self.stop.requested)
        except StoppedAtCheckpoint as error:
            if self.run.by_agent:
                _print(error)
            raise

        self._pid = os.getpid()
        self.milestones.rank = info.rank
        StopController.is_leaving = False
        atexit.register(self._close_at_exit)
        self.heartbeat.enter("loading", watched=False)
        self.startup.lap("rendezvous")

    def ranks_to_start(self, num_devices: int | str) -> int:
        """Return how many ranks `start` has to start; 0 if a launcher started them, or if there is one rank.

        Raises:
            SlurmddpError: a launcher started this process as a rank, but the rank's variables are hidden.
        """
        info = detect(self._environ, self._environment)
        devices = num_devices if isinstance(num_devices, int) else _devices_of(info)
        if info.environment != "single" or distributed.is_initialized():
            return 0

        _refuse_hidden_rank(self._environ, devices)
        if devices <= 1:
            return 0
        _refuse_to_multiply()
        return devices

    def close(self) -> None:
        """Wait for saves, leave the process group and close the loggers.

        Further calls, and calls in a forked child, do nothing.
        """
        atexit.unregister(self._close_at_exit)
        if self._context is None or self._is_forked:
            return

        if self.stop.is_answering and not StopController.is_leaving:
            self.heartbeat.finish()

        self.heartbeat.enter("ending")
        try:
            self._before_leaving()
        finally:
            self._leave(self._context)
        self.heartbeat.enter("ending", watched=False)
        self.loggers.close()

    def end(self, error: BaseException | None) -> None:
        """Leave the process group at the end of the `with` block of the training.

        After an error, a rank does not wait for other ranks, and does not destroy its process group.

        Args:
            error: the exception that ended the block, or None.

        Raises:
            StoppedAtCheckpoint: the block ended without an error although `should_stop` had returned True.
        """
        if isinstance(error, StoppedAtCheckpoint) and self._context is not None:
            self.milestones.stopped(self.stop.reason)

        code: Any = EXIT_FAILED
        if error is None:
            code = EXIT_FINISHED
        elif isinstance(error, SystemExit):
            code = error.code or EXIT_FINISHED
        stopped = self.stopped() if code == EXIT_FINISHED and StopController.is_leaving else None

        if code in (EXIT_FINISHED, EXIT_STOPPED) or self._is_alone:
            self.close()
        else:
            # Don't close at exit either: closing waits for other ranks, which may be stuck in a collective
            # that this rank will never join.
            atexit.unregister(self._close_at_exit)
        if stopped is not None:
            raise stopped

    def stopped(self) -> StoppedAtCheckpoint:
        """Return the error that ends a stopped training, after printing it.

        Rank 0 prints it. In a run with an agent all ranks do, each into its own log.
        """
        why = f" by {self.stop.reason.text}" if self.stop.reason else ""
        error = StoppedAtCheckpoint(
            f"The training was stopped{why}.",
            hint="Run the same command again to resume from its checkpoint.",
        )

        if self.run.by_agent or (self._context is not None and self.context.info.rank == 0):
            _print(error)
        return error

    @property
    def _is_alone(self) -> bool:
        return self._context is None or self._context.backend is None

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a forked child, which must not touch the rank's process group and saves."""
        return os.getpid() != self._pid

    def _leave(self, context: setup.RankContext) -> None:
        self.stop.close()
        setup.finish(context)
        if context.backend is not None:
            time.sleep(_DRAIN_S)
        self._context = None

    def _close_at_exit(self) -> None:
        ends_by_error = hasattr(sys, "last_type")
        if not self._is_forked and not ends_by_error:
            self.close()


def _print(error: StoppedAtCheckpoint) -> None:
    print_to_log(str(error))
    error.is_printed = True


def connect_to_agent(environ: Mapping[str, str]) -> None:
    """In a process that an agent started, print slurmddp's log records, and report the exit code at exit.

    In other processes, do nothing.
    """
    if descriptor_from(environ) < 0:
        return

    if not logging.getLogger("slurmddp").handlers:
        log_to_stderr("slurmddp")
    atexit.unregister(_explain_exit)
    atexit.register(_explain_exit, HeartbeatPage.attach(environ), os.getpid())


def log_to_stderr(name: str | None) -> None:
    """Print the log records of a logger and its children to stderr.

    Args:
        name: the name of the logger. None: the root logger, and so all loggers. In a user's program, pass
            "slurmddp": a handler at the root logger would make `logging.basicConfig` do nothing.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _explain_exit(page: HeartbeatPage, pid: int) -> None:
    """Report to the agent the exit code that fits the end of this program, if Python's own code does not.

    After a SlurmddpError it is the exit code of the error. If `should_stop` has returned True, it is
    EXIT_STOPPED: the training is not finished, although the program may exit with 0.
    """
    # This is a forked child of the rank, whose end means nothing for the rank.
    if os.getpid() != pid:
        return

    error = getattr(sys, "last_value", None)
    if isinstance(error, SlurmddpError):
        page.explain_exit(error.exit_code)
    elif StopController.is_leaving:
        page.explain_exit(EXIT_STOPPED)


def _devices_of(info: RankInfo) -> int:
    """Return the number of ranks on this machine for `num_devices="auto"`."""
    if info.environment != "single":
        return info.local_world_size
    return max(1, visible_gpus())


def _refuse_hidden_rank(environ: Mapping[str, str], devices: int) -> None:
    """Raise MismatchError if LOCAL_RANK is above 0, so that a launcher ran, but the rank is unknown."""
    local_rank = environ.get("LOCAL_RANK", "")
    is_meant = environ.get(ENVIRONMENT_VARIABLE) == "single" and devices == 1
    if local_rank.isdecimal() and int(local_rank) > 0 and not is_meant:
        raise MismatchError(
            f"launch() was called in a process with LOCAL_RANK={local_rank} whose rank is unknown: RANK and "
            "WORLD_SIZE are not both set, or SLURMDDP_ENVIRONMENT hides them.",
            hint="Start all ranks with torchrun or srun, or set RANK and WORLD_SIZE as well. If no launcher "
            "started this process, unset LOCAL_RANK.",
        )


def _refuse_to_multiply() -> None:
    """Raise SlurmddpError in a process that must not start ranks: multiprocessing or launch() started it."""
    if multiprocessing.parent_process() is not None:
        raise SlurmddpError(
            "launch() was called in a process that multiprocessing started, which can't start ranks.",
            hint="Call launch() in the main program, under `if __name__ == '__main__':`.",
        )
    if os.environ.get(LAUNCHER_VARIABLE) == "local":
        raise SlurmddpError(
            "launch() was called in a process that launch() started, and its rank is unknown.",
            hint="Unset SLURMDDP_ENVIRONMENT, because it hides the variables with the rank.",
        )


def _require_devices(info: RankInfo, devices: int) -> None:
    """Raise MismatchError unless `devices` ranks were started on this machine."""
    if devices != info.local_world_size:
        launcher = "slurmddp" if RUN_DIR_VARIABLE in os.environ else info.environment
        raise MismatchError(
            f"num_devices is {devices}, but {launcher} started {info.local_world_size} "
            f"process(es) on {socket.gethostname()}.",
            hint=_start_command(launcher, devices),
        )


def _start_command(launcher: str, devices: int) -> str:
    auto = 'or use num_devices="auto"'
    if launcher == "slurmddp":
        return f"Start the program with `slurmddp run -n {devices}`, {auto}."
    if launcher == "slurm":
        return f"Start the program with `srun --ntasks-per-node={devices}`, {auto}."
    if launcher == "torchrun":
        return f"Start the program with `torchrun --nproc-per-node={devices}`, {auto}."
    return f"Start {devices} process(es) per node, {auto}."
