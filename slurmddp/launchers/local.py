"""Runs a job on this machine: one agent per pretended node, in the foreground, restarted as on a cluster.

The agents find a SLURM step around them, so a laptop runs the code that the cluster runs. What needs a real
site (modules, the lines of `cluster.setup`, containers) is left out.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from slurmddp.environments.present import emulated_step, scrub
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, ConfigError, RankFailure, SlurmddpError
from slurmddp.launchers import failure, linux, outcome
from slurmddp.launchers.oom import OomWatch
from slurmddp.launchers.signals import SignalInbox
from slurmddp.node.ports import SECRET_VARIABLE
from slurmddp.runs.fence import superseded
from slurmddp.runs.folder import RunFolder
from slurmddp.spec import Job

EXIT_KILLED = 128 + signal.SIGINT
"""What `wait` returns after a person has ended the run by force."""
_CROWDED, _TOO_MANY = 4, 16
"""Ranks per CPU from which training is slow, and from which it is no use."""
_SMALLER = "say nodes=2 and gpus_per_node=2 (ranks_per_node=2 without GPUs) as well"
_FORCE_AFTER_S = 30.0
"""How long agents get once another node has failed: for a checkpoint, and the report; as SLURM's KillWait."""
_LEFT_ALONE_S = 0.9
"""How long the other agents may take to follow one that has stopped before they are told to."""
_POLLED_S = 0.1
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


def _print(text: str) -> None:
    with suppress(OSError):  # The terminal may be gone.
        print(text, file=sys.stderr, flush=True)


def agent_command(folder: RunFolder) -> list[str]:
    """Return the command of an agent under this interpreter."""
    return [sys.executable, "-m", "slurmddp.launchers.agent", str(folder.path)]


