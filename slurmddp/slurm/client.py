"""Submit, query and cancel jobs on the login side.

The client reads the text output of SLURM's commands, because their JSON output changes with every release.
Each command names the columns that it prints. SLURM's commands run without variables that change their
output, such as SQUEUE_FORMAT, and without the variables of a job that this process may be part of. A query
that fails raises an error instead of returning a state.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from slurmddp.environments.hostlist import expand
from slurmddp.environments.scrub import scrub
from slurmddp.errors import SlurmError
from slurmddp.host.process import OpenFiles
from slurmddp.near_matches import near_matches
from slurmddp.slurm.command import CommandResult, run_command
from slurmddp.slurm.command_output import (
    QueuedJob,
    find_submitted,
    parse_facts,
    parse_job_id,
    parse_queue,
    parse_run,
    parse_test_start,
    queue_command,
)
from slurmddp.slurm.job_script import script_of
from slurmddp.slurm.rejections import hint_for
from slurmddp.slurm.states import (
    PENDING,
    STARTED_BY_A_PERSON,
    TERMINAL,
    UNKNOWN,
    JobState,
    clean_reason,
    parse_exit,
    parse_start,
    parse_state,
)

RETRY_DELAYS_S = (2.0, 5.0, 10.0, 20.0)
"""Seconds to wait before each retry of a command that SLURM did not answer."""
QUERY_TIMEOUT_S = 10.0
"""Seconds after which a query counts as unanswered; short, because a person waits for the answer."""
IDS_PER_QUERY = 200
"""The largest number of job ids in one squeue or scancel command."""
_NOT_IN_TURN = ("BeginTime", "Dependency", "JobHeld")
"""First words of SLURM's reasons for jobs that wait for a time, for another job or for a release."""
_FINAL = re.compile(": fatal: |Problem talking to the database")
"""Matches the error line of a command that gave up because it could not reach slurmctld or slurmdbd."""
_OVER = re.compile("invalid job id|already completing or completed", re.IGNORECASE)
"""Matches the errors of scancel for a job that has already ended."""


def on_path() -> bool:
    """Return whether this machine has SLURM's commands."""
    return shutil.which("sbatch") is not None


def _print_to_stderr(text: str) -> None:
    with suppress(OSError):
        print(f"slurmddp: {text}", file=sys.stderr, flush=True)


