"""Parse the output of SLURM's commands; pure, used on the login side and in the batch step."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_SUBMIT_LINE = " SubmitLine="
"""The key of sbatch's command line in the output of `scontrol show job`; some versions omit the line."""
_FACT = re.compile(r"(?:^|\s)(\w+)(?:=| += )(\S*)")
_ROW = re.compile(r"([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*?)\|(/.*|[^|]*)")
"""Matches a row that `queue_command` prints; its next-to-last column, the comment, may contain bars."""


class QueuedJob(NamedTuple):
    """A job, or an element of an array, as squeue shows it."""

    job_id: str
    state: str
    nodes: str
    reason: str
    start: str
    comment: str
    script: str
    """The path of the batch script, with its arguments before SLURM 24.11."""

    @property
    def number(self) -> str:
        """The id of the job, or, for an element of an array, the id of the array."""
        return self.job_id.partition("_")[0]

    @property
    def run(self) -> str:
        """The run that the job's token names; empty without a token."""
        # Earlier versions of slurmddp wrote the token into the job's comment.
        return parse_run(self.script) or parse_run(self.comment)


def queue_command(*selection: str) -> list[str]:
    """Return the squeue command whose output `parse_queue` reads; it also lists jobs that ended recently."""
    states = ["--noheader", "--all", "--array", "--states=all"]
    return ["squeue", *states, *selection, "-o", "%i|%T|%N|%r|%S|%k|%o"]


def parse_queue(text: str) -> list[QueuedJob]:
    """Return the jobs in the output of `queue_command`; ignore other lines, such as a site's banner."""
    rows = filter(None, map(_ROW.fullmatch, text.splitlines()))
    return [QueuedJob(*map(str.strip, row.groups())) for row in rows]


def find_submitted(
    queue: Iterable[QueuedJob],
    script: Path,
    token: str,
    new: Collection[str],
    facts_of: Callable[[str], str],
) -> str | None:
    """Find the job of a submission whose answer was lost; None if it is not in the queue.

    Args:
        queue: the jobs of this account.
        script: the script of the submission.
        token: the argument of the script that only this submission has.
        new: ids of jobs that are not known from earlier submissions. If SLURM does not show the arguments of
            scripts, a job in `new` with the same script is taken for the job of the submission.
        facts_of: returns what `scontrol show job` prints of a job; empty if SLURM does not know the job.
    """
    unrecorded = None
    # All elements of an array have the same number, so their facts are queried only once.
    facts_of = lru_cache(maxsize=None)(facts_of)
    for job in queue:
        if token in job.script.split():
            return job.number
        if not _is_same_file(job.script, str(script)):
            continue

        # squeue of SLURM 24.11 and later shows a script without its arguments, but scontrol may show them.
        facts = facts_of(job.number)
        if token in facts.split():
            return job.number
        # SLURM 24.11 shows the arguments nowhere, so a new job with this script is taken for the submitted
        # job.
        if facts and _SUBMIT_LINE not in facts and job.number in new:
            unrecorded = job.number

    return unrecorded


def _is_same_file(path: str, other: str) -> bool:
    """Return whether two paths lead to the same file and have the same last two components."""
    # Batch scripts of different runs have different folders, so for most paths the text decides, without a
    # slow access to the file system.
    if path.split("/")[-2:] != other.split("/")[-2:]:
        return False
    return os.path.realpath(path) == os.path.realpath(other)


def parse_facts(text: str) -> dict[str, str]:
    """Return the `Key=value` pairs in the output of `scontrol show`; a value ends at its first blank.

    If a key is repeated, its first value is returned.
    """
    facts: dict[str, str] = {}
    for key, value in _FACT.findall(text):
        facts.setdefault(key, value)
    return facts


def parse_time(text: str) -> float | None:
    """Return the epoch seconds of a local time such as `2026-03-01T10:00:00`; None for `Unknown` or `N/A`."""
    match = re.match(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)", text)
    if match is None:
        return None

    year, month, day, hour, minute, second = map(int, match.groups())
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


def parse_job_id(stdout: str) -> str | None:
    """Return the job id in the output of `sbatch --parsable`; None without an id."""
    # A site's sbatch may print a banner before or after the id.
    for line in reversed(stdout.splitlines()):
        match = re.fullmatch(r"(\d+)(?:;\S+)?", line.strip())
        match = match or re.fullmatch(r"Submitted batch job (\d+)(?: on cluster \S+)?", line.strip())
        if match:
            return match[1]
    return None


def parse_run(text: str) -> str:
    """Return RUN of a token `slurmddp:RUN:DIGITS` among a script's arguments; empty without such a token."""
    match = re.search(r"(?:^|\s)slurmddp:([^:\s]+):[0-9a-f]{12}(?:\s|$)", text)
    return match[1] if match else ""


def parse_test_start(text: str) -> str:
    """Return a clause with the start that `sbatch --test-only` expects for a job; empty if it gives none.

    An example is `at 2026-03-01 10:00:00 with 8 processors on nodes n1`.
    """
    # The pattern allows the word that SLURM 26.05 puts between the time and `using`.
    match = re.search(r"to start at (\S+)(?: \w+)? using (\d+ processors on nodes \S+)", text)
    if match is None:
        return ""
    return f"at {match[1].replace('T', ' ')} with {match[2]}"
