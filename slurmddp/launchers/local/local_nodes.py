"""Start and end the agents of a run in the foreground: on emulated nodes, or in an allocation.

For emulated nodes on this machine the module takes srun's part: it starts an agent for each node, forwards
signals, and kills agents that outlive a failed agent for too long. In an allocation (`salloc`) the module
starts srun alone. The coordinator in node 0's agent decides everything else.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slurmddp import errors
from slurmddp.batch.attempt import log_write_error
from slurmddp.environments.emit import emulated_step
from slurmddp.environments.names import (
    ATTEMPT_VARIABLE,
    KILL_WAIT_VARIABLE,
    RUN_DIR_VARIABLE,
    SECRET_VARIABLE,
)
from slurmddp.environments.scrub import scrub
from slurmddp.errors import EXIT_FINISHED, EXIT_STOPPED, GOOD_CODES
from slurmddp.host import process
from slurmddp.host.cgroups import OomWatch
from slurmddp.host.process import OrphanReaper
from slurmddp.launchers.local.allocation import Allocation, for_srun
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import node_code
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job

_FORCE_AFTER_S = 30.0
"""Seconds for the other agents to save and exit after an agent has failed, as SLURM's KillWait."""
_SRUN_ENDS_S = 20.0
"""Seconds for srun to end its step."""
LEFT_BEHIND_S = 600.0
"""Seconds for agents whose launcher was killed to save and exit, before the orphan reaper ends them."""


