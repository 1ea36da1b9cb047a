"""Run a job on this machine, or in an allocation: in the foreground, restarted as on a cluster.

There is one agent per node. On this machine nodes are emulated: the agents get the environment of a SLURM
step, so a laptop runs the code that the cluster runs. In an allocation that `salloc` holds, srun starts the
agents on its nodes. Modules, the lines of `cluster.setup` and containers are left out.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from slurmddp.batch import begin, requeue_policy
from slurmddp.batch.attempt import log_write_error
from slurmddp.batch.event_command import EventCommands, kind_of_end
from slurmddp.batch.progress import Saved, progressed, saved
from slurmddp.batch.slurm_job import SlurmJob
from slurmddp.environments.emit import LOCAL_JOB_IDS
from slurmddp.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    RankFailure,
    SlurmddpError,
)
from slurmddp.host import process
from slurmddp.host.cpus import most_ranks
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.local.allocation import Allocation
from slurmddp.launchers.local.nodes import LocalNodes
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import as_error, describe
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.runs.text_format import counted
from slurmddp.settings.spec import Job

"""The exit code of `wait` after a person has ended the run by force."""
_CROWDED = 4
"""Ranks per CPU from which training is slow."""
_SMALLER = "say nodes=2 and gpus_per_node=2 (ranks_per_node=2 without GPUs) as well"
_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


def _signals() -> list[signal.Signals]:
    """Return the signals to handle; a hangup that `nohup` has turned off stays off."""
    is_off = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [one for one in _SIGNALS if one != signal.SIGHUP or not is_off]


class LocalRun:
    """One run on this machine, attempt after attempt; used by the main thread only."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        lock: RunLock,
        say: Callable[[str], None],
        *,
        command: Sequence[str] = (),
        allocation: Allocation | None = None,
    ) -> None:
        """Describe the run.

        Args:
            job: the job.
            folder: the run folder.
            lock: held until the agents end.
            say: gets lines for the person.
            command: replaces the usual agent.
            allocation: the nodes to run on; None: emulate nodes on this machine.
        """
        self.job, self.folder = job, folder
        self.attempt = -1
        command = command or [sys.executable, "-m", "slurmddp.launchers.agent", str(folder.path)]
        self.nodes = LocalNodes(job, folder, command, say, allocation)
        self._allocation = allocation
        self._lock, self._say = lock, say
        self._job_number = str(secrets.choice(LOCAL_JOB_IDS))
        self._job_id = f"local-{self._job_number}"
        self._counts = requeue_policy.Counts()
        """Failures so far, in memory, so that a full disk can't make the run restart without end."""
        self._unattended = False
        self._before = Saved()
        self._inbox: SignalInbox | None = None
        self._undo = ExitStack()
        self._commands = EventCommands(folder, job.policy.on_event, job.project_dir, say)

    def start(self) -> None:
        """Start the agents of the next attempt; raises ConfigError if this machine is far too small."""
        is_first, ranks = self.attempt < 0, self.job.resources.world_size
        if is_first and not self._allocation and (warning := check_size(ranks, process.usable_cpus())):
            self._say(warning)
        if self._inbox is None:
            # From here on Ctrl-C is a message: an exception between two agents could lose an agent.
            self._inbox = self._undo.enter_context(SignalInbox(_signals()))
        try:
            self._start_attempt()
        except BaseException:
            self._leave_nothing()
            raise

    def _start_attempt(self) -> None:
        allocation = self._allocation
        self.attempt = self.folder.claim_attempt()
        self._before = self._saved()
        self.folder.add_event(
            "started",
            attempt=self.attempt,
            job_id=self._job_id,
            restart_count=self._counts.failures,
            nodes=allocation.hosts if allocation else socket.gethostname(),
            launcher="local",
            **({"allocation": allocation.job_id} if allocation else {}),
            pid=os.getpid(),
            process_start=process.start_time(os.getpid()),
            host=socket.gethostname(),
        )
        self._commands.start("started", self.attempt, job_id=self._job_id, launcher="local")
        self.nodes.start(self.attempt, self._job_number, self._lock.fileno, self._limits())

    def _limits(self) -> dict[str, str]:
        """Return the variables with the time limits of the allocation; empty on this machine."""
        if self._allocation is None:
            return {}
        policy = self.job.policy
        job = SlurmJob(os.environ, log=self._say)
        return begin.limits(job, policy.signal_lead_s, policy.grace_s)()

    def _saved(self) -> Saved:
        return saved(self.folder, self.job.project_dir, self.job.saved_files)

    @property
    def _is_script(self) -> bool:
        return bool((self.job.program.config.get("program") or {}).get("script"))

    def wait(self, on_tick: Callable[[], None] = lambda: None) -> int:
        """Wait until the run ends.

        The first Ctrl-C (or SIGTERM) stops at a checkpoint, and kills ranks that outlive the policy's
        `grace_s`. The second Ctrl-C kills. A failure within the policy's `max_restarts` starts the next
        attempt.

        Args:
            on_tick: called ten times a second.

        Returns:
            0, 75, or 130 after a kill.

        Raises:
            SlurmddpError: the failure that ended the run.
        """
        try:
            while True:
                code = self._wait_for_attempt(on_tick)
                decision = self._conclude(code)
                if decision.next == "none":
                    return self._result(code)
                if not self._unattended:
                    on_tick()  # The end of this attempt is shown before the next one is announced.
                self._say(f"{self._failure_text()} Starting again ({self._counts.failures} of "
                          f"{self.job.policy.max_restarts} restarts).")  # fmt: skip
                self.start()
        finally:
            self._leave_nothing()

    def _wait_for_attempt(self, on_tick: Callable[[], None]) -> int:
        while (code := self.nodes.poll()) is None:
            for received in self._inbox.wait(_POLL_S) if self._inbox is not None else ():
                self._answer(received)
            if not self._unattended:
                on_tick()
        return code

    def _answer(self, received: signal.Signals) -> None:
        if received == signal.SIGCHLD:
            return
        # A closed terminal shows no more output.
        self._unattended |= received == signal.SIGHUP
        if self.nodes.stopping and received == signal.SIGINT:
            last = "" if self._is_script else "; it resumes from its last checkpoint when it is started again"
            self._say(f"Killing the run{last}.")
            self.nodes.kill()
        elif not self.nodes.stopping:
            sent = self.nodes.stop(received)
            script = f"The script gets {sent.name}; slurmddp can't see whether it saves."
            what = script if self._is_script else "Stopping at a checkpoint."
            grace_s = self.job.policy.grace_s
            end = "" if grace_s is None else f" Deaf ranks are killed after {grace_s} s."
            self._say(f"{what}{end} Ctrl-C once more kills the run.")

    def _conclude(self, code: int) -> requeue_policy.Outcome:
        """Record how the attempt ended and what comes next, by the rules of the batch step."""
        if self.folder.is_superseded(self.attempt):
            # Another machine has the run and its record now.
            return requeue_policy.Outcome("superseded", "none")
        has_progressed = progressed(self._before, self._saved())
        failure = capture.read(self.folder, self.attempt)
        failed_at_stop = failure is not None and failure.asked_to_stop
        has_stopped = code == EXIT_STOPPED or failed_at_stop
        end = requeue_policy.End(
            code,
            progressed=has_progressed,
            cancelled=self.nodes.killed or self.folder.is_cancelled,
            # A laptop has no queue: the person who stopped the run starts it again.
            stop_asked=self.nodes.stopping or has_stopped or self.folder.is_stopped,
            failed_at_stop=failed_at_stop,
        )
        decision = requeue_policy.decide(end, self._counts, self.job.policy)
        facts: dict[str, object] = {"outcome": decision.outcome, "next": decision.next}
        facts |= {"progressed": True} if has_progressed else {}
        self._counts = requeue_policy.count(self._counts, {"event": "ended", **facts})
        with log_write_error("The event `ended`", self._say):
            self.folder.add_event("ended", attempt=self.attempt, job_id=self._job_id, exit_code=code, **facts)
        kind = kind_of_end(decision.outcome, decision.next)
        self._commands.start(kind, self.attempt, job_id=self._job_id, exit_code=code, **facts)
        return decision

    def _result(self, code: int) -> int:
        if self.nodes.killed and code != EXIT_FINISHED:
            return EXIT_INTERRUPTED
        if code in (EXIT_FINISHED, EXIT_STOPPED):
            return code
        raise self._error()

    def _error(self) -> SlurmddpError:
        found, logs = capture.read(self.folder, self.attempt), self.folder.log_dir(self.attempt)
        if found is None:
            return RankFailure("A rank failed.", hint=f"See the logs in {logs}.")
        # The live view has shown the lines of rank 0 of a script.
        is_shown = found.rank == 0 and bool(found.reason) and not self.job.program.is_own_trainer
        rank_log = self.folder.rank_log(self.attempt, found.rank) if found.rank is not None else None
        return as_error(found, rank_log or self.nodes.log(found.node_rank or 0), with_lines=not is_shown)

    def _failure_text(self) -> str:
        found = capture.read(self.folder, self.attempt)
        return describe(found) if found else "A rank failed."

    def _leave_nothing(self) -> None:
        self.nodes.close()
        self._commands.wait()
        self._undo.close()
        self._inbox = None


def still_ending(folder: RunFolder) -> str:
    """Return the message for a wait on a run whose launcher was killed."""
    return f"{folder.name} is still ending after its launcher was killed; this command waits for it."


def check_size(ranks: int, cpus: int) -> str | None:
    """Return a warning if `ranks` are many for the CPUs here; raises ConfigError if they are far too many."""
    if ranks > most_ranks(cpus):
        raise ConfigError(
            f"{ranks} ranks can't be tried on this machine, which has {counted(cpus, 'CPU')}, for at most "
            f"{most_ranks(cpus)} ranks.",
            hint=f"Try the job in small: {_SMALLER}.",
        )
    if ranks > _CROWDED * cpus:
        shared = f"{ranks} ranks share {counted(cpus, 'CPU')} here, so this will be slow."
        return f"{shared} To try it in small, {_SMALLER}."
    return None
