"""Parse the output of SLURM's commands; pure, for the login side and the batch step."""

from __future__ import annotations

import re
import time

SUBMIT_LINE = " SubmitLine="
"""Stands before sbatch's command line in `scontrol show job`, where SLURM shows that."""
_FACT = re.compile(r"(?:^|\s)(\w+)(?:=| += )(\S*)")


def parse_facts(text: str) -> dict[str, str]:
    """Return the `Key=value` pairs of `scontrol show`; of a repeated key the first value, without blanks."""
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
    """Return the job id in the output of `sbatch --parsable`, which a site may have wrapped in a banner."""
    for line in reversed(stdout.splitlines()):
        match = re.fullmatch(r"(\d+)(?:;\S+)?", line.strip())
        match = match or re.fullmatch(r"Submitted batch job (\d+)(?: on cluster \S+)?", line.strip())
        if match:
            return match[1]
    return None


def parse_run(text: str) -> str:
    """Return the run that the token among a script's arguments names, as `sbatch.new_token` writes it."""
    match = re.search(r"(?:^|\s)slurmddp:([^:\s]+):[0-9a-f]{12}(?:\s|$)", text)
    return match[1] if match else ""


def parse_test_start(text: str) -> str:
    """Return what `sbatch --test-only` says of the start of a job, as a clause; empty without such a line."""
    # SLURM 26.05 puts a word between the time and `using`.
    match = re.search(r"to start at (\S+)(?: \w+)? using (\d+ processors on nodes \S+)", text)
    return f"at {match[1].replace('T', ' ')} with {match[2]}" if match else ""