class LocalNodes:
    """Starts and ends the agents of a run, attempt after attempt.

    Use it from the main thread only.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        command: Sequence[str],
        say: Callable[[str], None],
        allocation: Allocation | None = None,
    ) -> None:
        """Prepare to start agents.

        Args:
            job: the job.
            folder: the run folder.
            command: the command that starts an agent.
            say: prints a line to the terminal.
            allocation: the run uses the first nodes of this allocation; None: nodes are emulated on this
                machine.
        """
        self.agents: list[subprocess.Popen[bytes]] = []
        """The agents, in the order of their nodes; in an allocation srun alone."""
        self.stopping = False
        """Whether the ranks were asked to save and exit."""
        self.killed = False
        """Whether a person has ended the run by force."""
        self._job = job
        self._folder = folder
        self._command = command
        self._say = say
        self._allocation = allocation
        self.stop_signal = signal.SIGTERM
        """The signal that asks the ranks to save and exit."""
        self._kill_signal = signal.SIGKILL
        # srun forwards SIGUSR2 to the agents, but kills its step at SIGTERM and SIGQUIT. SIGKILL would end
        # only srun, and the step would continue.
        if allocation is not None:
            self.stop_signal = signal.SIGUSR2
            self._kill_signal = signal.SIGQUIT
        self._attempt = -1
        self._force_at: float | None = None
        """When agents that still run after another agent has failed are killed, on the monotonic clock."""
        self._oom = OomWatch()
        self._reaper: OrphanReaper | None = None

    def start(self, attempt: int, job_id: str, held: int, limits: Mapping[str, str] | None = None) -> None:
        """Start an agent for every node; if an agent does not start, `close` ends the agents before it.

        Args:
            attempt: the number of the attempt.
            job_id: the id of the emulated job.
            held: a descriptor that the agents inherit. It stays open until their last process has ended.
            limits: environment variables with the time limits of the allocation; None without one.
        """
        self.close()
        self.agents = []
        self._attempt = attempt
        self._force_at = None
        self._oom.begin()

        secret = secrets.token_hex(16)
        self._reaper = OrphanReaper(LEFT_BEHIND_S)
        for node_rank in range(1 if self._allocation else self._job.resources.all_nodes):
            agent = self._start_agent(node_rank, job_id, held, {**(limits or {}), SECRET_VARIABLE: secret})
            self.agents.append(agent)
            self._reaper.add(agent.pid)

    def _start_agent(
        self, node_rank: int, job_id: str, held: int, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        nodes = self._job.resources.all_nodes
        command = self._command
        if self._allocation is None:
            inherited = scrub(os.environ)
            step = emulated_step(nodes, node_rank, job_id, self._folder.path, self._attempt)
            # Unlike a SLURM step, an emulated step has no limit by default: policy.grace_s=null sets none.
            if self._job.policy.grace_s is not None:
                step[KILL_WAIT_VARIABLE] = str(self._job.policy.grace_s)
        else:
            inherited = for_srun(os.environ)
            step = {RUN_DIR_VARIABLE: str(self._folder.path), ATTEMPT_VARIABLE: str(self._attempt)}
            logs = self.log(node_rank).parent
            command = [*self._allocation.agents(nodes, logs, self._job.tolerates_node_loss), *command]

        environ = {**inherited, **self._job.cluster.env, **step, **variables}
        with self.log(node_rank).open("ab") as log:
            return process.start_bound(
                command,
                self.stop_signal,
                pass_fds=(held,),
                env=environ,
                cwd=self._job.project_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, node_rank: int) -> Path:
        """Return the file to which a node's agent writes."""
        return self._folder.node_log(self._attempt, node_rank)

    def poll(self) -> int | None:
        """Return the attempt's exit code once all agents have ended; None before.

        Node 0's agent, or the recorded failure, decides the code. Once an agent has failed, the other agents
        have `_FORCE_AFTER_S` seconds until they are killed.
        """
        codes = [self._code_of(agent) for agent in self.agents]
        # If the job tolerates the loss of a node, only node 0's agent decides whether the attempt fails.
        deciding = codes
        if self._job.tolerates_node_loss:
            deciding = codes[:1]
        for node_rank, code in enumerate(deciding):
            if code is not None and code not in GOOD_CODES and self._force_at is None:
                self._note_failure(node_rank, code)

        if self._force_at is not None and time.monotonic() > self._force_at:
            self._signal(self._kill_signal)
        if None in codes:
            return None

        failure = None if self.killed else capture.read(self._folder, self._attempt)
        if failure is not None:
            return node_code(failure)
        return errors.combine_exit_codes([codes[0] or EXIT_FINISHED])

    def _code_of(self, agent: subprocess.Popen[bytes]) -> int | None:
        """Return the exit code of an agent; None while it runs."""
        code = self._poll(agent)
        # An agent that the stop signal has killed had set no handler yet, so it had no ranks. It counts as
        # stopped.
        if self.stopping and code in (-self.stop_signal, -signal.SIGINT):
            return EXIT_STOPPED
        return code

    def _note_failure(self, node_rank: int, returncode: int) -> None:
        """Record the failure of an agent, which lets agents without a link to node 0 end, too.

        Also set the time at which the remaining agents are killed.
        """
        if not self.killed:
            lines = capture.last_lines(self.log(node_rank))
            failure = capture.here(returncode, node_rank=node_rank, lines=lines, oom=self._oom.verdict())
            with log_write_error("The failure", self._say):
                # This changes nothing if the agent has recorded its failure itself, with more details.
                capture.record(self._folder, self._attempt, failure)
        self._force_at = time.monotonic() + _FORCE_AFTER_S

    def stop(self, received: signal.Signals = signal.SIGTERM) -> signal.Signals:
        """Ask the ranks to save and exit, so that the attempt ends with 75; return the signal that is sent.

        SIGINT (Ctrl-C) is forwarded as SIGINT, for programs that save after a KeyboardInterrupt. But srun
        would end its step after SIGINT, so in an allocation srun gets `stop_signal`.

        Args:
            received: the signal that this process has received.
        """
        self.stopping = True
        is_interrupt = received == signal.SIGINT and self._allocation is None
        sent = signal.SIGINT if is_interrupt else self.stop_signal
        self._signal(sent)
        return sent

    def kill(self) -> None:
        """Kill the agents; their ranks die with them."""
        self.killed = self.stopping = True
        self._signal(self._kill_signal)

    def close(self) -> None:
        """Kill the agents that still run, and wait until all have ended."""
        self._signal(self._kill_signal)
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_SRUN_ENDS_S if self._allocation else None)
        self._signal(signal.SIGKILL)
        for agent in self.agents:
            agent.wait()
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _signal(self, sent: signal.Signals) -> None:
        for agent in self.agents:
            if self._poll(agent) is None:
                agent.send_signal(sent)

    def _poll(self, agent: subprocess.Popen[bytes]) -> int | None:
        # Tell the reaper that the agent has ended: another process may get its pid, and must not be killed.
        if agent.returncode is None and agent.poll() is not None and self._reaper is not None:
            self._reaper.forget(agent.pid)
        return agent.returncode
