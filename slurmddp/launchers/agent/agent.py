"""Run the agent of a node: the process that starts the node's ranks and watches them.

    python -m slurmddp.launchers.agent RUN_DIR

The batch script starts the agent through srun, the local launcher as a plain process, submitit as its task.
The agent reads the rank of its node from the environment, and everything else from the run folder. For
slurmddp's trainer and for functions the agent imports torch once, and forks the ranks. A person's program
starts as torchrun would start it (`user_program.py`). The agent never initialises CUDA and keeps no thread,
so that it can be forked. Node 0's agent decides for all agents when ranks start, restart and end (see
`Coordinator`).

An agent's exit code combines the exit codes of its ranks (`errors.combine_exit_codes`). The exit code is 0
once a later attempt has begun; the file `exit-node-N` always holds the combined code.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.detect import detect, require
from slurmddp.environments.names import ATTEMPT_VARIABLE, SECRET_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.time_limits import read_limits
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE, ConfigError, SlurmddpError
from slurmddp.host import process
from slurmddp.host.process import OrphanReaper
from slurmddp.host.signals import STOP_SIGNALS, SignalInbox
from slurmddp.host.streams import keep_output
from slurmddp.launchers.agent import user_program
from slurmddp.launchers.agent.event_loop import AgentLoop
from slurmddp.launchers.agent.experiment_trackers import tracker_environment
from slurmddp.launchers.agent.first_node_lost import batch_script_is_gone, requeue
from slurmddp.launchers.agent.node_watch import NodeWatch
from slurmddp.launchers.agent.preload import PRELOAD, enter_project, import_for_all
from slurmddp.launchers.agent.without_link import report_unable
from slurmddp.launchers.agent.worker_group import ForkedWorkers, WorkerSpec
from slurmddp.launchers.coordinator.restart_policy import Rules, rules_of
from slurmddp.launchers.coordinator.run_folder_recorder import RunFolderRecorder, log_line
from slurmddp.launchers.link.link import Link, open_link
from slurmddp.launchers.watchdog.nccl_trace import FlightRecorder
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import Failure, describe
from slurmddp.runs.failures.kinds import Cause
from slurmddp.runs.folder.late_files import look_again
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings import spec

WORKER = "slurmddp.training.rank_main:main"
_UNKILLABLE_S = 2.0
"""Seconds to wait at most for the end of killed processes: the kernel may hold a process in I/O."""


def run(run_dir: str, *, entry: str = WORKER, preload: Sequence[str] = PRELOAD) -> int:
    """Run the ranks of this node until the attempt ends; return the node's exit code.

    Args:
        run_dir: the run folder.
        entry: the `module:function` that each rank of slurmddp's trainer runs.
        preload: the modules to import before the ranks are forked.
    """
    keep_output()
    process.die_with_parent(signal.SIGTERM)
    process.adopt_orphans()
    folder = RunFolder(run_dir)
    signal.signal(signal.SIGUSR1, _ignore_signal)

    with SignalInbox((*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD)) as inbox:
        try:
            attempt = _attempt_number(os.environ)
        except SlurmddpError as error:
            _print_error(error)
            _record_without_attempt(folder, error)
            return error.exit_code

        try:
            node = detect(os.environ)
        except SlurmddpError as error:
            _print_error(error)
            return _end_without_node(folder, attempt, error, inbox)

        # The file is only information, so the agent continues if the disk is full.
        with suppress(OSError):
            folder.begun_file(attempt, node.node_rank).touch()

        agent = Agent(folder, attempt, node, inbox)
        code = agent.run(entry, preload)
        # Processes that a rank has started may have left the rank's process group, and so still run.
        process.end_children(_UNKILLABLE_S)
        _write_exit_file(folder, attempt, node.node_rank, code)

    if agent.lost_coordinator or (node.node_rank == 0 and batch_script_is_gone(os.environ)):
        requeue(folder, os.environ)

    # At an exit code other than 0 srun cancels its step by id, and the step of a later attempt reuses the id.
    return EXIT_FINISHED if folder.is_superseded(attempt) else code


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Ignore SIGUSR1: `scancel --signal=USR1` also sends it to the ranks, and only a script may use it."""