class LocalRun:
    """One run on this machine, attempt after attempt; used by the main thread only."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder | None = None,
        *,
        command: Sequence[str] = (),
        say: Callable[[str], None] = _print,
    ) -> None:
        self.job = job
        self.folder = folder or RunFolder(job.run_dir)
        self.attempt = -1
        self.stopping = False
        self._command = list(command) or agent_command(self.folder)
        self._say = say
        self._job_id = f"local-{secrets.token_hex(4)}"
        self._secret = ""
        self._agents: list[subprocess.Popen[bytes]] = []
        self._failures = 0
        self._killed = False
        self._unattended = False
        self._force_at: float | None = None
        self._left_at: float | None = None
        self._told_others = False
        self._step_before: int | None = None
        self._inbox: SignalInbox | None = None
        self._oom = OomWatch()
        self._undo = ExitStack()

    def start(self) -> None:
        """Start the agents of the next attempt; raises ConfigError if this machine is far too small."""
        if self.attempt < 0 and (warning := check_size(self.job.resources.world_size, linux.usable_cpus())):
            self._say(warning)
        if self._inbox is None:
            self._hold_folder()
            # From here on a Ctrl-C is a message: an exception between two agents would be lost, or lose one.
            self._inbox = self._undo.enter_context(SignalInbox(_HEARD))
        try:
            self._start_attempt()
        except BaseException:
            self._leave_nothing()
            raise

    def _hold_folder(self) -> None:
        """Refuse to train in a folder in which another process of this machine trains already."""
        descriptor = os.open(self.folder.path, os.O_RDONLY)
        self._undo.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._undo.close()
            raise ConfigError(
                f"{self.folder.name} is being trained by another process of this machine.",
                hint=f"Follow it with `slurmddp logs -f {self.folder.name}`, or give this one another name=.",
            ) from error
        except OSError:
            pass  # Some network file systems have no locks.

    def _start_attempt(self) -> None:
        self.attempt = self.folder.claim_attempt()
        self._step_before = newest_step(self.folder)
        self._force_at = self._left_at = None
        self._told_others = False
        self._oom.begin()
        self._secret = secrets.token_hex(16)
        self.folder.add_event(
            "started",
            attempt=self.attempt,
            job_id=self._job_id,
            restart_count=self._failures,
            nodes=socket.gethostname(),
            launcher="local",
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self._agents = [self._start_agent(node_rank) for node_rank in range(self.job.resources.all_nodes)]

    def _start_agent(self, node_rank: int) -> subprocess.Popen[bytes]:
        nodes = self.job.resources.all_nodes
        step = emulated_step(nodes, node_rank, self._job_id, self.folder.path, self.attempt)
        environ = {**scrub(os.environ), **self.job.cluster.env, **step, SECRET_VARIABLE: self._secret}
        with self._node_log(node_rank).open("ab") as log:
            return linux.start_bound(
                self._command,
                signal.SIGTERM,
                env=environ,
                cwd=self.job.project_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _node_log(self, node_rank: int) -> Path:
        return self.folder.log_dir(self.attempt) / f"node-{node_rank}.log"

    def poll(self) -> int | None:
        """Return the attempt's exit code once every agent has ended; the failure of one ends the others.

        Where the job outlives nodes the first one's word stands for all: it decides whether the others go on.
        """
        codes = [self._code_of(agent) for agent in self._agents]
        for node_rank, code in enumerate(codes[:1] if self.job.outlives_nodes else codes):
            if code not in (None, EXIT_FINISHED, EXIT_STOPPED) and self._force_at is None:
                self._end_the_others(node_rank, code or EXIT_FAILED)
        if self._force_at is not None and time.monotonic() > self._force_at:
            self._signal(signal.SIGKILL)
        self._pass_on_stop(codes)
        ended = [code for code in codes if code is not None]
        if len(ended) < len(codes):
            return None
        found = None if self._killed else failure.read(self.folder, self.attempt)
        if found:
            return failure.node_code(found)
        return outcome.combine(ended[:1] if self.job.outlives_nodes else ended)

    def _pass_on_stop(self, codes: Sequence[int | None]) -> None:
        """Stop the agents that outlive one which stopped, as srun does with --kill-on-bad-exit."""
        if EXIT_STOPPED not in codes or None not in codes or self._told_others or self.stopping:
            return
        self._left_at = self._left_at or time.monotonic()
        if time.monotonic() - self._left_at > _LEFT_ALONE_S:
            self._told_others = True
            self._signal(signal.SIGTERM)

    def _code_of(self, agent: subprocess.Popen[bytes]) -> int | None:
        """Return an agent's code; one that our SIGTERM ended had no handler yet, so no ranks and no state."""
        code = agent.poll()
        return EXIT_STOPPED if self.stopping and code == -signal.SIGTERM else code

    def _end_the_others(self, node_rank: int, returncode: int) -> None:
        """Let the agents of the other nodes see why, then end them."""
        if not self._killed:
            lines = failure.last_lines(self._node_log(node_rank))
            found = failure.here(returncode, node_rank=node_rank, lines=lines, oom=self._oom.verdict())
            with self._recording("the failure"):
                failure.record(self.folder, self.attempt, found)  # The agent may have said more: that stands.
        self._signal(signal.SIGTERM)
        self._force_at = time.monotonic() + _FORCE_AFTER_S

    def stop(self) -> None:
        """Ask the ranks to save and leave; the run ends with 75."""
        self.stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything at once; the ranks die with their agents."""
        self._killed = self.stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, sent: signal.Signals) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(sent)

    def wait(self, on_tick: Callable[[], None] | None = None, interval: float = _POLLED_S) -> int:
        """Stay until the run ends; return 0, 75, or 130 after `kill`; raise what a person should read.

        The first Ctrl-C (or SIGTERM) stops at a checkpoint, the second Ctrl-C kills. A failure within the
        policy's `max_restarts` starts the next attempt. `on_tick` is called every `interval` seconds.
        """
        try:
            while True:
                code = self._wait_for_attempt(on_tick, interval)
                decision = self._conclude(code)
                if decision.next == "none":
                    return self._result(code)
                self._say(f"{self._failure_text()} Starting again ({self._failures} of "
                          f"{self.job.policy.max_restarts} restarts).")  # fmt: skip
                self.start()
        finally:
            self._leave_nothing()

    def _wait_for_attempt(self, on_tick: Callable[[], None] | None, interval: float) -> int:
        while (code := self.poll()) is None:
            for received in self._inbox.wait(interval) if self._inbox is not None else ():
                self._answer(received)
            if on_tick is not None and not self._unattended:
                on_tick()
        return code

    def _answer(self, received: signal.Signals) -> None:
        if received == signal.SIGCHLD:
            return
        # Nothing more can be shown on a terminal that was closed.
        self._unattended |= received == signal.SIGHUP
        if self.stopping and received == signal.SIGINT:
            self._say("Killing the run; it goes on from its last checkpoint when it is started again.")
            self.kill()
        elif not self.stopping:
            self._say("Stopping at a checkpoint. Ctrl-C once more kills the run.")
            self.stop()

    def _conclude(self, code: int) -> outcome.Outcome:
        """Record how the attempt ended and what comes next, by the rule that the batch script follows."""
        if superseded(self.folder, self.attempt):
            return outcome.Outcome("superseded", "none")  # The run and its record are another machine's now.
        self._failures += code not in (EXIT_FINISHED, EXIT_STOPPED)
        decision = outcome.decide(
            code,
            failures=self._failures,
            max_restarts=self.job.policy.max_restarts,
            progressed=(newest_step(self.folder) or 0) > (self._step_before or 0),
            cancelled=self._killed or self.folder.cancelled_file.exists(),
            # A laptop has no queue to go back to: who stopped the run starts it again.
            requeue=self.job.policy.requeue
            and not self.stopping
            and code != EXIT_STOPPED
            and not self.folder.stop_file.exists(),
        )
        with self._recording("ended"):
            self.folder.add_event(
                "ended",
                attempt=self.attempt,
                job_id=self._job_id,
                exit_code=code,
                outcome=decision.outcome,
                next=decision.next,
            )
        return decision

    @contextmanager
    def _recording(self, what: str) -> Iterator[None]:
        """Say it when a record can't be written, on a full disk say; it changes nothing of what follows."""
        try:
            yield
        except OSError as error:
            self._say(f"{what} was not recorded: {error}")

    def _result(self, code: int) -> int:
        if self._killed and code != EXIT_FINISHED:
            return EXIT_KILLED
        if code in (EXIT_FINISHED, EXIT_STOPPED):
            return code
        raise self._error()

    def _error(self) -> SlurmddpError:
        found = failure.read(self.folder, self.attempt)
        if found is None:
            return RankFailure("A rank failed.", hint=f"See the logs in {self.folder.log_dir(self.attempt)}.")
        if found.rank is None:
            return failure.as_error(found, self._node_log(found.node_rank or 0))
        return failure.as_error(found, self.folder.rank_log(self.attempt, found.rank))

    def _failure_text(self) -> str:
        found = failure.read(self.folder, self.attempt)
        return failure.describe(found) if found else "A rank failed."

    def _leave_nothing(self) -> None:
        self._signal(signal.SIGKILL)
        for agent in self._agents:
            agent.wait()
        self._undo.close()
        self._inbox = None


def newest_step(folder: RunFolder) -> int | None:
    """Return the step of the checkpoint that the run would go on from; None before the first."""
    try:
        name = (folder.checkpoints_dir / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def check_size(ranks: int, cpus: int) -> str | None:
    """Return a warning if `ranks` share the CPUs of this machine badly; raises ConfigError if hopelessly."""
    if ranks > _TOO_MANY * max(cpus, 2):
        raise ConfigError(
            f"{ranks} ranks can't be tried on this machine, which has {cpus} CPUs.",
            hint=f"Try the job in small: {_SMALLER}.",
        )
    if ranks > _CROWDED * cpus:
        return f"{ranks} ranks share {cpus} CPUs here, so this will be slow. To try it in small, {_SMALLER}."
    return None


def run_local(job: Job, folder: RunFolder, on_tick: Callable[[], None] | None = None) -> int:
    """Run `job` here to its end; see `LocalRun.wait` for what comes back."""
    run = LocalRun(job, folder)
    run.start()
    return run.wait(on_tick)
