"""The pretended nodes of one attempt on this machine: an agent each, and none goes on alone.

It does for them what srun does on a cluster: starts an agent per node, passes stops on, ends the others when
one has failed, and makes one exit code of theirs.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmddp.batch import outcome
from slurmddp.batch.attempt import said_if_not_recorded
from slurmddp.environments.emit import emulated_step, scrub
from slurmddp.environments.names import SECRET_VARIABLE
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from slurmddp.host import process
from slurmddp.host.oom import OomWatch
from slurmddp.host.orphans import Guardian
from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import Job

_FORCE_AFTER_S = 30.0
"""How long agents get once another node has failed: for a checkpoint, and the report; as SLURM's KillWait."""
_LEFT_ALONE_S = 0.9
"""How long the other agents may take to follow one that has stopped before they are told to."""
LEFT_BEHIND_S = 600.0
"""How long agents whose launcher was killed may take to save and leave; nobody else would end them."""


class LocalNodes:
    """The agents of one attempt; used by the main thread only."""

    def __init__(
        self, job: Job, folder: RunFolder, attempt: int, command: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self.agents: list[subprocess.Popen[bytes]] = []
        self.stopping = False
        self._job, self._folder, self._attempt = job, folder, attempt
        self._command, self._say = command, say
        self._killed = False
        self._force_at: float | None = None
        self._left_at: float | None = None
        self._told_others = False
        self._oom = OomWatch()
        self._guardian: Guardian | None = None

    def start(self, job_id: str, held: int) -> None:
        """Start an agent for every node; should one not start, `close` ends those before it.

        `held` is a descriptor that stays open as long as any process of theirs lives.
        """
        secret = secrets.token_hex(16)
        self._guardian = Guardian(LEFT_BEHIND_S)
        for node_rank in range(self._job.resources.all_nodes):
            agent = self._start_agent(node_rank, job_id, secret, held)
            self.agents.append(agent)
            self._guardian.add(agent.pid)

    def _start_agent(self, node_rank: int, job_id: str, secret: str, held: int) -> subprocess.Popen[bytes]:
        nodes = self._job.resources.all_nodes
        step = emulated_step(nodes, node_rank, job_id, self._folder.path, self._attempt)
        environ = {**scrub(os.environ), **self._job.cluster.env, **step, SECRET_VARIABLE: secret}
        with self.log(node_rank).open("ab") as log:
            return process.start_bound(
                self._command,
                signal.SIGTERM,
                pass_fds=(held,),
                env=environ,
                cwd=self._job.project_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, node_rank: int) -> Path:
        """Return the file to which a node's agent writes."""
        return self._folder.log_dir(self._attempt) / f"node-{node_rank}.log"

    def poll(self) -> int | None:
        """Return the attempt's exit code once every agent has ended; the failure of one ends the others.

        Where the job outlives nodes the first one's word stands for all: it decides whether the others go on.
        """
        codes = [self._code_of(agent) for agent in self.agents]
        told = codes[:1] if self._job.outlives_nodes else codes
        for node_rank, code in enumerate(told):
            if code not in (None, EXIT_FINISHED, EXIT_STOPPED) and self._force_at is None:
                self._end_the_others(node_rank, code or EXIT_FAILED)
        if self._force_at is not None and time.monotonic() > self._force_at:
            self._signal(signal.SIGKILL)
        ended = [code for code in codes if code is not None]
        if len(ended) < len(codes):
            self._pass_on_stop(told)
            return None
        found = None if self._killed else capture.read(self._folder, self._attempt)
        if found:
            return capture.node_code(found)
        return outcome.combine(ended[:1] if self._job.outlives_nodes else ended)

    def _pass_on_stop(self, codes: Sequence[int | None]) -> None:
        """Stop the agents that outlive one which stopped, as srun does with --kill-on-bad-exit."""
        if EXIT_STOPPED not in codes or self._told_others or self.stopping:
            return
        self._left_at = self._left_at or time.monotonic()
        if time.monotonic() - self._left_at > _LEFT_ALONE_S:
            self._told_others = True
            self._signal(signal.SIGTERM)

    def _code_of(self, agent: subprocess.Popen[bytes]) -> int | None:
        """Return an agent's code; one that our SIGTERM ended had no handler yet, so no ranks and no state."""
        code = self._poll(agent)
        return EXIT_STOPPED if self.stopping and code == -signal.SIGTERM else code

    def _end_the_others(self, node_rank: int, returncode: int) -> None:
        """Let the agents of the other nodes see why, then end them."""
        if not self._killed:
            lines = capture.last_lines(self.log(node_rank))
            found = capture.here(returncode, node_rank=node_rank, lines=lines, oom=self._oom.verdict())
            with said_if_not_recorded("the failure", self._say):
                capture.record(
                    self._folder, self._attempt, found
                )  # The agent may have said more: that stands.
        self._signal(signal.SIGTERM)
        self._force_at = time.monotonic() + _FORCE_AFTER_S

    def stop(self) -> None:
        """Ask the ranks to save and leave; the attempt ends with 75."""
        self.stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything at once; the ranks die with their agents."""
        self._killed = self.stopping = True
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Leave no agent behind."""
        self._signal(signal.SIGKILL)
        for agent in self.agents:
            agent.wait()
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None

    def _signal(self, sent: signal.Signals) -> None:
        for agent in self.agents:
            if self._poll(agent) is None:
                agent.send_signal(sent)

    def _poll(self, agent: subprocess.Popen[bytes]) -> int | None:
        if agent.returncode is None and agent.poll() is not None and self._guardian is not None:
            self._guardian.forget(agent.pid)  # Its number may be another process's from now on.
        return agent.returncode
