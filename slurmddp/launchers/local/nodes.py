"""The nodes of a run that a command starts here: emulated ones on this machine, or those of an allocation.

For emulated nodes this module takes srun's part: it starts an agent for each node, forwards signals, and
kills agents that outlive a failed agent for too long. In an allocation (`salloc`) srun is the only process
here. The coordinator in node 0's agent decides everything else.
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
"""Seconds for the agents to save a checkpoint and leave once an agent has failed; as SLURM's KillWait."""
_SRUN_ENDS_S = 20.0
"""Seconds for srun to end its step."""
LEFT_BEHIND_S = 600.0
"""Seconds for agents whose launcher was killed to save and leave. Then the orphan reaper ends them."""


class LocalNodes:
    """The agents of a run, attempt after attempt; used by the main thread only."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        command: Sequence[str],
        say: Callable[[str], None],
        allocation: Allocation | None = None,
    ) -> None:
        """Describe the nodes; with an `allocation` they are real, and its first ones."""
        self.agents: list[subprocess.Popen[bytes]] = []
        self.stopping = self.killed = False
        self._job, self._folder, self._command, self._say = job, folder, command, say
        self._allocation = allocation
        # srun forwards SIGUSR2, but kills its step at SIGTERM and SIGQUIT. Killed, it would leave the step.
        self.stop_signal = signal.SIGTERM if allocation is None else signal.SIGUSR2
        self._kill_signal = signal.SIGKILL if allocation is None else signal.SIGQUIT
        self._attempt = -1
        self._force_at: float | None = None
        self._oom = OomWatch()
        self._reaper: OrphanReaper | None = None

    def start(self, attempt: int, job_id: str, held: int, limits: Mapping[str, str] | None = None) -> None:
        """Start an agent for every node; if an agent does not start, `close` ends the agents before it.

        Args:
            attempt: the number of the attempt.
            job_id: the id of the emulated job.
            held: a descriptor that stays open as long as a process of the agents lives.
            limits: variables with the time limits of an allocation.
        """
        self.close()
        self.agents, self._attempt, self._force_at = [], attempt, None
        self._oom.begin()
        secret = secrets.token_hex(16)
        self._reaper = OrphanReaper(LEFT_BEHIND_S)
        for node_rank in range(1 if self._allocation else self._job.resources.all_nodes):
            agent = self._start_agent(node_rank, job_id, held, {**(limits or {}), SECRET_VARIABLE: secret})
            self.agents.append(agent)
            self._reaper.add(agent.pid)

    def _start_agent(
        self, node_rank: int, job_id: str, held: int, own: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        nodes, command, logs = self._job.resources.all_nodes, self._command, self.log(node_rank).parent
        if self._allocation is None:
            inherited = scrub(os.environ)
            step = emulated_step(nodes, node_rank, job_id, self._folder.path, self._attempt)
            if self._job.policy.grace_s is not None:  # No SLURM kills here, so null sets no limit.
                step[KILL_WAIT_VARIABLE] = str(self._job.policy.grace_s)
        else:
            inherited = for_srun(os.environ)
            step = {RUN_DIR_VARIABLE: str(self._folder.path), ATTEMPT_VARIABLE: str(self._attempt)}
            command = [*self._allocation.agents(nodes, logs, self._job.tolerates_node_loss), *command]
        environ = {**inherited, **self._job.cluster.env, **step, **own}
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
        """Return the attempt's exit code, which node 0's agent decides, once every agent has ended."""
        codes = [self._code_of(agent) for agent in self.agents]
        for node_rank, code in enumerate(codes[:1] if self._job.tolerates_node_loss else codes):
            if code is not None and code not in GOOD_CODES and self._force_at is None:
                self._note_failure(node_rank, code)
        if self._force_at is not None and time.monotonic() > self._force_at:
            self._signal(self._kill_signal)
        if None in codes:
            return None
        found = None if self.killed else capture.read(self._folder, self._attempt)
        return node_code(found) if found else errors.combine_exit_codes([codes[0] or EXIT_FINISHED])

    def _code_of(self, agent: subprocess.Popen[bytes]) -> int | None:
        """Return an agent's code. An agent that our signal killed had no handler yet, so no ranks either."""
        code = self._poll(agent)
        is_ours = code in (-self.stop_signal, -signal.SIGINT)
        return EXIT_STOPPED if self.stopping and is_ours else code

    def _note_failure(self, node_rank: int, returncode: int) -> None:
        """Record the failure of an agent, so that agents without a link to it end too."""
        if not self.killed:
            lines = capture.last_lines(self.log(node_rank))
            found = capture.here(returncode, node_rank=node_rank, lines=lines, oom=self._oom.verdict())
            with log_write_error("The failure", self._say):
                # A failure that the agent itself has recorded stays: it says more.
                capture.record(self._folder, self._attempt, found)
        self._force_at = time.monotonic() + _FORCE_AFTER_S

    def stop(self, received: signal.Signals = signal.SIGTERM) -> signal.Signals:
        """Ask the ranks to save and leave; the attempt ends with 75. Return the signal that scripts get.

        Ctrl-C stays SIGINT, for the programs that save after a KeyboardInterrupt; srun would end its step.
        """
        self.stopping = True
        is_interrupt = received == signal.SIGINT and self._allocation is None
        sent = signal.SIGINT if is_interrupt else self.stop_signal
        self._signal(sent)
        return sent

    def kill(self) -> None:
        """End everything at once; the ranks die with their agents."""
        self.killed = self.stopping = True
        self._signal(self._kill_signal)

    def close(self) -> None:
        """Leave no agent behind."""
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
        if agent.returncode is None and agent.poll() is not None and self._reaper is not None:
            self._reaper.forget(agent.pid)  # Another process may get its pid from now on.
        return agent.returncode
