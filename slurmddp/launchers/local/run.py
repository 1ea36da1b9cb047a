"""Run a job in the foreground, on this machine or in an allocation, and restart it as on a cluster.

There is one agent per node. On this machine nodes are emulated: the agents get the environment of a SLURM
step, so a laptop runs the code that the cluster runs. In an allocation of `salloc`, srun starts the agents on
its nodes. Modules, the lines of `cluster.setup` and containers are left out.
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
from slurmddp.host.cpu_shares import most_ranks
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.local.allocation import Allocation
from slurmddp.launchers.local.local_nodes import LocalNodes
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import as_error, describe
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.runs.text_format import counted
from slurmddp.settings.spec import Job

_CROWDED = 4
"""Largest number of ranks per CPU without a warning: more ranks make the training slow."""
_SMALLER = "add nodes=2 and gpus_per_node=2 (ranks_per_node=2 without GPUs)"
_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


def _signals() -> list[signal.Signals]:
    """Return the signals that a run in the foreground handles; not SIGHUP if `nohup` has disabled it."""
    is_off = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not is_off]


class LocalRun:
    """Runs a job in the foreground, attempt after attempt.

    Use it from the main thread only.
    """

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
        """Prepare the run; `start` starts it.

        Args:
            job: the job.
            folder: the run folder.
            lock: the lock of the run. The agents inherit it, so it is held until they have ended.
            say: prints a line to the terminal.
            command: the command that starts an agent; empty: slurmddp's agent.
            allocation: the nodes to run on; None: emulate nodes on this machine.
        """
        self.job = job
        self.folder = folder
        self.attempt = -1
        command = command or [sys.executable, "-m", "slurmddp.launchers.agent", str(folder.path)]
        self.nodes = LocalNodes(job, folder, command, say, allocation)
        self._allocation = allocation
        self._lock = lock
        self._say = say
        self._job_number = str(secrets.choice(LOCAL_JOB_IDS))
        self._job_id = f"local-{self._job_number}"
        self._counts = requeue_policy.Counts()
        """The number of failures so far. It is kept in memory, because a full disk could not hold it."""
        self._unattended = False
        """Whether the terminal is closed, so that no output is shown."""
        self._before = Saved()
        """The saves before the present attempt, which makes progress if there is a newer save at its end."""
        self._inbox: SignalInbox | None = None
        self._undo = ExitStack()
        self._commands = EventCommands(folder, job.policy.on_event, job.project_dir, say)

    def start(self) -> None:
        """Start the agents of the next attempt.

        Raises:
            ConfigError: this machine has far too few CPUs for the ranks.
        """
        if self.attempt < 0 and self._allocation is None:
            warning = check_size(self.job.resources.world_size, process.usable_cpus())
            if warning:
                self._say(warning)

        if self._inbox is None:
            # From now on Ctrl-C is read from the inbox. A KeyboardInterrupt could come after the start of an
            # agent, before the agent is in the list.
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

        nodes = socket.gethostname()
        facts: dict[str, object] = {}
        if allocation is not None:
            nodes = allocation.hosts
            facts["allocation"] = allocation.job_id
        self.folder.add_event(
            "started",
            attempt=self.attempt,
            job_id=self._job_id,
            restart_count=self._counts.failures,
            nodes=nodes,
            launcher="local",
            **facts,
            pid=os.getpid(),
            process_start=process.start_time(os.getpid()),
            host=socket.gethostname(),
        )
        self._commands.start("started", self.attempt, job_id=self._job_id, launcher="local")
        self.nodes.start(self.attempt, self._job_number, self._lock.fileno, self._limits())

    def _limits(self) -> dict[str, str]:
        """Return environment variables with the time limits of the allocation; empty without one."""
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

        After the first Ctrl-C or SIGTERM the run stops at a checkpoint; ranks that still run after
        `policy.grace_s` are killed. The second Ctrl-C kills the run. After a failure the next attempt starts,
        up to `policy.max_restarts` times.

        Args:
            on_tick: called ten times a second while the terminal is open.

        Returns:
            0 if the run has finished, 75 if it was stopped, 130 if it was killed.

        Raises:
            SlurmddpError: the failure that ended the run.
        """
        try:
            while True:
                code = self._wait_for_attempt(on_tick)
                decision = self._conclude(code)
                if decision.next == "none":
                    return self._result(code)

                # Let the live view show the end of this attempt before the next attempt is announced.
                if not self._unattended:
                    on_tick()
                self._say(f"{self._failure_text()} Starting again ({self._counts.failures} of "
                          f"{self.job.policy.max_restarts} restarts).")  # fmt: skip
                self.start()
        finally:
            self._leave_nothing()

    def _wait_for_attempt(self, on_tick: Callable[[], None]) -> int:
        while (code := self.nodes.poll()) is None:
            if self._inbox is not None:
                for received in self._inbox.wait(_POLL_S):
                    self._answer(received)
            if not self._unattended:
                on_tick()
        return code

    def _answer(self, received: signal.Signals) -> None:
        """Stop the run at the first signal to this process, and kill it at a later Ctrl-C."""
        if received == signal.SIGCHLD:
            return

        # SIGHUP: the terminal is closed and shows no more output.
        self._unattended |= received == signal.SIGHUP
        if self.nodes.stopping and received == signal.SIGINT:
            last = "" if self._is_script else "; it resumes from its last checkpoint when it is started again"
            self._say(f"Killing the run{last}.")
            self.nodes.kill()
        elif not self.nodes.stopping:
            script_signal = self.nodes.stop(received)
            text = "Stopping at a checkpoint."
            if self._is_script:
                text = f"The script gets {script_signal.name}; slurmddp can't see whether it saves."
            grace_s = self.job.policy.grace_s
            if grace_s is not None:
                text += f" Ranks that still run after {grace_s} s are killed."
            self._say(f"{text} Ctrl-C once more kills the run.")

    def _conclude(self, code: int) -> requeue_policy.Outcome:
        """Record how the attempt ended, and return its outcome and whether another attempt follows.

        The rules of the batch step apply.
        """
        # A later attempt runs elsewhere, and only its launcher writes the records.
        if self.folder.is_superseded(self.attempt):
            return requeue_policy.Outcome("superseded", "none")

        has_progressed = progressed(self._before, self._saved())
        failure = capture.read(self.folder, self.attempt)
        failed_at_stop = failure is not None and failure.asked_to_stop
        has_stopped = code == EXIT_STOPPED or failed_at_stop
        end = requeue_policy.End(
            code,
            progressed=has_progressed,
            cancelled=self.nodes.killed or self.folder.is_cancelled,
            # Any stop counts as asked for: without a queue, a person has to start the run again.
            stop_asked=self.nodes.stopping or has_stopped or self.folder.is_stopped,
            failed_at_stop=failed_at_stop,
        )
        decision = requeue_policy.decide(end, self._counts, self.job.policy)

        facts: dict[str, object] = {"outcome": decision.outcome, "next": decision.next}
        if has_progressed:
            facts["progressed"] = True
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
        """Return the exception to raise for the failure that ended the run."""
        failure = capture.read(self.folder, self.attempt)
        if failure is None:
            logs = self.folder.log_dir(self.attempt)
            return RankFailure("A rank failed.", hint=f"See the logs in {logs}.")

        log = self.nodes.log(failure.node_rank or 0)
        if failure.rank is not None:
            log = self.folder.rank_log(self.attempt, failure.rank)
        # Leave out the last lines if the live view has shown them: it shows the output of a script's rank 0.
        is_shown = failure.rank == 0 and bool(failure.reason) and not self.job.program.is_own_trainer
        return as_error(failure, log, with_lines=not is_shown)

    def _failure_text(self) -> str:
        failure = capture.read(self.folder, self.attempt)
        return "A rank failed." if failure is None else describe(failure)

    def _leave_nothing(self) -> None:
        self.nodes.close()
        self._commands.wait()
        self._undo.close()
        self._inbox = None


def still_ending(folder: RunFolder) -> str:
    """Return the message to print while waiting for the agents of a run whose launcher was killed."""
    return f"{folder.name} is still ending after its launcher was killed; this command waits for it."


def check_size(ranks: int, cpus: int) -> str | None:
    """Compare the number of ranks with this machine's CPUs.

    Returns:
        A warning if there are more than `_CROWDED` (4) ranks per CPU, else None.

    Raises:
        ConfigError: there are more ranks than `most_ranks` allows.
    """
    if ranks > most_ranks(cpus):
        raise ConfigError(
            f"{ranks} ranks are too many for this machine, which has {counted(cpus, 'CPU')} and allows at "
            f"most {most_ranks(cpus)} ranks.",
            hint=f"Try a smaller job: {_SMALLER}.",
        )

    if ranks > _CROWDED * cpus:
        shared = f"{ranks} ranks share {counted(cpus, 'CPU')} on this machine, so this will be slow."
        return f"{shared} To try a smaller job, {_SMALLER}."
    return None