def _end_without_node(folder: RunFolder, attempt: int, error: SlurmddpError, inbox: SignalInbox) -> int:
    """Report that this agent can't run ranks, because its environment describes no node.

    Returns:
        The agent's exit code.
    """
    number = os.environ.get("SLURM_NODEID", "")
    node_rank = int(number) if number.isdecimal() else 0
    failure = _refusal(error, node_rank=node_rank)
    recorder = RunFolderRecorder(folder, attempt)

    code = EXIT_FAILED
    if not report_unable(None, node_rank, failure, None, recorder, inbox):
        recorder.failed(failure)
        code = error.exit_code

    if number.isdecimal():
        _write_exit_file(folder, attempt, node_rank, code)
    return code


class Agent:
    """The agent of one node in one attempt: it prepares the node and runs the node's ranks."""

    def __init__(self, folder: RunFolder, attempt: int, node: RankInfo, inbox: SignalInbox) -> None:
        self.folder = folder
        self.attempt = attempt
        self.node = node
        self._inbox = inbox
        self._recorder = RunFolderRecorder(folder, attempt)
        self._rules: Rules | None = None
        """The rules of the run, once the configuration has been read."""
        self._link: Link | None = None
        """The link to the other agents, once it is open."""
        self._loop: AgentLoop | None = None
        """The event loop, once ranks can start."""

    def run(self, entry: str, preload: Sequence[str]) -> int:
        """Prepare the node and run its ranks; return the node's exit code.

        An exception in the agent is printed, reported as this node's failure, and gives the exit code.
        """
        with ExitStack() as undo:
            try:
                self._loop = self._prepare(entry, preload, undo)
                return self._loop.run()
            except SlurmddpError as error:
                _print_error(error)
                return self._give_up(_refusal(error, node_rank=self.node.node_rank))
            except Exception:
                traceback.print_exc()
                lines = capture.tail_of(traceback.format_exc())
                return self._give_up(capture.here(EXIT_FAILED, node_rank=self.node.node_rank, lines=lines))

    @property
    def lost_coordinator(self) -> bool:
        """Return whether node 0's agent, which contains the coordinator, was lost."""
        return self._loop is not None and self._loop.lost_coordinator

    def _prepare(self, entry: str, preload: Sequence[str], undo: ExitStack) -> AgentLoop:
        """Read the configuration, open the link and import modules for the ranks; return the event loop.

        Args:
            entry: `module:function` of a rank.
            preload: the modules to import before the fork.
            undo: closes the resources of this agent at its end; each resource adds its `close`.
        """
        # If an earlier attempt ran on this host, the host may still cache the old content of replaced files.
        look_again(self.folder.path)
        config = self.folder.config()
        rules = self._rules = rules_of(config, self.node.nodes)
        require(self.node, nodes=rules.all_nodes, ranks_per_node=1)

        # Fork the reaper first: its process would inherit the sockets of an open link, and keep them open.
        reaper = OrphanReaper()
        undo.callback(reaper.close)
        # Node 0 listens from now on. The other agents connect only after their imports, because only the
        # event loop handles the link.
        link = self._link = open_link(self.node, _secret(os.environ, self.node))
        undo.callback(link.close)

        enter_project(self.folder, config.get("project_dir"))
        checkpoints = CheckpointService()
        undo.callback(checkpoints.close)
        flight_recorder = self._flight_recorder(config.get("gpus_per_node"))
        if flight_recorder is not None:
            undo.callback(flight_recorder.close)

        is_foreign = spec.is_foreign(config.get("program") or {})
        # The agent need not import for a person's program: execve replaces the process and its imports.
        if is_foreign:
            entry = user_program.ENTRY
            preload = ()
        workers_spec = self._import(rules, entry, preload, flight_recorder, is_foreign)

        in_child = (
            self._inbox.close_in_child,
            partial(link.close, farewell=False),
            checkpoints.close_in_child,
        )
        workers = ForkedWorkers(workers_spec, reaper, checkpoints, in_child)
        watch = NodeWatch(
            (config.get("policy") or {}).get("stall_timeout_s"),
            self._log_dir,
            socket.gethostname(),
            processes=workers.processes,
            flight_recorder=flight_recorder,
        )
        return AgentLoop(
            self.node,
            self._inbox,
            link,
            rules,
            workers,
            checkpoints,
            watch,
            self._recorder,
            read_limits(os.environ),
            is_over=partial(self.folder.is_over, self.attempt),
        )

    def _flight_recorder(self, gpus: int | None) -> FlightRecorder | None:
        """Return NCCL's flight recorder; None on a node without GPUs, or if it can't be set up."""
        if not gpus:
            return None
        try:
            return FlightRecorder(self._log_dir)
        except OSError as error:
            log_line(f"NCCL's flight recorder stays off on this node: {error}")
            return None

    def _import(
        self,
        rules: Rules,
        entry: str,
        preload: Sequence[str],
        flight_recorder: FlightRecorder | None,
        is_foreign: bool,
    ) -> WorkerSpec:
        """Import the modules that all ranks share; return the program of the ranks."""
        obstacle = import_for_all(preload)
        if obstacle:
            log_line(f"{obstacle}, so ranks are not forked: each rank imports for itself, which is slower")
        imports_s = process.age_s()
        log_line(
            f"node {self.node.node_rank} of {self.node.nodes} on {socket.gethostname()}, attempt "
            f"{self.attempt}: imports took {imports_s:.2f} s, ranks here: {rules.ranks_per_node}"
        )

        common = tracker_environment(self.folder, os.environ)
        if flight_recorder is not None:
            common |= flight_recorder.environment(os.environ)
        return WorkerSpec(
            self.folder,
            self.attempt,
            self.node,
            rules.ranks_per_node,
            entry,
            imports_s,
            common,
            forks=obstacle is None,
            is_script=rules.is_script,
            is_foreign=is_foreign,
        )

    @property
    def _log_dir(self) -> Path:
        return self.folder.log_dir(self.attempt)

    def _give_up(self, failure: Failure) -> int:
        """End the ranks, report why this agent ends, and return its exit code."""
        code = failure.exit_code or EXIT_FAILED
        if self._loop is not None:
            self._loop.give_up(failure)
            return code

        log_line(describe(failure))
        node_rank = self.node.node_rank
        if report_unable(self._link, node_rank, failure, self._rules, self._recorder, self._inbox):
            # The coordinator decides whether the attempt fails, so this agent records no failure.
            return EXIT_FAILED
        self._recorder.failed(failure)
        return code


