"""The worker group of one node: its ranks, started, watched and ended together.

A subclass of `WorkerGroup` makes the processes: an agent forks them, `launch()` runs a command. A fork shares
the modules that the agent has imported, so eight ranks cost one import of torch. A person's program takes the
place of the forked process (`user_program.py`), and its agent has imported nothing. If a fork would break
after the imports, ranks are separate programs that import for themselves. A new rank gets the heartbeat page,
the log and the states in memory of the rank before it.
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

_UNKILLABLE_S = 60.0
"""Seconds for killed ranks to end: the kernel needs some to take large memories apart."""
_END_S = 2.0
"""Seconds that `stop` waits for a killed rank. A rank that the kernel holds in I/O is left to SLURM."""
_POLL_S = 0.002
_TRACKER_S = 2.0
"""Seconds for a rank's resource tracker, which needs milliseconds."""
_REQUESTS = STOP_SIGNALS | {signal.SIGINT}
"""The signals by which a program is asked to stop."""
_CODES_OF_A_STOP = frozenset(
    {EXIT_FINISHED, EXIT_STOPPED, *(-sent for sent in _REQUESTS), *(128 + sent for sent in _REQUESTS)}
)
"""Exit codes of a program that was asked to stop and has left because of that; negative for a signal."""


class WorkerGroup(ABC):
    """The ranks of one node, one worker group after the other; all methods belong to the main thread."""

    def __init__(self, ranks_per_node: int, agent: int = 0) -> None:
        self.restart_count = 0
        self.codes: list[int] = []
        """Exit codes of the ranks that this agent has not ended; negative for a signal."""
        self.failed: list[Failure] = []
        """The failures among them."""
        self.left: list[Failure] = []
        """Ranks that exited with 0: too early, if other ranks still needed them."""
        self._ranks_per_node, self._agent = ranks_per_node, agent
        self._node_rank = 0
        self._running: dict[int, int] = {}
        """Local ranks, by pid."""
        self._ended_by_us = False
        self._kill_by = 0.0
        self._oom = OomWatch()

    @abstractmethod
    def _start(self, local_rank: int, order: StartWorkers) -> int:
        """Start one rank as the leader of a process group; return its pid."""

    @abstractmethod
    def _exit_code(self, pid: int) -> int | None:
        """Return the exit code of a rank that has ended, negative for a signal; None while it runs."""

    @abstractmethod
    def _last_lines(self, local_rank: int) -> Callable[[], Sequence[str]]:
        """Return a function that reads the last lines of a rank that has ended, also after its restart."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def good_codes(self) -> list[int]:
        """Exit codes of the ranks that ended well."""
        return [code for code in self.codes if code in GOOD_CODES]

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local one."""
        return self._node_rank * self._ranks_per_node + local_rank

    def start(self, order: StartWorkers) -> None:
        """Start the ranks that this node has in a worker group."""
        self._node_rank = order.agents.index(self._agent)
        self.restart_count = order.restart_count
        self.codes, self.failed, self.left, self._ended_by_us = [], [], [], False
        self._oom.begin()
        for local_rank in range(self._ranks_per_node):
            self._running[self._start(local_rank, order)] = local_rank

    def poll(self) -> list[Failure]:
        """Take note of the ranks that have ended since the last call; return the failures among them."""
        ended = {pid: code for pid in self._running if (code := self._exit_code(pid)) is not None}
        failed: list[Failure] = []
        for pid, exit_code in ended.items():
            local_rank = self._running.pop(pid)
            code = self._judge(local_rank, exit_code)
            self._record_exit(local_rank, code)
            if code == EXIT_FINISHED:
                self.left.append(self._failure(local_rank, code).because(Cause.of("left_early")))
            if not self._ended_by_us:
                self.codes.append(code)
                failed += [] if code in GOOD_CODES else [self._failure(local_rank, code)]
        self.failed += failed
        return failed

    def _judge(self, local_rank: int, code: int) -> int:
        """Return the exit code that counts for a rank; a subclass may know more than the code says."""
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

    def signal(self, sent: signal.Signals) -> None:
        """Send a signal to every rank, not to the processes that ranks have started."""
        for pid in self._running:
            os.kill(pid, sent)

    def stop(self, grace_s: float) -> None:
        """End every rank: send SIGTERM, and SIGKILL after `grace_s`; return when no rank is left."""
        self.poll()  # A rank that has ended before was not ended by this.
        self._ended_by_us = True
        self.signal(signal.SIGTERM)
        self.wait(grace_s)
        self.kill()
        self.wait(_END_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until no rank is left, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while self._running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.poll()

    def kill(self) -> None:
        """Send SIGKILL to every rank and to its processes; `is_gone` tells when they have ended."""
        self._ended_by_us = True
        self._kill_by = time.monotonic() + _UNKILLABLE_S
        for pid in self._running:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        process.signal_group(pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Return whether `poll` has seen every rank end; raise SlurmddpError if a rank can't be killed."""
        if self._running and time.monotonic() > self._kill_by:
            raise SlurmddpError(
                f"{len(self._running)} rank(s) on this node can't be ended: the kernel holds them in a call.",
                hint="A file server or a device does not answer; the node may need a restart.",
            )
        return not self._running


@dataclass(frozen=True)
class WorkerSpec:
    """The program of the ranks, the same in every worker group."""

    folder: RunFolder
    attempt: int
    node: RankInfo
    """The agent's rank, node and hosts: one task on each node of the job."""
    ranks_per_node: int
    entry: str
    """`module:function` that a worker runs."""
    imports_s: float
    """Seconds from the agent's start until it could start ranks."""
    common: Mapping[str, str]
    """Variables that all ranks get."""
    forks: bool = True
    """Whether the agent can be forked after its imports."""
    is_script: bool = False
    """Whether the ranks run a person's script, whose exit code does not say whether it has finished."""
    is_foreign: bool = False
    """Whether the workers are programs of a person (`user_program.py`)."""


class ForkedWorkers(WorkerGroup):
    """Ranks that an agent forks, or spawns where it can't be forked."""

    def __init__(
        self,
        spec: WorkerSpec,
        reaper: OrphanReaper,
        checkpoints: CheckpointService,
        in_child: Sequence[Callable[[], object]],
    ) -> None:
        """`in_child` are calls by which a forked rank closes what belongs to the agent."""
        super().__init__(spec.ranks_per_node, spec.node.node_rank)
        self._spec, self._reaper, self._checkpoints = spec, reaper, checkpoints
        self._in_child = in_child
        self._pages = [HeartbeatPage.create() for _ in range(spec.ranks_per_node)]
        self._logged = [0] * spec.ranks_per_node
        """Size of each rank's log when the rank started."""
        self._hints: dict[int, str] = {}
        """The advice of programs that have ended with an error, by local rank."""
        self._agents: tuple[int, ...] = ()
        """The agents of the present worker group."""
        self._step_variables: list[dict[str, str]] = []
        """The variables that describe these agents' step to each rank here."""
        self._own: Address | None = None
        """The address of this node at which ranks can meet, once it is known."""
        self._since = 0.0
        self._is_stopping = False
        """Whether the run is asked to stop."""
        self._sent: dict[int, set[int]] = {}
        """The signals that each rank was sent, by local rank."""
        self._seen_before: frozenset[int] = frozenset()
        """The signals that others had sent to the processes of this node before the last rank started."""
        self._meetings = MeetingWatch()

    def meeting_point(self, assignment: Assignment) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT for ranks that use them; only node 0's agent asks."""
        node = self._spec.node
        ports = candidate_ports(f"{node.launch_id} {assignment.restart_count} master")
        # Resolved once: a silent name server would hold up a restart, and the link between agents.
        # The order to start tells the port, so any port does (`bool`).
        with listen(self._own, ports, bool) if self._own else listen_as_rank_zero(node, ports, bool) as probe:
            text, port = probe.getsockname()[:2]
            self._own = Address(probe.family, text)
            # Some programs refuse a MASTER_ADDR that is not the first name of SLURM_JOB_NODELIST.
            name = node.hosts[0] if node.emulated and text == "127.0.0.1" else text
            return name, int(port)

    def start(self, order: StartWorkers) -> None:
        """Start the ranks of this node; ranks on plain torch meet at `order.master`."""
        if order.agents != self._agents:
            self._describe_step(order.agents)
        self._since = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self._sent = {}
        self._meetings.begin(order.master[1], self._since)
        super().start(order)
        self._seen_before = self._reaper.signals_seen()

    def expect_stop(self) -> None:
        """Take note that the run is asked to stop: ranks that leave from now on have not finished."""
        self._is_stopping = True

    def ask_to_stop(self, sent: signal.Signals) -> None:
        """Send each rank a signal to stop, unless it was sent that signal before, by SLURM or from here.

        A script that does not handle SIGUSR2 gets SIGTERM in its place, the signal of torchrun. SIGINT also
        reaches the processes that a program has started, as from a terminal; forked ranks get SIGTERM then.
        """
        self.expect_stop()
        if sent == signal.SIGINT and not self._spec.is_foreign:
            sent = signal.SIGTERM
        for pid, local_rank in self._running.items():
            number = sent
            if self._spec.is_script and sent == signal.SIGUSR2 and not process.handles(pid, sent):
                number = signal.SIGTERM
            before = self._sent.setdefault(local_rank, set())
            if number not in before | self.signals_of_slurm():
                os.kill(-pid if number == signal.SIGINT else pid, number)
            before.add(number)

    def signals_of_slurm(self) -> frozenset[int]:
        """Return the signals to stop that have reached the ranks past this agent, by number."""
        return (self._reaper.signals_seen() - self._seen_before) & _REQUESTS

    def _judge(self, local_rank: int, code: int) -> int:
        """Return 75 for a rank that has left because of a stop, whatever code its program has for that.

        A script that saves at the signal usually ends with 0 or by the signal. A rank that then only loses
        its peers has stopped as well. slurmddp's own loop knows whether it has finished, and says so.
        A torchrun ends with 1 after a stop and after any failure, and reports which it was.
        """
        code = self._pages[local_rank].explained(code)
        if self._ended_by_us:
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
        """Describe a step of these agents to each rank here, as srun does."""
        node, place = self._spec.node, agents.index(self._spec.node.node_rank)
        knows_all = len(node.hosts) == node.nodes  # SLURM names every node, other launchers only the first.
        step = replace(
            node,
            rank=place,
            node_rank=place,
            world_size=len(agents),
            nodes=len(agents),
            hosts=tuple(node.hosts[agent] for agent in agents) if knows_all else node.hosts,
        )
        ranks = range(self._spec.ranks_per_node)
        self._agents = agents
        self._step_variables = [rank_environment(step, one, len(ranks), os.environ) for one in ranks]

    def _start(self, local_rank: int, order: StartWorkers) -> int:
        self._pages[local_rank].reset()
        self._hints.pop(local_rank, None)
        log = self._log(local_rank)
        self._logged[local_rank] = _size(log)
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
        spec, (master, port) = self._spec, order.master
        return {
            **spec.common,
            ENVIRONMENT_VARIABLE: "",  # It says who the agent is; the variables below say who the rank is.
            RESTART_COUNT_VARIABLE: str(order.restart_count),
            PREFLIGHT_VARIABLE: str(int(order.preflight)),
            **({"MASTER_ADDR": master, "MASTER_PORT": str(port)} if port else {}),
            IMPORTS_VARIABLE: f"{0.0 if order.restart_count else spec.imports_s:.3f} {self._since:.3f}",
            **self._step_variables[local_rank],
            HEARTBEAT_VARIABLE: str(self._pages[local_rank].descriptor),
            CHANNEL_VARIABLE: str(self._checkpoints.channel_for(local_rank)),
            MEMORY_VARIABLE: ",".join(map(str, self._checkpoints.memory_fds())),
        }

    def poll(self) -> list[Failure]:
        """Take note of the ranks that have ended since the last call, and reap orphans of all ranks."""
        failed = super().poll()
        process.reap_orphans({*self._running, *self._checkpoints.pids})
        if self._has_meeting_point():
            self._meetings.poll(time.monotonic(), self._running)
        return failed

    def _has_meeting_point(self) -> bool:
        """Whether ranks of a person's program can meet on this node, as node 0's agent has offered it."""
        return self._spec.is_foreign and self._spec.node.node_rank == 0 and self._agents[:1] == (0,)

    @property
    def save_by_themselves(self) -> bool:
        """Whether ranks here may save without the others; a loop on Distributon never does."""
        return self._spec.is_script and all(page.read().phase == "starting" for page in self._pages)

    def ranks_apart(self) -> int:
        """Return the number of a program's ranks that never connected to each other; 0 if that is unknown.

        A rank with Distributon shows in its heartbeat that it has met the others.
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
        # A rank that the agent has ended is recorded too: srun's exit code hides the first one.
        kind: FailureKind = "ended_by_agent" if self._ended_by_us else "other"
        spec, rank = self._spec, self.rank(local_rank)
        capture.write_exit(spec.folder, spec.attempt, rank, code, self.restart_count, kind)

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)  # `_exit_code` ends the processes that the rank has started.

    def _exit_code(self, pid: int) -> int | None:
        if not process.has_ended(pid):
            return None
        process.end_group_of_dead(pid, _TRACKER_S)
        self._reaper.forget(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _add_hint(self, local_rank: int) -> None:
        """Note what to do about the error of a rank, also in its log, if that is known."""
        log = self._log(local_rank)
        lines = capture.last_lines(log, 1, since=self._logged[local_rank])
        hint = hint_after(lines[-1]) if lines else ""
        if hint:
            self._hints[local_rank] = hint
            with suppress(OSError), log.open("a", encoding="utf-8") as stream:
                stream.write(f"{HINT}{hint}\n")

    def _last_lines(self, local_rank: int) -> Callable[[], Sequence[str]]:
        log = self._log(local_rank)
        return partial(capture.last_lines, log, since=self._logged[local_rank], until=_size(log))

    def progress(self) -> tuple[int, float]:
        """Return the last step that a rank has completed (-1: none), and the seconds since then."""
        beats = [page.read() for page in self._pages]
        silent_s = time.monotonic() - max(beat.stepped for beat in beats)
        return max(beat.step for beat in beats), round(silent_s, 3)

    def processes(self) -> dict[int, tuple[int, HeartbeatPage]]:
        """Return the pid and the heartbeat page of each rank that runs, by global rank."""
        return {self.rank(one): (pid, self._pages[one]) for pid, one in self._running.items()}

    def _log(self, local_rank: int) -> Path:
        return self._spec.folder.rank_log(self._spec.attempt, self.rank(local_rank))


def start_process(rank: RankSpec, in_child: Sequence[Callable[[], object]], *, forks: bool) -> int:
    """Start one rank as the leader of a process group and return its pid.

    A forked rank shares the modules that this process has imported, without later changes.
    """
    # Signals wait until the child no longer shares the agent's handlers and wake-up pipe.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT, signal.SIGCHLD})
    try:
        pid = _fork(rank, in_child) if forks else spawn(rank)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # The child does it too, so the group exists from now on.
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(rank: RankSpec, in_child: Sequence[Callable[[], object]]) -> int:
    agent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of the idle threads that numpy's BLAS starts; they are not Python's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        be_rank(rank, agent, in_child)
    return pid


def _size(log: Path) -> int:
    with suppress(OSError):
        return log.stat().st_size
    return 0
