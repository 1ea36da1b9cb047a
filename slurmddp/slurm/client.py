"""The only place that runs SLURM's commands on the login side.

Text formats only (the JSON of these commands changes with every release), chosen explicitly, in an
environment free of SQUEUE_FORMAT and the like and of the traces of a job that this process may be part of.
An error of a query is an error, never a state.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from slurmddp.environments.hostlist import expand
from slurmddp.environments.scrub import scrub
from slurmddp.errors import SlurmError, near_matches
from slurmddp.host.process import OpenFiles
from slurmddp.slurm.command_output import (
    SUBMIT_LINE,
    parse_facts,
    parse_job_id,
    parse_run,
    parse_test_start,
)
from slurmddp.slurm.job_script import script_of
from slurmddp.slurm.limits import accounting
from slurmddp.slurm.limits.nodes import SINFO_FORMAT, NodeGroup, parse_groups, without_reserved
from slurmddp.slurm.limits.partitions import Partition, parse_partitions
from slurmddp.slurm.limits.site import Site
from slurmddp.slurm.rejections import hint_for, is_transient
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
_SILENT_S = 3.0
"""Seconds before a wait is announced."""
IDS_PER_QUERY = 200
"""Job ids of one squeue or scancel command, at most."""
_NOT_IN_TURN = ("BeginTime", "Dependency", "JobHeld")
"""Beginnings of the reasons of waiting jobs at which SLURM does not look."""
_FINAL = re.compile(": fatal: |Problem talking to the database")
"""A line with which a command ends: slurmctld or slurmdbd is away."""
_DENIED = re.compile("access/permission denied", re.IGNORECASE)
_OVER = re.compile("invalid job id|already completing or completed", re.IGNORECASE)
"""An error of scancel about a job that is over."""
_Shown = TypeVar("_Shown")


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
        self._say = say

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
            self._say(f"{unanswered.message} Looking for the job in {delay:g} s, then trying again.")
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
            self._say(
                f"The job does not avoid the nodes that failed recently ({' '.join(options)}): "
                f"SLURM would refuse it then. {refusal.message}"
            )
        return False

    def _refusal(self, script: Path, options: Sequence[str] = ()) -> SlurmError | None:
        try:
            self._run(["sbatch", "--test-only", *options, str(script)])
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
            done = self._complete(["sbatch", "--test-only", file.name])
        return parse_test_start(done.stderr)

    def _submit_once(
        self, command: list[str], script: Path, token: str, known: Collection[str | None]
    ) -> str:
        stdout = self._run(command)
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
        command = ["squeue", "--noheader", "--all", "--states=all", "--user", _user(), "-o", "%i|%T|%o"]
        unrecorded = None
        for line in self._run(command, limit_s=self._timeout_s).splitlines():
            shown_id, state, shown = [*line.split("|", 2), "", ""][:3]
            job_id = shown_id.partition("_")[0]  # of an array `7_[0-9]`
            if token in shown.split():
                return job_id
            if not shown.strip().endswith(f"/{script.parent.name}/{script.name}"):
                continue

            # squeue of SLURM 24.11 and later shows a script without its arguments.
            submission = self._submission_of(job_id)
            if token in submission.split():
                return job_id
            # SLURM 24.11 shows the arguments nowhere.
            is_live = parse_state(state) not in TERMINAL
            if SUBMIT_LINE not in submission and is_live and job_id not in known:
                unrecorded = job_id
        return unrecorded

    def _submission_of(self, job_id: str) -> str:
        """Return what `scontrol` shows of a job; empty if SLURM has forgotten it."""
        try:
            return self._run(["scontrol", "-o", "show", "job", job_id])
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
        command = ["squeue", "--noheader", "--all", "--array", "--states=all", "-o", "%i|%T|%N|%r|%S|%k|%o"]
        try:
            lines = self._run([*command, "--jobs", ",".join(job_ids)])
        except SlurmError as error:
            if "invalid job id" in error.message.lower():
                return {}
            raise
        return {job.job_id: job for job in map(_from_squeue, lines.splitlines()) if job.job_id in job_ids}

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
            lines = self._run([*command, "-o", f"{form},SubmitLine"])
        except SlurmError as error:
            if "accounting storage is disabled" in error.message.lower():
                return {}
            if "invalid field" not in error.message.lower():
                raise
            lines = self._run([*command, "-o", form])  # SLURM before 21.08 has no SubmitLine.
        found = [job for line in lines.splitlines() for job in _from_sacct(line)]
        return {job.job_id: job for job in found if job.job_id in job_ids}

    def jobs_of_each(self, folders: Sequence[Path]) -> dict[Path, dict[str, JobState]]:
        """Return this account's jobs that train in each folder, by id; their batch scripts say so.

        SLURM is asked once for all folders.
        """
        command = ["squeue", "--noheader", "--all", "--array", "--states=all", "--user", _user()]
        # A submission waits for the answer.
        lines = self._run([*command, "-o", "%i|%T|%o"], limit_s=self._timeout_s).splitlines()
        found: dict[Path, dict[str, JobState]] = {folder: {} for folder in folders}
        by_name: dict[str, list[Path]] = {}
        for folder in found:
            by_name.setdefault(folder.name, []).append(folder)
        for line in (line for line in lines if line.count("|") >= 2):
            job_id, state, script = (word.strip() for word in line.split("|", 2))
            for folder in _folders_of(job_id, script, by_name):
                found[folder][job_id] = JobState(job_id=job_id, state=parse_state(state))
        return found

    def jobs_ahead(self, job_id: str) -> int | None:
        """Return how many waiting jobs of a job's partition SLURM looks at earlier.

        These are the jobs of a higher priority. Among equals, as the elements of an array are, they are the
        jobs with lower ids. Jobs that are held, or wait for a time or another job, are not counted. None if
        the job is one of these, or squeue does not show it. A site may hide the jobs of others.
        """
        command = ["squeue", "--noheader", "--all", "--array", "--states=PENDING", "-o", "%i|%P|%Q|%r"]
        lines = self._run(command).splitlines()
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
            text = self._run(["scontrol", "-o", "show", "job", job_id]).strip()
        except SlurmError as error:
            if "invalid job id" in error.message.lower():
                return None
            raise
        return parse_facts(text) if len(re.findall(r"^JobId=", text, re.MULTILINE)) == 1 else {}

    def cancel(self, *job_ids: str) -> None:
        """End jobs for good; jobs that are over are left out."""
        for start in range(0, len(job_ids), IDS_PER_QUERY):
            try:
                self._run(["scancel", *job_ids[start : start + IDS_PER_QUERY]])
            except SlurmError as error:
                told = [line for line in error.message.splitlines() if "error:" in line]
                if not told or not all(map(_OVER.search, told)):
                    raise

    def max_array_size(self) -> int:
        """Return how many elements an array may have: MaxArraySize bounds the index.

        0: there are no arrays here, or the site does not say. Raises SlurmError without an answer.
        """
        try:
            text = parse_facts(self._run(["scontrol", "show", "config"])).get("MaxArraySize", "")
        except _NotAnswered:
            raise
        except SlurmError:
            return 0
        return int(text) if text.isdigit() else 0

    def partitions(self) -> dict[str, Partition]:
        """Return the partitions and their limits, by name."""
        # Hidden ones too: sbatch takes them.
        return parse_partitions(self._run(["scontrol", "--all", "-o", "show", "partition"]))

    def cluster_name(self) -> str:
        """Return the name that SLURM's configuration gives this cluster; raises SlurmError."""
        name = parse_facts(self._run(["scontrol", "show", "config"])).get("ClusterName", "")
        if not name:
            raise SlurmError(
                "scontrol show config names no cluster.", hint="Look for ClusterName in slurm.conf."
            )
        return name

    def describe(self) -> Site:
        """Return partitions, nodes, settings and accounting of this SLURM; raises SlurmError.

        What the site shows to its staff only (`PrivateData`) is left out, with a line about it.
        """
        config = parse_facts(self._run(["scontrol", "show", "config"]))
        partitions = self._if_shown(self.partitions, "partitions") or {}
        groups = self._if_shown(self._groups, "nodes") or ()
        site = Site(partitions=partitions, groups=groups, config=config)
        return replace(site, accounting=self._accounting(config)) if site.has_accounting else site

    def _groups(self) -> tuple[NodeGroup, ...]:
        groups = parse_groups(self._run(["sinfo", "--noheader", "--all", "--exact", "-o", SINFO_FORMAT]))
        nodes = self._run(["scontrol", "--all", "-o", "show", "nodes"]).splitlines()
        return without_reserved(groups, [parse_facts(line) for line in nodes])

    def _if_shown(self, ask: Callable[[], _Shown], what: str) -> _Shown | None:
        """Return the answer to a query; None if SLURM gives it to the site's staff only."""
        try:
            return ask()
        except SlurmError as error:
            if _DENIED.search(error.message) is None:
                raise
            self._say(f"{error.message} The {what} of this site are left out of the comparison.")
            return None

    def _accounting(self, config: Mapping[str, str]) -> accounting.Accounting | None:
        enforced = accounting.parse_enforced(config.get("AccountingStorageEnforce", ""))
        if shutil.which("sacctmgr") is None:
            return None
        ask = ["sacctmgr", "--noheader", "--parsable2", "show"]
        name = pwd.getpwuid(os.getuid()).pw_name
        here: list[str] = []
        if cluster := config.get("ClusterName"):  # One database may serve several clusters.
            here.append(f"cluster={cluster}")
        try:
            qualities = self._run([*ask, "qos", f"format={accounting.QOS_FIELDS}"])
            ask_who = [*ask, "associations", *here, "where"]
            own = self._run([*ask_who, f"user={name}", f"format={accounting.ASSOCIATION_FIELDS}"])
            accounts = self._run([*ask_who, "user=", f"format={accounting.ACCOUNT_FIELDS}"])
            default = self._run([*ask, "user", name, "format=DefaultAccount"])
            queued = self._run(["squeue", "--noheader", "--all", "--array", "--user", _user(), "-o", "%a|%q"])
        except SlurmError as error:
            self._say(f"{error.message} Limits of accounts and QOS are not compared.")
            return None
        return accounting.Accounting(
            enforced=enforced,
            qualities=accounting.parse_qualities(qualities),
            associations=accounting.parse_associations(own, accounts),
            default_account=default.strip(),
            queued=accounting.parse_queued(queued),
        )

    def _run(self, command: list[str], limit_s: float | None = None) -> str:
        """Run one command and return its standard output; its error output is in the SlurmError otherwise."""
        return self._complete(command, limit_s).stdout

    def _complete(self, command: list[str], limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run one command to its end.

        Args:
            command: the command.
            limit_s: seconds to wait; None: those of a submission or a query.
        """
        if (clusters := os.environ.get("SLURM_CLUSTERS", "")) == "all" or "," in clusters:
            raise SlurmError(
                f"SLURM_CLUSTERS={clusters} names several clusters, and a job's number is one cluster's.",
                hint="Say `export SLURM_CLUSTERS=NAME` with one of them.",
            )
        if limit_s is None:
            limit_s = self._timeout_s if command[0] == "sbatch" else min(self._timeout_s, QUERY_TIMEOUT_S)
        try:
            done = self._answer(command, limit_s)
        except FileNotFoundError:
            raise SlurmError(
                f"There is no {command[0]} on this machine's PATH.",
                hint="Go to a login node of the cluster, or start a SLURM here with `slurmddp sandbox up`.",
            ) from None
        except subprocess.TimeoutExpired as error:
            # sbatch waits and tries again by itself, for instance while the site has too many jobs.
            message = " ".join((error.stderr or b"").decode(errors="replace").split())
            quoted = f" It said: {message.removesuffix('.')}." if message else ""
            raise _NotAnswered(
                f"{command[0]} gave no answer within {limit_s:g} s.{quoted}",
                hint=hint_for(message or "unable to contact"),
            ) from None
        if done.returncode == 0:
            return done
        words = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        # The lines before a final one are the tries that led to it.
        words = "\n".join(filter(_FINAL.search, words.splitlines())) or words
        words += "" if words.endswith((".", "!", "?")) else "."  # so that a sentence may follow
        kind = _NotAnswered if is_transient(words) else SlurmError
        hint = " ".join(filter(None, [self._near_options(command[0], words), hint_for(words)]))
        raise kind(f"{command[0]} failed: {words}", hint=hint)

    def _near_options(self, program: str, words: str) -> str:
        """Return the options of `program` at this site that are near to the option it did not recognize."""
        unknown = re.search(r"unrecognized option '--([\w-]+)", words)
        if unknown is None:
            return ""
        try:
            listed = self._run([program, "--help"])  # With the options of the site's own plugins.
        except SlurmError:
            return ""
        options = set(re.findall(r"--([a-z][\w-]+)", listed)) - {unknown[1]}
        return near_matches(unknown[1], options, else_all=False)

    def _answer(self, command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        with subprocess.Popen(
            OpenFiles.with_first(command) if command[0] == "sbatch" else command,
            env=scrub(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            try:
                try:
                    output = process.communicate(timeout=min(_SILENT_S, limit_s))
                except subprocess.TimeoutExpired:
                    if limit_s <= _SILENT_S:
                        raise
                    self._say(f"{command[0]} has not answered yet; waiting up to {limit_s:g} s for it.")
                    output = process.communicate(timeout=limit_s - _SILENT_S)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, *output)


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


def _from_squeue(line: str) -> JobState:
    job_id, state, nodes, reason, start, rest = [*line.split("|", 5), "", "", "", "", ""][:6]
    comment, _, script = rest.rpartition("|")
    # The start that squeue shows for a held job is its begin time.
    waits = parse_state(state) in PENDING and not clean_reason(reason).startswith(STARTED_BY_A_PERSON)
    return JobState(
        job_id=job_id.strip(),
        state=parse_state(state),
        nodes=nodes.strip(),
        reason=clean_reason(reason),
        start=parse_start(start) if waits else "",
        run=parse_run(script) or parse_run(comment),  # Earlier versions put the token into the comment.
        script=script_of(job_id.strip(), script.strip()),
    )


def _from_sacct(line: str) -> list[JobState]:
    """Return the job of a line, or the elements of an array that never started: `7_[2-5,9%2]`."""
    ids, state, code, nodes, command = [*line.split("|", 4), "", "", "", ""][:5]
    exit_code, signal = parse_exit(code)
    nodes = "" if nodes.strip() == "None assigned" else nodes.strip()
    known = JobState(
        job_id="",
        state=parse_state(state),
        nodes=nodes,
        exit_code=exit_code,
        signal=signal,
        run=parse_run(command.replace("--comment=", " ")),
    )
    script = command[command.rfind(" /") + 1 :].strip()
    elements = re.fullmatch(r"(\d+_\[[\d,-]+)(?:%\d+)?\]", ids.strip())
    return [
        replace(known, job_id=job_id, script=script_of(job_id, script))
        for job_id in (expand(f"{elements[1]}]") if elements else [ids.strip()])
    ]


def _user() -> str:
    return str(os.getuid())