def _attempt_number(environ: Mapping[str, str]) -> int:
    text = environ.get(ATTEMPT_VARIABLE, "")
    if not text.isdecimal():
        raise ConfigError(
            f"SLURMDDP_ATTEMPT is {text!r}, not the number of an attempt.",
            hint="The batch script and `slurmddp train` set it. A container has to keep the variables of the "
            "job: apptainer without --cleanenv and --containall.",
        )
    return int(text)


def _secret(environ: Mapping[str, str], node: RankInfo) -> str:
    """Return the secret by which the agents of this attempt authenticate each other.

    If the environment has no secret, it is the launch id, which other accounts can guess.
    """
    secret = environ.get(SECRET_VARIABLE, "")
    if not secret and node.nodes > 1:
        log_line(
            f"{SECRET_VARIABLE} is not set: agents authenticate each other by the launch id, which other "
            "accounts can guess"
        )
    return secret or node.launch_id


def _record_without_attempt(folder: RunFolder, error: SlurmddpError) -> None:
    """Record the failure of this agent in the newest attempt, because the environment names no attempt."""
    attempts = folder.attempts()
    if attempts:
        failure = replace(_refusal(error, node_rank=0), node_rank=None)
        RunFolderRecorder(folder, attempts[-1]).failed(failure)


def _refusal(error: SlurmddpError, *, node_rank: int) -> Failure:
    """Return the failure to record for this agent, which ends because of the exception `error`."""
    lines = capture.tail_of(f"{error.message}\n{error.hint}")
    return capture.here(
        error.exit_code,
        node_rank=node_rank,
        lines=lines,
        cause=Cause("other", error.message),
        remedy=error.hint,
    )


def _write_exit_file(folder: RunFolder, attempt: int, node_rank: int, code: int) -> None:
    path = folder.exit_file(attempt, node_rank)
    try:
        path.write_text(f"{code}\n", encoding="utf-8")
    except OSError as error:
        log_line(f"{path.name} was not written: {error}")


def _print_error(error: SlurmddpError) -> None:
    print(f"Error: {error.message}\n{error.hint}".rstrip(), file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent for the run folder named on the command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print("usage: python -m slurmddp.launchers.agent RUN_DIR", file=sys.stderr)
        return EXIT_USAGE
    return run(arguments[0])
