"""Submit, query and cancel jobs on the login side.

Text formats only (the JSON of these commands changes with every release), chosen explicitly, in an
environment free of SQUEUE_FORMAT and the like and of the traces of a job that this process may be part of.
An error of a query is an error, never a state.
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
from slurmddp.errors import SlurmError, near_matches
from slurmddp.host.process import OpenFiles
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
QUERY_TIMEOUT_S = 10.0
"""Seconds after which a query counts as unanswered: a person waits for it."""
IDS_PER_QUERY = 200
"""Job ids of one squeue or scancel command, at most."""
_NOT_IN_TURN = ("BeginTime", "Dependency", "JobHeld")
"""Beginnings of the reasons of waiting jobs at which SLURM does not look."""
_FINAL = re.compile(": fatal: |Problem talking to the database")
"""A line with which a command ends: slurmctld or slurmdbd is away."""
_OVER = re.compile("invalid job id|already completing or completed", re.IGNORECASE)
"""An error of scancel about a job that is over."""


def on_path() -> bool:
    """Return whether this machine has SLURM's commands."""
    return shutil.which("sbatch") is not None


def _to_stderr(text: str) -> None:
    with suppress(OSError):
        print(f"slurmddp: {text}", file=sys.stderr, flush=True)


class SlurmClient:
    """The SLURM that the commands on PATH talk to; the tests' `FakeSlurm` keeps jobs in memory instead."""

    def __init__(
        self,
        *,
        timeout_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        """Set the patience of the client.

        Args:
            timeout_s: seconds for a submission; a query has 10 at most.
            sleep: waits between two tries.
            say: gets one line about each wait that a person would notice.
        """
        self._timeout_s = timeout_s
        self._sleep = sleep
        self.say = say

    def submit(
        self, script: Path, *, token: str, options: Sequence[str] = (), known: Collection[str | None] = ()
    ) -> str:
        """Submit `script` once, in spite of a controller that answers late or twice; return the job's id.

        Args:
            script: the batch script.
            token: unique, and an argument of the script: SLURM shows it, and the comment is the person's.
            options: further options of sbatch.
            known: ids of earlier jobs of this script. Where SLURM shows no arguments, another live job of the
                script is taken for the one whose submission got no answer.
        """
        command = ["sbatch", "--parsable", *options, str(script), token]
        for delay in RETRY_DELAYS_S:
            try:
                return self._submit_once(command, script, token, known)
            except _NotAnswered as error:
                unanswered = error
            self.say(f"{unanswered.message} Looking for the job in {delay:g} s, then trying again.")
            self._sleep(delay)
            job_id = self._find_patiently(script, token, known, unanswered)
            if job_id is not None:
                return job_id
        raise unanswered

    def would_take(self, script: Path, options: Sequence[str] = ()) -> bool:
        """Return whether SLURM has the nodes for `script`: busy nodes count, nodes that are down don't.

        `sbatch --test-only` queues nothing. Without an answer return False, with a line if `options` are why.
        """
        refusal = self._refusal(script, options)
        if refusal is None:
            return True
        if options and self._refusal(script) is None:
            self.say(
                f"The job does not avoid the nodes that failed recently ({' '.join(options)}): "
                f"SLURM would refuse it then. {refusal.message}"
            )
        return False

    def _refusal(self, script: Path, options: Sequence[str] = ()) -> SlurmError | None:
        try:
            self.query(["sbatch", "--test-only", *options, str(script)])
        except SlurmError as error:
            return error
        return None

    def test(self, text: str) -> str:
        """Ask SLURM whether it would queue the script `text`, without queueing it.

        Returns:
            SLURM's sentence about the expected start; empty if it gives none.

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
                f"sbatch gave no job id, but: {stdout.strip()!r}.",
                hint="Look for the job with squeue before submitting again.",
            )
            error.may_be_queued = True
            raise error
        return job_id

    def _find_patiently(
        self, script: Path, token: str, known: Collection[str | None], cause: SlurmError
    ) -> str | None:
        """Find a job that sbatch may have queued after all; raise SlurmError if SLURM stays silent."""
        for delay in RETRY_DELAYS_S:
            try:
                return self._find(script, token, known)
            except _NotAnswered:
                self._sleep(delay)
        raise _NotAnswered(
            f"{cause.message} Then SLURM did not say whether the job is in its queue.",
            hint="When it answers again, look at `squeue --me` before submitting again.",
        )

    def _find(self, script: Path, token: str, known: Collection[str | None]) -> str | None:
        """Return the job with `token` among the arguments of its script; None if SLURM has no such job."""
        queue = self._jobs_of_account()
        live = {job.number for job in queue if parse_state(job.state) not in TERMINAL}
        return find_submitted(queue, script, token, live.difference(known), self._submission_of)

    def _jobs_of_account(self) -> list[QueuedJob]:
        # A submission waits for the answer.
        return parse_queue(self.query(queue_command("--user", str(os.getuid())), self._timeout_s))

    def _submission_of(self, job_id: str) -> str:
        """Return what `scontrol` shows of a job; empty if SLURM has forgotten it."""
        try:
            return self.query(["scontrol", "-o", "show", "job", job_id])
        except _NotAnswered:
            raise
        except SlurmError:
            return ""

    def jobs(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Ask squeue, then the accounting for jobs that squeue has forgotten; omit unknown jobs.

        If the accounting does not answer, the forgotten jobs have an `error`.

        Raises:
            SlurmError: squeue does not answer.
        """
        found: dict[str, JobState] = {}
        ids = list(dict.fromkeys(job_ids))
        for start in range(0, len(ids), IDS_PER_QUERY):
            some = ids[start : start + IDS_PER_QUERY]
            found.update(self._queued(some))
            missing = [job_id for job_id in some if job_id not in found]
            if not missing:
                continue
            try:
                found.update(self._accounted(missing))
            except SlurmError as error:
                forgotten = JobState(job_id="", state=UNKNOWN, error=error.message)
                found.update({job_id: replace(forgotten, job_id=job_id) for job_id in missing})
        return found

    def _queued(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        try:
            text = self.query(queue_command("--jobs", ",".join(job_ids)))
        except SlurmError as error:
            if "invalid job id" in error.message.lower():
                return {}
            raise
        return {job.job_id: _from_squeue(job) for job in parse_queue(text) if job.job_id in job_ids}

    def _accounted(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        if shutil.which("sacct") is None:
            return {}
        form = "JobID,State,ExitCode,NodeList"
        # Asked for one element, sacct omits the record of the elements that never started.
        whole = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
        command = ["sacct", "-X", "-P", "-n", "-j", ",".join(whole)]
        if cluster := os.environ.get("SLURM_CLUSTERS"):
            command.append(f"--clusters={cluster}")  # Of all commands, only sacct does not read the variable.
        try:
            lines = self.query([*command, "-o", f"{form},SubmitLine"])
        except SlurmError as error:
            if "accounting storage is disabled" in error.message.lower():
                return {}
            if "invalid field" not in error.message.lower():
                raise
            lines = self.query([*command, "-o", form])  # SLURM before 21.08 has no SubmitLine.
        found = [job for line in lines.splitlines() for job in _from_sacct(line)]
        return {job.job_id: job for job in found if job.job_id in job_ids}

    def jobs_of_each(self, folders: Sequence[Path]) -> dict[Path, dict[str, JobState]]:
        """Return this account's jobs that train in each folder, by id; their batch scripts say so.

        SLURM is asked once for all folders.
        """
        found: dict[Path, dict[str, JobState]] = {folder: {} for folder in folders}
        by_name: dict[str, list[Path]] = {}
        for folder in found:
            by_name.setdefault(folder.name, []).append(folder)
        for job in self._jobs_of_account():
            for folder in _folders_of(job.job_id, job.script, by_name):
                found[folder][job.job_id] = _from_squeue(job)
        return found

    def jobs_ahead(self, job_id: str) -> int | None:
        """Return how many waiting jobs of a job's partition SLURM looks at earlier.

        These are the jobs of a higher priority. Among equals, as the elements of an array are, they are the
        jobs with lower ids. Jobs that are held, or wait for a time or another job, are not counted. None if
        the job is one of these, or squeue does not show it. A site may hide the jobs of others.
        """
        command = ["squeue", "--noheader", "--all", "--array", "--states=PENDING", "-o", "%i|%P|%Q|%r"]
        lines = self.query(command).splitlines()
        rows = [line.strip().split("|", 3) for line in lines if line.count("|") >= 3]
        rows = [row for row in rows if not row[3].startswith(_NOT_IN_TURN)]
        own = next((row for row in rows if row[0] == job_id), None)
        if own is None or not own[2].isdigit():
            return None
        others = [row for row in rows if row[1] == own[1] and row[2].isdigit()]
        return sum(_turn(row) < _turn(own) for row in others)

    def facts(self, job_id: str) -> dict[str, str] | None:
        """Return what `scontrol show job` prints of a job by its number; None if SLURM does not know it.

        Empty for a heterogeneous job, which has no facts of its own. Raises SlurmError without an answer.
        """
        try:
            text = self.query(["scontrol", "-o", "show", "job", job_id]).strip()
        except SlurmError as error:
            if "invalid job id" in error.message.lower():
                return None
            raise
        return parse_facts(text) if len(re.findall(r"^JobId=", text, re.MULTILINE)) == 1 else {}

    def cancel(self, *job_ids: str) -> None:
        """End jobs for good; jobs that are over are left out."""
        for start in range(0, len(job_ids), IDS_PER_QUERY):
            try:
                self.query(["scancel", *job_ids[start : start + IDS_PER_QUERY]])
            except SlurmError as error:
                told = [line for line in error.message.splitlines() if "error:" in line]
                if not told or not all(map(_OVER.search, told)):
                    raise

    def query(self, command: list[str], timeout_s: float | None = None) -> str:
        """Run one command and return its standard output; raises SlurmError, with its error output.

        Args:
            command: the command.
            timeout_s: seconds to wait; None: those of a submission or a query.
        """
        return self._run(command, timeout_s).out

    def _run(self, command: list[str], timeout_s: float | None = None) -> CommandResult:
        if (clusters := os.environ.get("SLURM_CLUSTERS", "")) == "all" or "," in clusters:
            raise SlurmError(
                f"SLURM_CLUSTERS={clusters} names several clusters, and a job's number is one cluster's.",
                hint="Say `export SLURM_CLUSTERS=NAME` with one of them.",
            )
        program = command[0]
        if timeout_s is None:
            timeout_s = self._timeout_s if program == "sbatch" else min(self._timeout_s, QUERY_TIMEOUT_S)
        result = run_command(
            command,
            scrub(os.environ),
            timeout_s,
            open_files=OpenFiles.first if program == "sbatch" else None,
            announce=self.say,
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
        """Return the error of a command that failed, with its words and what to do."""
        words = result.err.strip() or result.out.strip() or f"exit code {result.code}"
        # The lines before a final one are the tries that led to it.
        words = "\n".join(filter(_FINAL.search, words.splitlines())) or words
        words += "" if words.endswith((".", "!", "?")) else "."  # so that a sentence may follow
        kind = _NotAnswered if result.is_retryable else SlurmError
        hint = " ".join(filter(None, [self._near_options(program, words), hint_for(words)]))
        return kind(words if result.timed_out else f"{program} failed: {words}", hint=hint)

    def _near_options(self, program: str, words: str) -> str:
        """Return the options of `program` at this site that are near to the option it did not recognize."""
        unknown = re.search(r"unrecognized option '--([\w-]+)", words)
        if unknown is None:
            return ""
        try:
            listed = self.query([program, "--help"])  # With the options of the site's own plugins.
        except SlurmError:
            return ""
        options = set(re.findall(r"--([a-z][\w-]+)", listed)) - {unknown[1]}
        return near_matches(unknown[1], options, else_all=False)


class _NotAnswered(SlurmError):
    """SLURM gave no answer, so that it may have carried out the request."""

    may_be_queued = True


def _folders_of(job_id: str, script: str, by_name: Mapping[str, Sequence[Path]]) -> list[Path]:
    """Return the folder in which a job trains, among folders by their names. A name may recur elsewhere."""
    own = script_of(job_id, script)
    names = dict.fromkeys(own.split("/")[:-1])
    return [one for name in names for one in by_name.get(name, ()) if _lies_in(own, one)]


def _lies_in(script: str, folder: Path) -> bool:
    """Return whether a script, with its arguments, lies in `folder`; both paths may hold links."""
    parent, found, _ = script.partition(f"/{folder.name}/")
    return bool(found) and os.path.realpath(parent) == os.path.realpath(folder.parent)


def _turn(row: Sequence[str]) -> list[int]:
    """Return the key of SLURM's order for a waiting job: its id, its partition, its priority."""
    return [-int(row[2]), *map(int, re.findall(r"\d+", row[0]))]


def _from_squeue(job: QueuedJob) -> JobState:
    # The start that squeue shows for a held job is its begin time.
    waits = parse_state(job.state) in PENDING and not clean_reason(job.reason).startswith(STARTED_BY_A_PERSON)
    return JobState(
        job_id=job.job_id,
        state=parse_state(job.state),
        nodes=job.nodes,
        reason=clean_reason(job.reason),
        start=parse_start(job.start) if waits else "",
        run=job.run,
        script=script_of(job.job_id, job.script),
    )


def _from_sacct(line: str) -> list[JobState]:
    """Return the job of a line, or the elements of an array that never started: `7_[2-5,9%2]`."""
    ids, state, code, nodes, command = [*line.split("|", 4), "", "", "", ""][:5]
    nodes = "" if nodes.strip() == "None assigned" else nodes.strip()
    known = JobState(
        job_id="",
        state=parse_state(state),
        nodes=nodes,
        exit_code=parse_exit(code),
        run=parse_run(command.replace("--comment=", " ")),
    )
    script = command[command.rfind(" /") + 1 :].strip()
    elements = re.fullmatch(r"(\d+_\[[\d,-]+)(?:%\d+)?\]", ids.strip())
    return [
        replace(known, job_id=job_id, script=script_of(job_id, script))
        for job_id in (expand(f"{elements[1]}]") if elements else [ids.strip()])
    ]
