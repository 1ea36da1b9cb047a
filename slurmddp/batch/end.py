"""After the ranks: find out how the attempt ended, record it, and run the job again if the rules say so."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import Attempt
from slurmddp.batch.exclusions import Exclusions
from slurmddp.batch.launch_failure import launch_failure, record
from slurmddp.batch.requeue import leave_queue, requeue, resubmit
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_NO_PROGRESS,
    EXIT_STOPPED,
    EXIT_UNHEALTHY_NODE,
)
from slurmddp.runs.folder.late_files import is_there

_BOUNDED_WAIT_S = 600.0
_CODES_OF_RANKS = {
    EXIT_FINISHED, EXIT_STOPPED, EXIT_UNHEALTHY_NODE, EXIT_CONFIG, EXIT_NO_PROGRESS, *range(128, 256)
}  # fmt: skip
"""Exit codes with a meaning of their own, which a setup line must not lend to the attempt."""


class AttemptEnd:
    """The end of one attempt, in the seconds that SLURM leaves."""

    def __init__(self, attempt: Attempt, job: SlurmJob, *, terminated: bool = False) -> None:
        """Prepare the end of `attempt`, which ran in `job`.

        Args:
            attempt: the attempt.
            job: the job of the attempt.
            terminated: whether SLURM has sent SIGTERM to the batch script.
        """
        self._attempt, self._job, self._terminated = attempt, job, terminated
        self._ranks_began = False
        self._exclusions = Exclusions(attempt.folder, job, attempt.settings, began=attempt.began)

    def conclude(self, code: int | None) -> int:
        """Find out how the ranks ended and carry out what follows; return the exit code of the batch script.

        Args:
            code: of the subshell with the setup lines and srun; None if bash could not read it.
        """
        try:
            return self._conclude(self._code_before_ranks(code))
        finally:
            self._await_slurm()

    def _code_before_ranks(self, code: int | None) -> int:
        """Return the code, as a plain failure if a setup line ended the subshell before any rank started."""
        say = self._job.say
        if code is None:
            say("bash can't read the setup lines of the cluster file; no rank was started.")
            return EXIT_FAILED
        if not self._attempt.settings.setup or is_there(self._attempt.log_dir / "set-up"):
            say(f"srun ended with code {code}.")
            self._ranks_began = True
            return code
        say(f"The setup lines of the cluster file ended with code {code}, before any rank was started.")
        return EXIT_FAILED if code in _CODES_OF_RANKS else code

    def _conclude(self, srun_code: int) -> int:
        attempt, job = self._attempt, self._job
        job.poll_patiently()
        if attempt.folder.is_superseded(attempt.number):
            return self.carry_out(srun_code, has_progressed=False).code
        self._find_failed_nodes()
        if job.fate == requeue_policy.REQUEUED:  # At once: SLURM ends this process soon.
            self._exclusions.choose()
            self._exclusions.send()
        has_progressed = attempt.has_progressed()
        unlaunched = launch_failure(attempt, job.hosts)
        if unlaunched is not None:
            record(attempt, unlaunched)
            return self.carry_out(EXIT_UNHEALTHY_NODE, has_progressed, lost={}).code
        failure = attempt.recorded_failure()
        ask_agents = failure is None and self._ranks_began
        agents = attempt.common_exit_code(job.sleep) if ask_agents else None
        code = requeue_policy.exit_code(
            srun_code, failure=failure, agents=agents, fate=job.fate, progressed=has_progressed
        )
        if code is None:
            # SLURM may have learned meanwhile what became of the node of an agent that is gone.
            job.poll_patiently()
            self._find_failed_nodes()
            code = EXIT_FAILED
        return self.carry_out(code, has_progressed).code

    def _find_failed_nodes(self) -> None:
        """Note the nodes that failed; SLURM may not know yet of a node whose loss ended the attempt."""
        attempt, job = self._attempt, self._job
        hosts = dict(enumerate(job.hosts))
        replaced = {hosts[node] for node in attempt.replaced_nodes() if node in hosts}
        silent = {hosts[node] for node in attempt.silent_nodes() if node in hosts}
        self.note_failed_nodes(silent, replaced)
        if job.fate == requeue_policy.RUNNING and (silent - replaced) & self._exclusions.failed:
            job.fate = requeue_policy.NODE_FAIL

    def note_failed_nodes(self, silent: Collection[str], replaced: Collection[str]) -> None:
        """Note the nodes that failed under the attempt, so that the next attempt avoids them.

        Args:
            silent: nodes whose agents left no exit code.
            replaced: nodes without which the attempt continued.
        """
        log = self._attempt.folder.batch_log(self._attempt.number)
        self._exclusions.note_failed(
            self._job.node_list, began=self._attempt.began, batch_log=log, silent=silent, replaced=replaced
        )

    def carry_out(
        self,
        code: int,
        has_progressed: bool,
        *,
        lost: Mapping[int, str] | None = None,
        may_requeue: bool = True,
    ) -> requeue_policy.Outcome:
        """Decide what follows by the job's fate, record it, and do it.

        Args:
            code: the exit code of the attempt.
            has_progressed: whether the run has saved anything new since the start.
            lost: the hosts of lost agents, by node; None: the agents that left no code, after a failure.
            may_requeue: whether SLURM may requeue the job; otherwise a new job is submitted.

        Returns:
            The outcome, whose `next` is what was done: `none`, `requeue` or `resubmit`.
        """
        attempt, job = self._attempt, self._job
        if attempt.folder.is_superseded(attempt.number):
            job.say(
                f"Attempt {attempt.number} is over (code {code}). A later attempt has begun: "
                "this one neither requeues nor ends the run."
            )
            return requeue_policy.Outcome("superseded", "none", EXIT_NO_PROGRESS)
        recorded = attempt.recorded_end()  # By the batch script, before it was killed.
        near_limit = job.is_near_limit(attempt.settings.signal_lead_s)
        decision = recorded or attempt.decide(code, job.fate, has_progressed, near_limit=near_limit)
        if decision.next == "requeue" and (job.facts.get("Requeue") == "0" or not may_requeue):
            decision = decision._replace(next="resubmit")
        if decision.advice:
            job.say(decision.advice.format(run=attempt.folder.path.name))
        if lost is None:
            lost = attempt.lost_agents(job.hosts) if decision.outcome == "failed" else {}
        for node, host in lost.items():
            job.say(f"The agent of node {node} ({host or 'unknown host'}) left no exit code.")
        if decision.next != "none" and job.fate != requeue_policy.REQUEUED:
            self._exclusions.choose()
        job.say(f"Attempt {attempt.number}: {decision.outcome}, next: {decision.next}.")
        if recorded is None:
            # Before the request: SLURM ends this process when it grants it.
            attempt.record_end(decision, has_progressed, lost=lost)
        if decision.next == "none":
            leave_queue(job)
            return decision
        done = self._run_again(decision)
        if done.next == "none":
            attempt.record_end(done._replace(stalled_at=None), has_progressed, lost=lost, is_revised=True)
        return done

    def _run_again(self, decision: requeue_policy.Outcome) -> requeue_policy.Outcome:
        """Put the job back or submit a new one; return the outcome, with what was done as `next`."""
        folder, job = self._attempt.folder, self._job
        if decision.next == "requeue" and requeue(job):
            self._exclusions.send()
            return decision
        # A person may have ended the run while SLURM refused to put the job back.
        if job.fate == requeue_policy.CANCELLED or folder.is_cancelled:
            return decision._replace(outcome="cancelled", next="none")
        if folder.is_stopped:
            return decision._replace(next="none")
        if resubmit(folder, job, self._attempt.number, self._exclusions.choice):
            return decision._replace(next="resubmit")
        job.say(
            "SLURM neither requeues the job nor takes a new one; resume the run with: "
            f"slurmddp resume {folder.path.name}"
        )
        return decision._replace(next="none")

    def _await_slurm(self) -> None:
        """Wait to be ended on a host that SLURM has given up while it put the job back.

        SLURM ends the process when the host reports back. If the process ended before that, the slurmd here
        would say "already running" at the next start of the job. SLURM would then drain the node and hold
        the job.
        """
        job, host = self._job, self._job.environ.get("SLURMD_NODENAME", "")
        if job.fate != requeue_policy.REQUEUED or not host or self._terminated:
            return
        if host in hosts_of(job.facts.get("NodeList", "")):
            return
        job.say(f"SLURM has given {host} up and requeued the job; this script waits until SLURM ends it.")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        job.sleep(_BOUNDED_WAIT_S)
