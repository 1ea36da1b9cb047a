"""Explain SLURM's refusals, and recognise the errors that a second try may cure; pure.

Messages always show SLURM's own words; these sentences add what to do.
"""

from __future__ import annotations

import re

_TRANSIENT = re.compile(
    r"(?:^|: |error: )(?:Unable to contact slurm controller|Zero Bytes were transmitted or received"
    r"|Socket timed out(?: on send/recv operation)?|Unexpected message received"
    r"|Slurm temporarily unable to accept job(?:, sleeping and retrying)?"
    r"|Slurm backup controller in standby mode"
    r"|Transport endpoint is not connected|Connection (?:refused|reset by peer|timed out)"
    r"|Resource temporarily unavailable|Unable to create job record, try again"
    r"|Job update not available right now, the DB index is being set, try again in a bit for job \S+)"
    r"(?: \([^)]*\))?\.?$",
    re.IGNORECASE | re.MULTILINE,
)
"""Whole sentences of SLURM and the system at the end of a line; a site's sentences may hold their words."""
_UNKNOWN_OPTION = r"(?:unrecogni[sz]ed|unknown|invalid|no such) (?:options?|arguments?)"
_VERDICT = re.compile(r"^.*(?:submission failed|allocation failure): .*$", re.IGNORECASE | re.MULTILINE)
"""The line with which sbatch ends; the lines before may be a site's own."""

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"(?s)error: (?!batch job submission).*submission failed: unspecified error|cli_filter",
        "A rule of the site refuses the job; the lines before SLURM's own say why.",
    ),
    (
        rf"{_UNKNOWN_OPTION}:? '?--(?:parsable|test-only)",
        "slurmddp sends this option itself, and this sbatch does not know it: it may be the site's own "
        "program. Put SLURM's sbatch before it on PATH.",
    ),
    (
        r"job array|array.*not (?:allowed|permitted|supported)",
        "Where the site takes no job arrays, submitter=submitit submits one job for each point of a sweep.",
    ),
    (
        rf"{_UNKNOWN_OPTION}|invalid --[a-z]|dependency problem",
        "Correct the option under `sbatch:` in the cluster file.",
    ),
    (
        r"invalid node name",
        "Correct `nodelist` or `exclude` under `sbatch:` in the cluster file; `sinfo -N` lists the nodes.",
    ),
    (
        r"invalid account|account.*partition combination|no account",
        "Name an account that you may use with account=; `sacctmgr show associations user=$USER` lists them.",
    ),
    (
        r"reservation",
        "Name one that you may use now with `reservation` in the cluster file; "
        "`scontrol show reservation` lists them.",
    ),
    (
        r"feature",
        "No node has it: correct `constraint` in the cluster file; `sinfo -o '%P %f'` lists the features.",
    ),
    (
        r"licen[sc]e",
        "Correct `licenses` under `sbatch:` in the cluster file; `scontrol show licenses` lists them.",
    ),
    (r"invalid qos|qos.*(?:not permitted|required)", "Choose another qos=; `sacctmgr show qos` lists them."),
    (
        r"invalid partition|partition.*(?:not available|inactive|down)",
        "Choose another partition=; `sinfo -s` lists them.",
    ),
    (
        r"configuration source|slurm\.conf",
        "SLURM's programs are here, but no SLURM: go to a login node, start one with `slurmddp sandbox up`, "
        "or train here with launcher=local.",
    ),
    (
        r"wckey",
        "This site asks for a workload key: put `wckey: ...` under `sbatch:` in the cluster file.",
    ),
    (
        r"generic resource|gres|invalid.*gpu",
        "The site names its GPUs otherwise: set gpu_request (gres, gpus-per-node or none) and gpu_type "
        "in the cluster file; `sinfo -o '%P %G'` shows what the nodes offer.",
    ),
    (
        r"memory specification|memory required|--mem",
        "Change mem_gb=. Where the site takes no --mem, say `mem_request: none` in the cluster file, or "
        "`mem_request: mem-per-cpu`.",
    ),
    (
        r"requested node configuration is not available|node count specification|more processors requested",
        "No node that is up has that much: compare gpus_per_node, cpus_per_node and mem_gb with "
        "`sinfo -o '%P %D %t %c %m %G'`, without what nodes keep for the system (`scontrol show node`: "
        "CPUEfctv, MemSpecLimit). With hint=nomultithread a job gets one CPU of each core.",
    ),
    # A policy's refusal ends with "and/or time limits", whatever the limit is.
    (
        r"(?<!and/or )time limit",
        "Ask for less time with time_limit=; `sinfo -o '%P %l'` shows what is allowed.",
    ),
    (
        r"job violates|policy|limit.*reached|maxsubmit",
        "A limit of your account or QOS is reached: wait for jobs to end, ask for less, or use another qos=.",
    ),
    (r"authentication|munge|protocol", "SLURM does not accept this machine: submit from a login node."),
    (
        r"talking to the database",
        "SLURM's accounting does not answer: try again in a minute; `sacct` shows if it is back.",
    ),
    (
        r"temporarily unable to accept",
        "The site has as many jobs as SLURM keeps (MaxJobCount, with jobs that ended minutes ago): try again "
        "later, or submit fewer at once.",
    ),
    (
        r"unable to contact|gave no answer within|socket timed out|connection refused"
        r"|unexpected message received",
        "SLURM's controller does not answer: try again in a minute; `scontrol ping` shows if it is back.",
    ),
    (r"invalid job id", "SLURM does not know that job, or has forgotten it."),
    (r"slurm_load_(?!job).*denied", "This site shows that to its staff only (PrivateData)."),
    (r"access.*denied|permission denied", "SLURM allows that only to the owner of the job."),
)


def is_transient(text: str) -> bool:
    """Return whether the same request may succeed in a moment."""
    verdicts = _VERDICT.findall(text)
    return _TRANSIENT.search(verdicts[-1] if verdicts else text) is not None


def hint_for(text: str) -> str:
    """Return what to do about SLURM's words; a general sentence for unknown words."""
    for pattern, hint in _HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return hint
    return "These are SLURM's own words; the site's documentation or support can tell more."
