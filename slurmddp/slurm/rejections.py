"""Explain SLURM's refusals, and recognize the errors after which the same request may succeed; pure.

Messages always show SLURM's own sentences; the hints in this module say what to do.
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
    r"|Job update not available right now, the DB index is being set, try again in a bit(?: for job \S+)?)"
    r"(?: \([^)]*\))?\.?$",
    re.IGNORECASE | re.MULTILINE,
)
"""Matches errors after which a retry may succeed, at the end of a line: a site's messages may quote them."""
_UNKNOWN_OPTION = r"(?:unrecogni[sz]ed|unknown|invalid|no such) (?:options?|arguments?)"
_VERDICT = re.compile(r"^.*(?:submission failed|allocation failure): .*$", re.IGNORECASE | re.MULTILINE)
"""Matches the last line of an sbatch that failed; the site's own programs may print lines before it."""

_HINTS: tuple[tuple[str, str], ...] = (
    # A job_submit plugin may refuse a job with a text of its own and SLURM's "Unspecified error".
    (
        r"(?s)error: (?!batch job submission).*submission failed: unspecified error|cli_filter",
        "A rule of the site refuses the job; the lines before SLURM's own lines give the reason.",
    ),
    (
        rf"{_UNKNOWN_OPTION}:? '?--(?:parsable|test-only)",
        "slurmddp sends this option itself, and this sbatch does not know it: it may be the site's own "
        "program. Put SLURM's sbatch before it on PATH.",
    ),
    (
        r"job array|array.*not (?:allowed|permitted|supported)",
        "If the site accepts no job arrays, use submitter=submitit: it submits one job for each point of a "
        "sweep.",
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
        "Name an account that you may use with account=; `sacctmgr show associations user=$USER` "
        "lists your accounts.",
    ),
    (
        r"reservation",
        "Name a reservation that you may use now with `reservation` in the cluster file; "
        "`scontrol show reservation` lists reservations.",
    ),
    (
        r"feature",
        "No node has this feature: correct `constraint` in the cluster file; `sinfo -o '%P %f'` lists "
        "features.",
    ),
    (
        r"licen[sc]e",
        "Correct `licenses` under `sbatch:` in the cluster file; `scontrol show licenses` lists the valid "
        "names.",
    ),
    (
        r"invalid qos|qos.*(?:not permitted|required)",
        "Choose another qos=; `sacctmgr show qos` lists the valid names.",
    ),
    (
        r"invalid partition|partition.*(?:not available|inactive|down)",
        "Choose another partition=; `sinfo -s` lists the partitions.",
    ),
    (
        r"configuration source|slurm\.conf",
        "This machine has SLURM's programs, but belongs to no cluster: go to a login node, start a SLURM "
        "here with `slurmddp sandbox up`, or train here with launcher=local.",
    ),
    (
        r"--segment=\d+ does not fit",
        "The sum of nodes and spare nodes must be a multiple of `segment` in the cluster file: change nodes= "
        "or spare_nodes=.",
    ),
    (
        r"--?requeue'? doesn't allow an argument|requested operation not supported on this system",
        "If the cluster file has `requeue: expedite` under `sbatch:`, remove it: expedited requeues need "
        "SLURM 25.11 and a site that allows them (SlurmctldParameters=enable_expedited_requeue).",
    ),
    (
        r"wckey",
        "This site asks for a workload key: put `wckey: ...` under `sbatch:` in the cluster file.",
    ),
    (
        r"generic resource|gres|invalid.*gpu",
        "The site has other names for its GPUs: set gpu_request (gres, gpus-per-node or none) and gpu_type "
        "in the cluster file; `sinfo -o '%P %G'` shows what the nodes offer.",
    ),
    (
        r"memory specification|memory required|--mem",
        "Change mem_gb=. If the site accepts no --mem, set `mem_request: none` or `mem_request: mem-per-cpu` "
        "in the cluster file.",
    ),
    (
        r"requested node configuration is not available|node count specification|more processors requested",
        "No node that is up has so many GPUs or CPUs, or so much memory: compare gpus_per_node, "
        "cpus_per_node and mem_gb with `sinfo -o '%P %D %t %c %m %G'`. A node may reserve CPUs and memory "
        "for the system (`scontrol show node`: CPUEfctv, MemSpecLimit). With "
        "hint=nomultithread a job gets one CPU of each core.",
    ),
    # The pattern excludes "and/or time limits", which SLURM prints for any limit of an account.
    (
        r"(?<!and/or )time limit",
        "Set a shorter time_limit=; `sinfo -o '%P %l'` shows the longest of each partition.",
    ),
    (
        r"temporarily unable to accept|job queue full|maxjobcount limit",
        "SLURM has as many jobs as it can hold (MaxJobCount, which also counts jobs that ended minutes ago): "
        "run the command again later, or submit fewer jobs at once.",
    ),
    (
        r"job violates|policy|limit.*reached|maxsubmit",
        "A limit of your account or QOS is reached: wait until your other jobs have ended, ask for fewer "
        "nodes or less time, or use another qos=.",
    ),
    (
        r"authentication|munge|protocol",
        "SLURM does not accept this machine: run the command on a login node.",
    ),
    (
        r"talking to the database",
        "SLURM's accounting (slurmdbd) does not answer. Run the command again once `sacct` works.",
    ),
    (
        r"unable to contact|gave no answer within|socket timed out|connection refused"
        r"|unexpected message received",
        "SLURM's controller (slurmctld) does not answer. Run the command again once `scontrol ping` shows it "
        "UP.",
    ),
    (r"invalid job id", "SLURM has no job with this id, or has forgotten it minutes after its end."),
    # The first pattern matches refusals about nodes and partitions, the second refusals about a job of
    # another user.
    (r"slurm_load_(?!job).*denied", "This site shows such facts only to its staff (PrivateData)."),
    (r"access.*denied|permission denied", "SLURM allows this only to the owner of the job."),
)
"""Patterns of SLURM's sentences, each with what to do; the first pattern that matches counts."""


def is_transient(text: str) -> bool:
    """Return whether SLURM's output shows a passing error, so that the same command may succeed later."""
    # Only the last line of sbatch counts: a site's own lines before it may show errors of other programs.
    verdicts = _VERDICT.findall(text)
    if verdicts:
        text = verdicts[-1]
    return _TRANSIENT.search(text) is not None


def hint_for(text: str) -> str:
    """Return a hint about what to do after an error of SLURM; a general sentence for an unknown error."""
    for pattern, hint in _HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return hint
    return "These are SLURM's own words; the site's documentation or support may explain them."
