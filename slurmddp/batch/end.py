"""After the ranks: find out how the attempt ended, record it, and let the run go on or end."""

from __future__ import annotations

import signal

from slurmddp.batch import outcome
from slurmddp.batch.attempt import Attempt, events_of
from slurmddp.batch.exclusions import Exclusions
from slurmddp.batch.requeue import leave_queue, requeue, resubmit
from slurmddp.batch.slurm_job import SlurmJob, hosts_of
from slurmddp.errors import EXIT_FAILED, EXIT_NO_PROGRESS

_BOUNDED_WAIT_S = 600.0
_CODES_OF_RANKS = {0, 75, 76, 78, 79, *range(128, 256)}
"""Exit codes with a meaning of their own, which a setup line must not lend to the attempt."""


class AttemptEnd:
    """The end of one attempt, in the seconds that SLURM leaves."""

    def __init__(self, attempt: Attempt, job: SlurmJob, *, terminated: bool = False) -> None:
        """Take what has ended.

        Args:
            attempt: the attempt.
            job: that ran it.
            terminated: whether SLURM has sent SIGTERM to the batch script.
        """
        self._attempt, self._job, self._terminated = attempt, job, terminated
        self._ranks_began = False
        settings = attempt.settings
        self._exclusions = Exclusions(
            attempt.folder,
            job,
            began=attempt.began,
            hours=settings.exclude_failed_h,
            persons=settings.exclude,
        )

    def conclude(self, code: int | None) -> int:
        """Decide what comes next and let it happen; return the exit code of the batch script.

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
            say("The setup lines of the cluster file are no shell that bash can read; no rank was started.")
            return EXIT_FAILED
        if not self._attempt.settings.setup or (self._attempt.log_dir / "set-up").exists():
            say(f"srun ended with code {code}.")
            self._ranks_began = True
            return code
        say(f"The setup lines of the cluster file ended with code {code}, before any rank was started.")
        return EXIT_FAILED if code in _CODES_OF_RANKS else code

    def _conclude(self, srun_code: int) -> int:
        attempt, job = self._attempt, self._job
        job.ask()
        self._look_at_nodes()
        if job.fate == outcome.REQUEUED:  # At once: SLURM ends this process soon.
            self._exclusions.choose()
            self._exclusions.tell()
        progressed = attempt.has_progressed()
        code = self._exit_code(srun_code, progressed)
        end = attempt.end(code, job.fate, progressed)
        decision = outcome.decide(end, self._counts(), attempt.settings.policy)
        if decision.outcome == "failed":
            attempt.note_lost_agents(job.hosts)
        if decision.next == "requeue" and job.facts.get("Requeue") == "0":
            decision = decision._replace(next="resubmit")
        if decision.advice:
            job.say(decision.advice.format(run=attempt.folder.path.name))
        return self._carry_out(decision, progressed)

    def _counts(self) -> outcome.Counts:
        return outcome.count_all(events_of(self._attempt.folder))

    def _exit_code(self, srun_code: int, progressed: bool) -> int:
        attempt, job = self._attempt, self._job
        failure = attempt.recorded_failure()
        may_tell = failure is None and self._ranks_began
        agents = attempt.common_exit_code(job.sleep) if may_tell else None
        code = outcome.exit_code(
            srun_code, failure=failure, agents=agents, fate=job.fate, progressed=progressed
        )
        if code is not None:
            return code
        job.ask()  # SLURM may have learned meanwhile what became of the node of an agent that is gone.
        self._look_at_nodes()
        return EXIT_FAILED

    def _look_at_nodes(self) -> None:
        """Note the nodes that failed; SLURM may not know yet of a node whose loss ended the attempt."""
        attempt, job = self._attempt, self._job
        hosts = job.hosts
        silent = {hosts[node] for node in attempt.silent_nodes() if node < len(hosts)}
        replaced = {hosts[node] for node in attempt.silent_nodes("replaced") if node < len(hosts)}
        self._exclusions.note_failed(
            job.node_list,
            began=attempt.began,
            batch_log=attempt.log_dir / "batch.log",
            silent=silent,
            replaced=replaced,
        )
        if job.fate == outcome.RUNNING and (silent - replaced) & self._exclusions.failed:
            job.fate = outcome.NODE_FAIL

    def _carry_out(self, decision: outcome.Outcome, progressed: bool) -> int:
        attempt, job = self._attempt, self._job
        if decision.next != "none" and job.fate != outcome.REQUEUED:
            self._exclusions.choose()
        if attempt.is_superseded:
            job.say(
                f"Attempt {attempt.number} is over (code {decision.code}) and a later one has begun: "
                "the run is left to that one."
            )
            return EXIT_NO_PROGRESS
        job.say(f"Attempt {attempt.number}: {decision.outcome}, next: {decision.next}.")
        # Before the request: SLURM ends this process when it grants it.
        attempt.record_end(decision, progressed)
        if decision.next == "none":
            leave_queue(job)
        elif not self._run_again(decision.next):
            job.say(
                "SLURM neither puts the job back nor takes a new one; go on with: "
                f"slurmddp resume {attempt.folder.path.name}"
            )
            attempt.record_end(decision._replace(next="none", stalled_at=None), progressed, refused=True)
        return decision.code

    def _run_again(self, by: str) -> bool:
        attempt, job = self._attempt, self._job
        if by == "requeue" and requeue(job):
            self._exclusions.tell()
            return True
        return resubmit(attempt.folder, job, attempt.number, self._exclusions.choice)

    def _await_slurm(self) -> None:
        """Wait to be ended on a host that SLURM has given up while it put the job back.

        SLURM ends the process when the host reports back. If the process ended before that, the slurmd here
        would say "already running" at the next start of the job. SLURM would then drain the node and hold
        the job.
        """
        job, host = self._job, self._job.environ.get("SLURMD_NODENAME", "")
        if job.fate != outcome.REQUEUED or not host or self._terminated:
            return
        if host in hosts_of(job.facts.get("NodeList", "")):
            return
        job.say(f"SLURM has given {host} up and put the job back; waiting to be ended by it.")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        job.sleep(_BOUNDED_WAIT_S)
