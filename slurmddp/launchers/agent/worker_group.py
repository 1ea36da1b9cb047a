"""Start, watch and end the ranks of one node, which are the node's part of a worker group.

A subclass of `WorkerGroup` makes the processes: an agent forks them, `launch()` runs a command. A fork shares
the modules that the agent has imported, so eight ranks cost one import of torch. A person's program replaces
the forked process (`user_program.py`), and its agent has imported nothing. If the agent can't be forked after
its imports, the ranks are separate programs that import for themselves. A restarted rank gets the heartbeat
page, the log and the states in memory of the rank before it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.emit import rank_environment
from slurmddp.environments.names import (
    CHANNEL_VARIABLE,
    ENVIRONMENT_VARIABLE,
    HEARTBEAT_VARIABLE,
    IMPORTS_VARIABLE,
    MEMORY_VARIABLE,
    PREFLIGHT_VARIABLE,
    RESTART_COUNT_VARIABLE,
)
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, GOOD_CODES, HINT, SlurmddpError
from slurmddp.host import process
from slurmddp.host.address import Address
from slurmddp.host.cgroups import OomWatch
from slurmddp.host.heartbeat_page import HeartbeatPage
from slurmddp.host.ports import candidate_ports, listen, listen_as_rank_zero
from slurmddp.host.process import OrphanReaper
from slurmddp.host.signals import STOP_SIGNALS
from slurmddp.launchers.agent.meeting_watch import MeetingWatch
from slurmddp.launchers.agent.worker import RankSpec, be_rank, spawn
from slurmddp.launchers.coordinator.messages import StartWorkers
from slurmddp.launchers.coordinator.restart_policy import Assignment
from slurmddp.runs.failures import capture, torchrun_report
from slurmddp.runs.failures.failure import Failure, UnexplainedFailure, is_consequence
from slurmddp.runs.failures.kinds import Cause, FailureKind
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.program_hints import hint_after
from slurmddp.runs.text_format import counted

_UNKILLABLE_S = 60.0
"""Seconds for killed ranks to end: the kernel needs time to free large memories."""
_END_S = 2.0
"""Seconds that `stop` waits for a killed rank. SLURM ends a rank that the kernel keeps in I/O for longer."""
_POLL_S = 0.002
_TRACKER_S = 2.0
"""Seconds for the resource tracker of a dead rank to end by itself; it needs milliseconds."""
_REQUESTS = STOP_SIGNALS | {signal.SIGINT}
"""The signals by which a program is asked to stop."""
_CODES_OF_A_STOP = frozenset(
    {EXIT_FINISHED, EXIT_STOPPED, *(-number for number in _REQUESTS), *(128 + number for number in _REQUESTS)}
)
"""Exit codes of a program that was asked to stop and ended for that reason; negative for a signal."""


class WorkerGroup(ABC):
    """Starts, watches and ends the ranks of one node, worker group after worker group.

    Call its methods from the main thread only.
    """

    def __init__(self, ranks_per_node: int, agent: int = 0) -> None:
        self.restart_count = 0
        self.codes: list[int] = []
        """Exit codes of the ranks that ended by themselves, not by this agent; negative for a signal."""
        self.failed: list[Failure] = []
        """The failures of the ranks that ended by themselves, not by this agent."""
        self.left: list[Failure] = []
        """The ranks that exited with 0, as failures: their exit was too early if other ranks needed them."""
        self._ranks_per_node = ranks_per_node
        self._agent = agent
        self._node_rank = 0
        self._running: dict[int, int] = {}
        """The local ranks that run, by pid."""
        self._ended_by_agent = False
        """Whether this agent ends the ranks, so that their exit codes show no failure."""
        self._kill_by = 0.0
        """When all killed ranks should have ended, on the monotonic clock."""
        self._oom = OomWatch()

    @abstractmethod
    def _start(self, local_rank: int, order: StartWorkers) -> int:
        """Start one rank as the leader of a process group; return its pid."""

    @abstractmethod
    def _exit_code(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended, negative for a signal; None while it runs."""

    @abstractmethod
    def _last_lines(self, local_rank: int) -> Callable[[], Sequence[str]]:
        """Return a function that reads the last output lines of a rank that has ended.

        The function still returns the lines of that rank after the rank was restarted.
        """

    def __len__(self) -> int:
        return len(self._running)

    @property
    def good_codes(self) -> list[int]:
        """Return the exit codes of the ranks that ended with 0 or 75."""
        return [code for code in self.codes if code in GOOD_CODES]

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank."""
        return self._node_rank * self._ranks_per_node + local_rank

    def start(self, order: StartWorkers) -> None:
        """Start this node's ranks of the worker group that `order` describes."""
        self._node_rank = order.agents.index(self._agent)
        self.restart_count = order.restart_count
        self.codes = []
        self.failed = []
        self.left = []
        self._ended_by_agent = False
        self._oom.begin()

        for local_rank in range(self._ranks_per_node):
            self._running[self._start(local_rank, order)] = local_rank

    def poll(self) -> list[Failure]:
        """Record the ranks that have ended since the last call; return the failures among them."""
        failed: list[Failure] = []
        # Reap all ended ranks before the first is recorded, because recording may take time.
        exit_codes = {pid: self._exit_code(pid) for pid in self._running}
        for pid, exit_code in exit_codes.items():
            if exit_code is None:
                continue

            local_rank = self._running.pop(pid)
            code = self._judge(local_rank, exit_code)
            self._record_exit(local_rank, code)
            if code == EXIT_FINISHED:
                self.left.append(self._failure(local_rank, code).because(Cause.of("left_early")))

            # The agent has ended this rank, so the exit code is no failure of the rank.
            if self._ended_by_agent:
                continue
            self.codes.append(code)
            if code not in GOOD_CODES:
                failed.append(self._failure(local_rank, code))

        self.failed += failed
        return failed

    def _judge(self, local_rank: int, code: int) -> int:
        """Return the exit code to record for a rank whose process ended with `code`.

        A subclass may correct the code by what it knows about the rank.
        """
        return code

    def _record_exit(self, local_rank: int, code: int) -> None:  # noqa: B027
        """Record how a rank ended; a subclass without a run folder does nothing."""

    def _failure(self, local_rank: int, code: int) -> UnexplainedFailure:
        return capture.unexplained(
            code,
            self._last_lines(local_rank),
            node_rank=self._agent,
            rank=self.rank(local_rank),
            local_rank=local_rank,
            restart_count=self.restart_count,
            oom=self._oom.verdict(),
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank, but not to the processes that ranks have started."""
        for pid in self._running:
            os.kill(pid, number)

    def stop(self, grace_s: float) -> None:
        """End every rank: send SIGTERM, and SIGKILL after `grace_s`; return when no rank runs."""
        # Record the ranks that have ended by themselves, whose exit codes count.
        self.poll()
        self._ended_by_agent = True
        self.signal(signal.SIGTERM)
        self.wait(grace_s)
        self.kill()
        self.wait(_END_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until no rank runs, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.poll()

    def kill(self) -> None:
        """Send SIGKILL to every rank and to its processes; `is_gone` returns whether they have ended."""
        self._ended_by_agent = True
        self._kill_by = time.monotonic() + _UNKILLABLE_S
        for pid in self._running:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        process.signal_group(pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Return whether `poll` has seen every rank end.

        Raises:
            SlurmddpError: a rank still runs `_UNKILLABLE_S` after SIGKILL.
        """
        if self._running and time.monotonic() > self._kill_by:
            raise SlurmddpError(
                f"SIGKILL has not ended {counted(len(self._running), 'rank')} on this node within "
                f"{_UNKILLABLE_S:g} s: a system call keeps the process in the kernel.",
                hint="Probably a file server or a device does not answer. The node may need a restart.",
            )
        return not self._running


@dataclass(frozen=True)
class WorkerSpec:
    """The program of a node's ranks, which is the same in every worker group."""

    folder: RunFolder
    attempt: int
    node: RankInfo
    """The agent as a task of its srun step, which has one task per node: node rank and names of nodes."""
    ranks_per_node: int
    entry: str
    """The `module:function` that a rank runs."""
    imports_s: float
    """Seconds from the agent's start until it could start ranks."""
    common: Mapping[str, str]
    """The environment variables that all ranks get."""
    forks: bool = True
    """Whether the agent can be forked after its imports."""
    is_script: bool = False
    """Whether the ranks run a person's script, whose exit code does not show whether it has finished."""
    is_foreign: bool = False
    """Whether the ranks are programs of a person (`user_program.py`)."""


class ForkedWorkers(WorkerGroup):
    """The ranks of an agent, which forks them or, if it can't be forked, starts them as programs."""

    def __init__(
        self,
        spec: WorkerSpec,
        reaper: OrphanReaper,
        checkpoints: CheckpointService,
        in_child: Sequence[Callable[[], object]],
    ) -> None:
        """Prepare to start ranks.

        Args:
            spec: the program of the ranks.
            reaper: kills the processes of the ranks if this agent dies.
            checkpoints: holds the checkpoints of the ranks in memory.
            in_child: calls by which a forked rank closes the resources of the agent.
        """
        super().__init__(spec.ranks_per_node, spec.node.node_rank)
        self._spec = spec
        self._reaper = reaper
        self._checkpoints = checkpoints
        self._in_child = in_child
        self._pages = [HeartbeatPage.create() for _ in range(spec.ranks_per_node)]
        self._log_sizes = [0] * spec.ranks_per_node
        """The size of each rank's log when the rank started."""
        self._hints: dict[int, str] = {}
        """Advice on the errors of programs that have failed, by local rank."""
        self._agents: tuple[int, ...] = ()
        """The numbers of the agents of the present worker group."""
        self._step_variables: list[dict[str, str]] = []
        """By local rank, the variables that describe to a rank the srun step of the present agents."""
        self._address: Address | None = None
        """The address of this node at which ranks can meet, once it is known."""
        self._started_at = 0.0
        """When the present worker group started, on the monotonic clock."""
        self._is_stopping = False
        """Whether the run was asked to stop."""
        self._forwarded: dict[int, set[int]] = {}
        """The stop signals that each rank was sent, by local rank."""
        self._signals_before: frozenset[int] = frozenset()
        """The signals that SLURM had sent to the processes of this node before the last rank started."""
        self._meetings = MeetingWatch()

    def meeting_point(self, assignment: Assignment) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT for ranks that use them; only node 0's agent calls this."""
        node = self._spec.node
        ports = candidate_ports(f"{node.launch_id} {assignment.restart_count} master")
        # Any free port will do (`bool` accepts each), because the ranks get its number with the order to
        # start.
        if self._address is None:
            probe = listen_as_rank_zero(node, ports, bool)
        else:
            # Reuse the address of the first worker group. A name server that does not answer would hold up
            # the restart, and the link between agents.
            probe = listen(self._address, ports, bool)

        with probe:
            address, port = probe.getsockname()[:2]
            self._address = Address(probe.family, address)

        # On emulated nodes use the host name: some programs refuse a MASTER_ADDR that is not the first name
        # of SLURM_JOB_NODELIST.
        name = node.hosts[0] if node.emulated and address == "127.0.0.1" else address
        return name, int(port)

    def start(self, order: StartWorkers) -> None:
        """Start the ranks of this node; ranks on plain torch meet at `order.master`."""
        if order.agents != self._agents:
            self._describe_step(order.agents)
        self._started_at = time.monotonic()
        # Flush before the fork: a forked rank would write the buffered output of the agent again.
        sys.stdout.flush()
        sys.stderr.flush()

        self._forwarded = {}
        self._meetings.begin(order.master[1], self._started_at)
        super().start(order)
        self._signals_before = self._reaper.signals_seen()

    def expect_stop(self) -> None:
        """Note that the run was asked to stop: ranks that exit from now on have not finished."""
        self._is_stopping = True

    def ask_to_stop(self, requested: signal.Signals) -> None:
        """Send each rank a signal to stop, unless SLURM or this agent has sent it that signal before.

        A script that does not handle SIGUSR2 gets SIGTERM in its place, the signal of torchrun. SIGINT also
        reaches the processes that a program has started, as from a terminal; forked ranks get SIGTERM then.
        """
        self.expect_stop()
        if requested == signal.SIGINT and not self._spec.is_foreign:
            requested = signal.SIGTERM

        for pid, local_rank in self._running.items():
            number = requested
            if self._spec.is_script and number == signal.SIGUSR2 and not process.handles(pid, number):
                number = signal.SIGTERM

            forwarded = self._forwarded.setdefault(local_rank, set())
            if number not in forwarded | self.signals_of_slurm():
                os.kill(-pid if number == signal.SIGINT else pid, number)
            forwarded.add(number)

    def signals_of_slurm(self) -> frozenset[int]:
        """Return the numbers of the stop signals that SLURM, and not this agent, has sent to the ranks."""
        return (self._reaper.signals_seen() - self._signals_before) & _REQUESTS

    def _judge(self, local_rank: int, code: int) -> int:
        """Return 75 for a rank that has exited because of a stop, whatever exit code its program uses.

        A script that saves at the signal usually ends with 0 or by the signal. A rank that fails after the
        request only because it lost its peers has stopped as well. The 0 of a loop on Distributon stays 0
        if the heartbeat page shows that the loop has finished. A torchrun ends with 1 after a stop and after
        any failure, so its printed report decides.
        """
        code = self._pages[local_rank].explained(code)
        if self._ended_by_agent:
            return code

        if code == EXIT_FAILED and self._spec.is_foreign:
            report = torchrun_report.read(self._last_lines(local_rank)())
            if report is not None:
                code = report.exit_code

        if -code in STOP_SIGNALS:
            return EXIT_STOPPED
        if not self._is_script_asked_to_stop:
            return code
        if code == EXIT_FINISHED and self._pages[local_rank].read().finished:
            return code
        if code in _CODES_OF_A_STOP or is_consequence(self._failure(local_rank, code).explained):
            return EXIT_STOPPED
        return code

    @property
    def _is_script_asked_to_stop(self) -> bool:
        return self._spec.is_script and (self._is_stopping or bool(self.signals_of_slurm()))

    def _failure(self, local_rank: int, code: int) -> UnexplainedFailure:
        failure = super()._failure(local_rank, code)
        reported = self._pages[local_rank].reported_error()
        return replace(
            failure,
            asked_to_stop=self._is_script_asked_to_stop,
            reported=reported,
            remedy=self._hints.get(local_rank) or (reported.hint if reported else ""),
        )

    def _describe_step(self, agents: tuple[int, ...]) -> None:
        """Compute the variables that describe a step on the nodes of these agents to each local rank.

        srun would set the same variables.
        """
        node = self._spec.node
        node_rank = agents.index(node.node_rank)
        hosts = node.hosts
        # Only SLURM names every node. Other launchers name the first node alone, so the hosts of the agents
        # are not known.
        if len(hosts) == node.nodes:
            hosts = tuple(hosts[agent] for agent in agents)

        step = replace(
            node,
            rank=node_rank,
            node_rank=node_rank,
            world_size=len(agents),
            nodes=len(agents),
            hosts=hosts,
        )
        count = self._spec.ranks_per_node
        self._agents = agents
        self._step_variables = [
            rank_environment(step, local_rank, count, os.environ) for local_rank in range(count)
        ]

    def _start(self, local_rank: int, order: StartWorkers) -> int:
        self._pages[local_rank].reset()
        self._hints.pop(local_rank, None)
        log = self._log(local_rank)
        self._log_sizes[local_rank] = _size(log)

        rank = RankSpec(
            local_rank=local_rank,
            environ=self._environment(local_rank, order),
            log=log,
            entry=self._spec.entry,
            run_dir=str(self._spec.folder.path),
        )
        pid = start_process(rank, self._in_child, forks=self._spec.forks)
        self._reaper.add(pid)
        return pid

    def _environment(self, local_rank: int, order: StartWorkers) -> dict[str, str]:
        master: dict[str, str] = {}
        address, port = order.master
        if port:
            master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

        # Restarted ranks have not waited for the agent's imports.
        imports_s = 0.0 if order.restart_count else self._spec.imports_s
        return {
            **self._spec.common,
            # Clear the variable that forces an environment: it describes the agent, and the variables below
            # the rank.
            ENVIRONMENT_VARIABLE: "",
            RESTART_COUNT_VARIABLE: str(order.restart_count),
            PREFLIGHT_VARIABLE: str(int(order.preflight)),
            **master,
            IMPORTS_VARIABLE: f"{imports_s:.3f} {self._started_at:.3f}",
            **self._step_variables[local_rank],
            HEARTBEAT_VARIABLE: str(self._pages[local_rank].descriptor),
            CHANNEL_VARIABLE: str(self._checkpoints.channel_for(local_rank)),
            MEMORY_VARIABLE: ",".join(map(str, self._checkpoints.memory_fds())),
        }

    def poll(self) -> list[Failure]:
        """Record the ranks that have ended since the last call, and reap orphans of all ranks."""
        failed = super().poll()
        process.reap_orphans({*self._running, *self._checkpoints.pids})
        if self._has_meeting_point():
            self._meetings.poll(time.monotonic(), self._running)
        return failed

    def _has_meeting_point(self) -> bool:
        """Return whether the ranks run a person's program, and their MASTER_PORT is on this node."""
        return self._spec.is_foreign and self._spec.node.node_rank == 0 and self._agents[:1] == (0,)

    @property
    def save_by_themselves(self) -> bool:
        """Return whether a rank may save without the other ranks, as a script without Distributon may."""
        return self._spec.is_script and all(page.read().phase == "starting" for page in self._pages)

    def ranks_apart(self) -> int:
        """Return the number of ranks of a person's program if they never connected to each other.

        The result is 0 if they connected, or if that is unknown. The heartbeat of a rank with Distributon
        shows that it has connected.
        """
        ranks = len(self._agents) * self._spec.ranks_per_node
        if ranks == 1 or not self._has_meeting_point():
            return 0
        if any(page.read().phase != "starting" for page in self._pages):
            return 0

        self._meetings.look()
        return 0 if self._meetings.have_met else ranks

    def _record_exit(self, local_rank: int, code: int) -> None:
        if code == EXIT_FAILED and self._spec.is_foreign:
            self._add_hint(local_rank)
        # The exit of a rank that the agent has ended is recorded, too: srun's exit code hides the first exit.
        kind: FailureKind = "ended_by_agent" if self._ended_by_agent else "other"
        rank = self.rank(local_rank)
        capture.write_exit(self._spec.folder, self._spec.attempt, rank, code, self.restart_count, kind)

    def _kill(self, pid: int) -> None:
        # Kill only the rank. `_exit_code` then ends the processes that the rank has started.
        os.kill(pid, signal.SIGKILL)

    def _exit_code(self, pid: int) -> int | None:
        if not process.has_ended(pid):
            return None

        # The dead rank is reaped last, so that no other process can get its pid before its group has ended.
        process.end_group_of_dead(pid, _TRACKER_S)
        self._reaper.forget(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _add_hint(self, local_rank: int) -> None:
        """Look up advice on the last log line of a failed rank; store it, and append it to the rank's log."""
        log = self._log(local_rank)
        lines = capture.last_lines(log, 1, since=self._log_sizes[local_rank])
        hint = hint_after(lines[-1]) if lines else ""
        if not hint:
            return

        self._hints[local_rank] = hint
        with suppress(OSError), log.open("a", encoding="utf-8") as stream:
            stream.write(f"{HINT}{hint}\n")

    def _last_lines(self, local_rank: int) -> Callable[[], Sequence[str]]:
        log = self._log(local_rank)
        return partial(capture.last_lines, log, since=self._log_sizes[local_rank], until=_size(log))

    def progress(self) -> tuple[int, float]:
        """Return the last step that any rank has completed (-1: none), and the seconds since then."""
        beats = [page.read() for page in self._pages]
        silent_s = time.monotonic() - max(beat.stepped for beat in beats)
        return max(beat.step for beat in beats), round(silent_s, 3)

    def processes(self) -> dict[int, tuple[int, HeartbeatPage]]:
        """Return the pid and the heartbeat page of each rank that runs, by global rank."""
        return {
            self.rank(local_rank): (pid, self._pages[local_rank]) for pid, local_rank in self._running.items()
        }

    def _log(self, local_rank: int) -> Path:
        return self._spec.folder.rank_log(self._spec.attempt, self.rank(local_rank))


def start_process(rank: RankSpec, in_child: Sequence[Callable[[], object]], *, forks: bool) -> int:
    """Start one rank as the leader of a process group and return its pid.

    Args:
        rank: the rank.
        in_child: calls by which a forked rank closes the resources of the agent.
        forks: whether to fork, so that the rank has the imports of this process; else it starts as a new
            program.
    """
    # Signals stay blocked until the child no longer shares the agent's handlers and wake-up pipe.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})
    try:
        pid = _fork(rank, in_child) if forks else spawn(rank)
        # The child calls setpgid too. Whichever process is first, the group exists from now on.
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(rank: RankSpec, in_child: Sequence[Callable[[], object]]) -> int:
    agent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns at a fork if the process has threads. `why_no_fork` has found none of Python's,
        # and the idle threads of numpy's BLAS hold no lock of Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        be_rank(rank, agent, in_child)
    return pid


def _size(log: Path) -> int:
    with suppress(OSError):
        return log.stat().st_size
    return 0
