"""Find out how an attempt ended after its ranks, record the outcome, and requeue or resubmit the job."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from slurmddp.batch import requeue_policy
from slurmddp.batch.attempt import Attempt
from slurmddp.batch.launch_failure import launch_failure, record
from slurmddp.batch.node_exclusion import Exclusions
from slurmddp.batch.requeue import leave_no_held_job, leave_queue, requeue, resubmit
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

_LONGEST_WAIT_S = 600.0
"""The longest wait of `_await_slurm`, in seconds."""
_CODES_OF_RANKS = {
    EXIT_FINISHED, EXIT_STOPPED, EXIT_UNHEALTHY_NODE, EXIT_CONFIG, EXIT_NO_PROGRESS, *range(128, 256)
}  # fmt: skip
"""Exit codes that mean something only if they come from ranks; from setup lines they count as EXIT_FAILED."""


class AttemptEnd:
    """Ends one attempt: records the failed nodes and the outcome, then requeues or resubmits the job."""

    def __init__(self, attempt: Attempt, job: SlurmJob, *, terminated: bool = False) -> None:
        """Store the attempt and its job; record nothing yet.

        Args:
            attempt: the attempt.
            job: the job of the attempt.
            terminated: whether SLURM has sent SIGTERM to the batch script.
        """
        self._attempt = attempt
        self._job = job
        self._terminated = terminated
        self._ranks_began = False
        self._exclusions = Exclusions(attempt.folder, job, attempt.settings, start_time=attempt.start_time)

    def conclude(self, code: int | None) -> int:
        """Decide and record the outcome of the attempt, and requeue or resubmit the job if the run continues.

        Args:
            code: the exit code of the subshell with the setup lines and srun; None if bash could not read
                these lines.

        Returns:
            The exit code of the batch script.
        """
        try:
            outcome = self._conclude(self._code_before_ranks(code))
            if outcome.code and outcome.next != "requeue":
                leave_no_held_job(self._job)
            return outcome.code
        finally:
            self._await_slurm()

    def _code_before_ranks(self, code: int | None) -> int:
        """Return the exit code of the subshell, and note whether any rank was started.

        If a setup line ended the subshell before any rank was started, a code in `_CODES_OF_RANKS` becomes
        EXIT_FAILED.
        """
        log = self._job.log
        if code is None:
            log("bash can't read the setup lines of the cluster file; no rank was started.")
            return EXIT_FAILED
        if not self._attempt.settings.setup or is_there(self._attempt.log_dir / "set-up"):
            log(f"srun ended with code {code}.")
            self._ranks_began = True
            return code

        log(f"The setup lines of the cluster file ended with code {code}, before any rank was started.")
        return EXIT_FAILED if code in _CODES_OF_RANKS else code

    def _conclude(self, srun_code: int) -> requeue_policy.Outcome:
        attempt = self._attempt
        job = self._job
        job.poll_patiently()
        if attempt.folder.is_superseded(attempt.number):
            return self.carry_out(srun_code, has_progressed=False)

        self._find_failed_nodes()
        # SLURM has requeued the job and soon ends this process, so the failed nodes are excluded at once.
        if job.state == requeue_policy.REQUEUED:
            self._exclusions.choose()
            self._exclusions.send()

        has_progressed = attempt.has_progressed()
        unlaunched = launch_failure(attempt, job.hosts)
        if unlaunched is not None:
            record(attempt, unlaunched)
            return self.carry_out(EXIT_UNHEALTHY_NODE, has_progressed, lost={})

        failure = attempt.recorded_failure()
        agents = None
        if failure is None and self._ranks_began:
            agents = attempt.common_exit_code(job.sleep)
        code = requeue_policy.exit_code(
            srun_code, failure=failure, agents=agents, job_state=job.state, progressed=has_progressed
        )
        if code is None:
            # An agent recorded no exit code, for an unknown reason. SLURM may have noticed by now that its
            # node failed.
            job.poll_patiently()
            self._find_failed_nodes()
            code = EXIT_FAILED
        return self.carry_out(code, has_progressed)

    def _find_failed_nodes(self) -> None:
        """Record the nodes that failed; set the job state to `NODE_FAIL` if a lost node ended the attempt."""
        attempt = self._attempt
        job = self._job
        hosts = dict(enumerate(job.hosts))
        replaced = {hosts[node] for node in attempt.replaced_nodes() if node in hosts}
        silent = {hosts[node] for node in attempt.silent_nodes() if node in hosts}
        self.note_failed_nodes(silent, replaced)

        # A failed node ended the attempt, although SLURM still shows the job as running.
        if job.state == requeue_policy.RUNNING and (silent - replaced) & self._exclusions.failed:
            job.state = requeue_policy.NODE_FAIL

    def note_failed_nodes(self, silent: Collection[str], replaced: Collection[str]) -> None:
        """Record the nodes that failed during the attempt, so that the next attempt avoids them.

        Args:
            silent: names of the nodes whose agents recorded no exit code.
            replaced: names of the nodes without which the attempt continued.
        """
        self._exclusions.note_failed(
            self._job.node_list,
            start_time=self._attempt.start_time,
            batch_log=self._attempt.folder.batch_log(self._attempt.number),
            silent=silent,
            replaced=replaced,
        )

    def carry_out(
        self,
        code: int,
        has_progressed: bool,
        *,
        lost: Mapping[int, str] | None = None,
        may_requeue: bool = True,
    ) -> requeue_policy.Outcome:
        """Decide and record the outcome of the attempt, and requeue or resubmit the job if the run continues.

        Args:
            code: the exit code of the attempt.
            has_progressed: whether the run has saved anything new since the attempt started.
            lost: the hosts of lost agents, by node index. None: if the attempt failed, look for the agents
                that recorded no exit code.
            may_requeue: whether SLURM may requeue the job; otherwise a new job is submitted.

        Returns:
            The outcome. Its `next` is the action that was taken: `none`, `requeue` or `resubmit`.
        """
        attempt = self._attempt
        job = self._job
        if attempt.folder.is_superseded(attempt.number):
            job.log(
                f"Attempt {attempt.number} is over (code {code}). A later attempt has begun, so this attempt "
                "neither requeues nor ends the run."
            )
            return requeue_policy.Outcome("superseded", "none", EXIT_NO_PROGRESS)

        # A batch script that was killed may have recorded the end already; then the recorded outcome holds.
        recorded = attempt.recorded_end()
        outcome = recorded or self._decide(code, has_progressed)
        if outcome.next == "requeue" and (job.facts.get("Requeue") == "0" or not may_requeue):
            outcome = outcome._replace(next="resubmit")
        if outcome.advice:
            job.log(outcome.advice.format(run=attempt.folder.path.name))
        if lost is None:
            lost = {}
            if outcome.outcome == "failed":
                lost = attempt.lost_agents(job.hosts)
        for node, host in lost.items():
            job.log(f"The agent on {host or 'an unknown host'} (node {node}) recorded no exit code.")

        if outcome.next != "none" and job.state != requeue_policy.REQUEUED:
            self._exclusions.choose()
        job.log(f"Attempt {attempt.number}: {outcome.outcome}, next: {outcome.next}.")

        # The end is recorded before the requeue, because SLURM ends this process when it grants the requeue.
        if recorded is None:
            attempt.record_end(outcome, has_progressed, lost=lost)
        if outcome.next == "none":
            leave_queue(job)
            return outcome

        done = self._run_again(outcome)
        if done.next == "none":
            attempt.record_end(done._replace(stalled_at=None), has_progressed, lost=lost, is_revised=True)
        return done

    def _decide(self, code: int, has_progressed: bool) -> requeue_policy.Outcome:
        near_limit = self._job.is_near_limit(self._attempt.settings.signal_lead_s)
        return self._attempt.decide(code, self._job.state, has_progressed, near_limit=near_limit)

    def _run_again(self, outcome: requeue_policy.Outcome) -> requeue_policy.Outcome:
        """Requeue the job, or else submit a new job; return the outcome, whose `next` is the taken action."""
        folder = self._attempt.folder
        job = self._job
        if outcome.next == "requeue" and requeue(job):
            self._exclusions.send()
            return outcome

        # A person may have ended the run while SLURM refused to requeue the job.
        if job.state == requeue_policy.CANCELLED or folder.is_cancelled:
            return outcome._replace(outcome="cancelled", next="none")
        if folder.is_stopped:
            return outcome._replace(next="none")

        if resubmit(folder, job, self._attempt.number, self._exclusions.choice):
            return outcome._replace(next="resubmit")

        job.log(
            "SLURM neither requeues the job nor accepts a new job; resume the run with: "
            f"slurmddp resume {folder.path.name}"
        )
        return outcome._replace(next="none")

    def _await_slurm(self) -> None:
        """If SLURM has lost this host and requeued the job, wait until SLURM ends this process.

        SLURM ends this process when the host answers again. If the process ended earlier, the slurmd on this
        host would report "already running" at the next start of the job. SLURM would then drain the node and
        hold the job.
        """
        job = self._job
        host = job.environ.get("SLURMD_NODENAME", "")
        if job.state != requeue_policy.REQUEUED or not host or self._terminated:
            return
        if host in hosts_of(job.facts.get("NodeList", "")):
            return

        job.log(f"SLURM has lost {host} and requeued the job. This script waits until SLURM ends it.")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        job.sleep(_LONGEST_WAIT_S)