class SlurmClient:
    """A client of the SLURM to which the commands on PATH connect: submits, queries and cancels jobs.

    Tests use `FakeSlurm` in its place, which keeps jobs in memory.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        report: Callable[[str], None] = _print_to_stderr,
    ) -> None:
        """Set the time-outs of the client, and where it reports its waits.

        Args:
            timeout_s: seconds to wait for sbatch; other commands get at most `QUERY_TIMEOUT_S` seconds.
            sleep: waits for a number of seconds between two tries of a command.
            report: called with one line about each wait that a person would notice.
        """
        self._timeout_s = timeout_s
        self._sleep = sleep
        self.report = report

    def submit(
        self, script: Path, *, token: str, options: Sequence[str] = (), known: Collection[str | None] = ()
    ) -> str:
        """Submit `script` exactly once, even if slurmctld answers late or not at all; return the job's id.

        Args:
            script: the batch script.
            token: a unique argument of the script, by which the job is found in the queue. The job's comment
                is not used for this, because users set it themselves.
            options: further options of sbatch.
            known: ids of earlier jobs of this script. If sbatch gives no answer, and SLURM does not show
                arguments of scripts, a live job of the script that is not in `known` is taken for the new
                job.

        Raises:
            SlurmError: SLURM refuses the job, or does not answer.
        """
        command = ["sbatch", "--parsable", *options, str(script), token]
        for delay in RETRY_DELAYS_S:
            try:
                return self._submit_once(command, script, token, known)
            except _NotAnswered as error:
                unanswered = error

            self.report(
                f"{unanswered.message} In {delay:g} s slurmddp looks for the job, and submits it again if "
                "SLURM lacks it."
            )
            self._sleep(delay)
            # slurmctld may have queued the job although sbatch got no answer.
            job_id = self._find_patiently(script, token, known, unanswered)
            if job_id is not None:
                return job_id

        raise unanswered

    def would_take(self, script: Path, options: Sequence[str] = ()) -> bool:
        """Return whether `script` could start once all busy nodes are free; nodes that are down don't count.

        The answer comes from `sbatch --test-only`, which queues nothing. It is False if SLURM refuses the job
        or does not answer. If SLURM refuses the job only because of `options`, this is reported.
        """
        refusal = self._refusal(script, options)
        if refusal is None:
            return True

        if options and self._refusal(script) is None:
            self.report(
                f"The job does not avoid the nodes that failed recently ({' '.join(options)}): "
                f"with these options SLURM would refuse it. {refusal.message}"
            )
        return False

    def _refusal(self, script: Path, options: Sequence[str] = ()) -> SlurmError | None:
        try:
            self.query(["sbatch", "--test-only", *options, str(script)])
        except SlurmError as error:
            return error
        return None

    def test(self, text: str) -> str:
        """Ask SLURM, by `sbatch --test-only`, whether it would queue a batch script with the content `text`.

        Returns:
            A clause with the expected start (`parse_test_start`); empty if SLURM gives none.

        Raises:
            SlurmError: SLURM refuses the job, or does not answer.
        """
        with tempfile.NamedTemporaryFile("w", prefix="slurmddp-", suffix=".sbatch", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            result = self._run(["sbatch", "--test-only", file.name])
        return parse_test_start(result.err)

    def _submit_once(
        self, command: list[str], script: Path, token: str, known: Collection[str | None]
    ) -> str:
        stdout = self.query(command)
        job_id = parse_job_id(stdout) or self._find(script, token, known)
        if job_id is None:
            error = SlurmError(
                f"sbatch printed no job id, but: {stdout.strip()!r}.",
                hint="Look for the job with `squeue --me` before you submit it again.",
            )
            error.may_be_queued = True
            raise error

        return job_id

    def _find_patiently(
        self, script: Path, token: str, known: Collection[str | None], cause: SlurmError
    ) -> str | None:
        """Return the id of a job that was queued although sbatch got no answer; None if there is none.

        Raises:
            SlurmError: SLURM does not show its queue either; the message begins with the message of `cause`.
        """
        for delay in RETRY_DELAYS_S:
            try:
                return self._find(script, token, known)
            except _NotAnswered:
                self._sleep(delay)

        raise _NotAnswered(
            f"{cause.message} Then SLURM did not answer whether the job is in its queue.",
            hint="When SLURM answers again, look for the job with `squeue --me` before you submit it again.",
        )

    def _find(self, script: Path, token: str, known: Collection[str | None]) -> str | None:
        """Return the id of the job with `token` among the arguments of its script; None if there is none."""
        queue = self._jobs_of_account()
        live = {job.number for job in queue if parse_state(job.state) not in TERMINAL}
        return find_submitted(queue, script, token, live.difference(known), self._submission_of)

    def _jobs_of_account(self) -> list[QueuedJob]:
        # The query gets the long time-out of sbatch, because a submission can't continue without the answer.
        return parse_queue(self.query(queue_command("--user", str(os.getuid())), self._timeout_s))

    def _submission_of(self, job_id: str) -> str:
        """Return what `scontrol` shows of a job; empty if SLURM has forgotten the job."""
        try:
            return self.query(["scontrol", "-o", "show", "job", job_id])
        except _NotAnswered:
            raise
        except SlurmError:
            return ""

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Return the states of jobs by id; omit jobs that SLURM does not know.

        squeue is queried first, then the accounting for jobs that squeue has forgotten. If the accounting
        does not answer, the state of these jobs is `UNKNOWN`, with an `error`.

        Raises:
            SlurmError: squeue does not answer.
        """
        states: dict[str, JobState] = {}
        unique_ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(unique_ids), IDS_PER_QUERY):
            batch = unique_ids[start : start + IDS_PER_QUERY]
            states.update(self._queued(batch))
            forgotten = [job_id for job_id in batch if job_id not in states]
            if not forgotten:
                continue

            try:
                states.update(self._accounted(forgotten))
            except SlurmError as error:
                for job_id in forgotten:
                    states[job_id] = JobState(job_id=job_id, state=UNKNOWN, error=error.message)

        return states

    def _queued(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        try:
            text = self.query(queue_command("--jobs", ",".join(job_ids)))
        except SlurmError as error:
            # squeue fails if it is asked for a single job that it has forgotten. If it is asked for several
            # jobs, it omits such jobs.
            if "invalid job id" in error.message.lower():
                return {}
            raise
        return {job.job_id: _from_squeue(job) for job in parse_queue(text) if job.job_id in job_ids}

    def _accounted(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Return the states of jobs, by id, as sacct shows them; empty if the site has no accounting."""
        if shutil.which("sacct") is None:
            return {}

        # sacct is asked for whole arrays: asked for one element, it omits the common record of all elements
        # that never started.
        arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
        command = ["sacct", "-X", "-P", "-n", "-j", ",".join(arrays)]
        # sacct is the only one of SLURM's commands that does not read SLURM_CLUSTERS.
        if cluster := os.environ.get("SLURM_CLUSTERS"):
            command.append(f"--clusters={cluster}")

        columns = "JobID,State,ExitCode,NodeList"
        try:
            lines = self.query([*command, "-o", f"{columns},SubmitLine"])
        except SlurmError as error:
            if "accounting storage is disabled" in error.message.lower():
                return {}
            # sacct has no field SubmitLine before SLURM 21.08.
            if "invalid field" not in error.message.lower():
                raise
            lines = self.query([*command, "-o", columns])

        jobs = [job for line in lines.splitlines() for job in _from_sacct(line)]
        return {job.job_id: job for job in jobs if job.job_id in job_ids}

    def jobs_of_each(self, folders: Sequence[Path]) -> dict[Path, dict[str, JobState]]:
        """Return the user's jobs in SLURM that train in each run folder, by job id.

        A job is recognized by the path of its batch script. SLURM is queried once for all folders.
        """
        jobs: dict[Path, dict[str, JobState]] = {folder: {} for folder in folders}
        by_name: dict[str, list[Path]] = {}
        for folder in jobs:
            by_name.setdefault(folder.name, []).append(folder)

        for job in self._jobs_of_account():
            for folder in _folders_of(job.job_id, job.script, by_name):
                jobs[folder][job.job_id] = _from_squeue(job)
        return jobs

    def jobs_ahead(self, job_id: str) -> int | None:
        """Return the number of waiting jobs in the job's partition that SLURM considers before it.

        These are the jobs with a higher priority, and the jobs with equal priority and a lower id, such as
        earlier elements of the same array. Jobs that are held, or wait for a time or for another job, are not
        counted. The result is None if the job itself waits for one of these reasons, or if squeue does not
        show it. Jobs that the site hides from this user are not counted.
        """
        command = ["squeue", "--noheader", "--all", "--array", "--states=PENDING", "-o", "%i|%P|%Q|%r"]
        lines = self.query(command).splitlines()
        rows = [line.strip().split("|", 3) for line in lines if line.count("|") >= 3]
        rows = [row for row in rows if not row[3].startswith(_NOT_IN_TURN)]

        row_of_job = next((row for row in rows if row[0] == job_id), None)
        if row_of_job is None or not row_of_job[2].isdigit():
            return None
        others = [row for row in rows if row[1] == row_of_job[1] and row[2].isdigit()]
        return sum(_turn(row) < _turn(row_of_job) for row in others)

    def facts(self, job_id: str) -> dict[str, str] | None:
        """Return the `Key=value` pairs of `scontrol show job`; None if SLURM does not know the job.

        The result is empty for a heterogeneous job, because scontrol prints one record for each of its
        components.

        Raises:
            SlurmError: SLURM does not answer.
        """
        try:
            text = self.query(["scontrol", "-o", "show", "job", job_id]).strip()
        except SlurmError as error:
            if "invalid job id" in error.message.lower():
                return None
            raise

        if len(re.findall(r"^JobId=", text, re.MULTILINE)) != 1:
            return {}
        return parse_facts(text)

    def cancel(self, *job_ids: str) -> None:
        """Cancel jobs; ignore jobs that have already ended."""
        for start in range(0, len(job_ids), IDS_PER_QUERY):
            try:
                self.query(["scancel", *job_ids[start : start + IDS_PER_QUERY]])
            except SlurmError as error:
                errors = [line for line in error.message.splitlines() if "error:" in line]
                if not errors or not all(map(_OVER.search, errors)):
                    raise

    def query(self, command: list[str], timeout_s: float | None = None) -> str:
        """Run one command and return its standard output.

        Args:
            command: the command.
            timeout_s: seconds to wait; None: the client's time-out for sbatch, 10 at most for other commands.

        Raises:
            SlurmError: the command failed; the message holds its error output.
        """
        return self._run(command, timeout_s).out

    def _run(self, command: list[str], timeout_s: float | None = None) -> CommandResult:
        clusters = os.environ.get("SLURM_CLUSTERS", "")
        if clusters == "all" or "," in clusters:
            raise SlurmError(
                f"SLURM_CLUSTERS={clusters} names several clusters, and each cluster numbers its own jobs.",
                hint="Use `export SLURM_CLUSTERS=NAME` with one of them.",
            )

        program = command[0]
        is_submission = program == "sbatch"
        if timeout_s is None:
            timeout_s = self._timeout_s if is_submission else min(self._timeout_s, QUERY_TIMEOUT_S)
        result = run_command(
            command,
            scrub(os.environ),
            timeout_s,
            # SLURM passes the resource limits of sbatch (`ulimit`) on to the job. So sbatch gets the limit of
            # open files that this process had at its start, before slurmddp raised it.
            open_files=OpenFiles.first if is_submission else None,
            announce=self.report,
        )
        if result.code == 0:
            return result
        if result.code == 127 and shutil.which(program) is None:
            raise SlurmError(
                f"There is no {program} on this machine's PATH.",
                hint="Go to a login node of the cluster, or start a SLURM here with `slurmddp sandbox up`.",
            )
        raise self._error(program, result)

    def _error(self, program: str, result: CommandResult) -> SlurmError:
        """Return the error to raise for a command that failed, with the command's output and a hint."""
        text = result.err.strip() or result.out.strip() or f"exit code {result.code}"
        # A command that gave up has printed a line for each try. Show only its last line, which `_FINAL`
        # matches.
        text = "\n".join(filter(_FINAL.search, text.splitlines())) or text
        # SLURM's messages have no full stop, but other sentences of the message may follow.
        if not text.endswith((".", "!", "?")):
            text += "."

        error_class = _NotAnswered if result.is_retryable else SlurmError
        hint = " ".join(filter(None, [self._near_options(program, text), hint_for(text)]))
        return error_class(text if result.timed_out else f"{program} failed: {text}", hint=hint)

    def _near_options(self, program: str, text: str) -> str:
        """Return a hint with options of `program` that resemble an option which it did not recognize.

        The hint is empty if the error `text` is about something else, or if no option is similar.
        """
        unknown = re.search(r"unrecognized option '--([\w-]+)", text)
        if unknown is None:
            return ""

        try:
            # The help also lists the options of the site's own plugins.
            listed = self.query([program, "--help"])
        except SlurmError:
            return ""
        options = set(re.findall(r"--([a-z][\w-]+)", listed)) - {unknown[1]}
        return near_matches(unknown[1], options, else_all=False)


class _NotAnswered(SlurmError):
    """The error of a command that SLURM did not answer, although it may have carried out the command."""

    may_be_queued = True


def _folders_of(job_id: str, script: str, by_name: Mapping[str, Sequence[Path]]) -> list[Path]:
    """Return the run folders that contain the batch script of a job.

    Args:
        job_id: the id of the job.
        script: the path of the job's batch script, followed by its arguments.
        by_name: all run folders, by their last path component, which several folders may share.
    """
    path = script_of(job_id, script)
    names = dict.fromkeys(path.split("/")[:-1])
    return [folder for name in names for folder in by_name.get(name, ()) if _lies_in(path, folder)]


def _lies_in(script: str, folder: Path) -> bool:
    """Return whether a script is in the folder `folder`; either path may contain symbolic links."""
    parent, separator, _ = script.partition(f"/{folder.name}/")
    return bool(separator) and os.path.realpath(parent) == os.path.realpath(folder.parent)


def _turn(row: Sequence[str]) -> list[int]:
    """Return the sort key of a waiting job in SLURM's order: higher priorities first, then lower ids.

    Args:
        row: the job's id, partition, priority and reason, as squeue prints them.
    """
    return [-int(row[2]), *map(int, re.findall(r"\d+", row[0]))]


def _from_squeue(job: QueuedJob) -> JobState:
    state = parse_state(job.state)
    reason = clean_reason(job.reason)
    # For a held job squeue shows its begin time, which is no expected start.
    has_start = state in PENDING and not reason.startswith(STARTED_BY_A_PERSON)
    return JobState(
        job_id=job.job_id,
        state=state,
        nodes=job.nodes,
        reason=reason,
        start=parse_start(job.start) if has_start else "",
        run=job.run,
        script=script_of(job.job_id, job.script),
    )


def _from_sacct(line: str) -> list[JobState]:
    """Return the job in a line of sacct; a line for the array elements `7_[2-5,9%2]` gives several jobs."""
    job_id, state, code, nodes, command = [*line.split("|", 4), "", "", "", ""][:5]
    job_id = job_id.strip()
    nodes = nodes.strip()
    job = JobState(
        job_id=job_id,
        state=parse_state(state),
        nodes="" if nodes == "None assigned" else nodes,
        exit_code=parse_exit(code),
        run=parse_run(command.replace("--comment=", " ")),
    )

    ids = [job_id]
    elements = re.fullmatch(r"(\d+_\[[\d,-]+)(?:%\d+)?\]", job_id)
    if elements is not None:
        ids = [*expand(f"{elements[1]}]")]
    script = command[command.rfind(" /") + 1 :].strip()
    return [replace(job, job_id=each, script=script_of(each, script)) for each in ids]
