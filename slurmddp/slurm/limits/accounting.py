"""Compare a job with the accounts, qualities of service and limits that a site enforces; pure.

sbatch queues a job over such a limit, and the job then waits with a reason that names only the limit's kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurmddp.errors import near_matches
from slurmddp.slurm.limits.finding import Finding, too_long
from slurmddp.slurm.units import parse_slurm_limit
from slurmddp.spec import Job

QOS_FIELDS = "Name,MaxWall,MaxTRES,MaxSubmitJobsPerUser"
ASSOCIATION_FIELDS = "Account,Partition,QOS,DefaultQOS,MaxWall,MaxTRES,MaxSubmitJobs"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one quality of service or one account; None and a missing resource stand for no limit."""

    source: str
    """`QOS 'short'` or `account 'physics'`."""
    max_wall_min: int | None = None
    max_tres: Mapping[str, int] = field(default_factory=dict)
    """Most of each resource for one job: `node`, `cpu`, `gres/gpu`."""
    max_submit: int | None = None
    """Most jobs of one user in the queue."""


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account that the person may use, perhaps only in one partition."""

    account: str
    partition: str
    qualities: tuple[str, ...]
    default_qos: str
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The facts of a site's accounting."""

    enforced: frozenset[str]
    """Of AccountingStorageEnforce: `associations`, `limits`, `qos`, `safe`."""
    qualities: Mapping[str, Limits]
    associations: tuple[Association, ...]
    queued: Counter[str] = field(default_factory=Counter)
    """The person's jobs in the queue, by `account NAME` and by `QOS NAME`."""


def parse_qualities(text: str) -> dict[str, Limits]:
    """Return the limits of each quality of service in the output of `sacctmgr show qos`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == QOS_FIELDS.count(",")]
    return {name: _limits(f"QOS {name!r}", *cells) for name, *cells in rows}


def parse_associations(text: str) -> tuple[Association, ...]:
    """Return the accounts of one person in the output of `sacctmgr show associations`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == ASSOCIATION_FIELDS.count(",")]
    return tuple(
        Association(
            account=account,
            partition=partition,
            qualities=tuple(name for name in qualities.split(",") if name),
            default_qos=default,
            limits=_limits(f"account {account!r}", *cells),
        )
        for account, partition, qualities, default, *cells in rows
    )


def parse_queued(text: str) -> Counter[str]:
    """Return the number of jobs by account and by QOS in the output of `squeue -o %a|%q`."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 1]
    return Counter(source for account, qos in rows for source in (f"account {account!r}", f"QOS {qos!r}"))


def parse_enforced(value: str) -> frozenset[str]:
    """Return the words of AccountingStorageEnforce; `safe` and `qos` include what they imply."""
    words = {word for word in value.lower().split(",") if word not in ("", "none", "(null)")}
    if "all" in words:
        words = {"associations", "limits", "qos", "safe"}
    words |= {"limits"} if "safe" in words else set()
    return frozenset(words | ({"associations"} if words & {"limits", "qos"} else set()))


def check(job: Job, site: Accounting, partition_qos: Sequence[str] = (), *, jobs: int = 1) -> list[Finding]:
    """Return a finding for each account, QOS or limit that would keep `job` from starting.

    Args:
        job: the job.
        site: the facts of the accounting.
        partition_qos: the QOS of each partition that the job may run in.
        jobs: the number of such jobs, the elements of an array.
    """
    found = list(_names(job, site))
    if found or "limits" not in site.enforced:
        return found
    own = next((one for one in site.associations if job.cluster.account in (None, one.account)), None)
    qos = job.cluster.qos or (own.default_qos if own else "")
    sources = [site.qualities[name] for name in (qos, *partition_qos) if name in site.qualities]
    sources += [own.limits] if own and job.cluster.account else []
    return [one for limits in sources for one in _over(job, limits, site.queued, jobs)]


def _names(job: Job, site: Accounting) -> Iterator[Finding]:
    accounts = [one.account for one in site.associations]
    account, qos = job.cluster.account, job.cluster.qos
    if account and "associations" in site.enforced and account not in accounts:
        yield Finding(
            key="account",
            value=account,
            site=f"your accounts here are {', '.join(dict.fromkeys(accounts)) or 'none'}",
            remedy=near_matches(account, accounts, else_all=False) or "Name one of them with account=.",
        )
        return
    if not qos or "qos" not in site.enforced:
        return
    usable = {
        name for one in site.associations if account in (None, one.account) for name in one.qualities
    } & site.qualities.keys()
    if qos not in usable:
        yield Finding(
            key="qos",
            value=qos,
            site=f"your account may use {', '.join(sorted(usable)) or 'no QOS'}",
            remedy=near_matches(qos, usable, else_all=False) or "Name one of them with qos=.",
        )


def _over(job: Job, limits: Limits, queued: Mapping[str, int], jobs: int) -> Iterator[Finding]:
    size = job.resources
    yield from too_long(size.time_limit_min, limits.max_wall_min, limits.source, "MaxWall")
    asked = {
        "node": ("nodes", size.all_nodes),
        "cpu": ("cpus_per_node", size.all_nodes * (size.cpus_per_node or 1)),
        "gres/gpu": ("gpus_per_node", size.all_nodes * size.gpus_per_node),
    }
    for resource, (key, count) in asked.items():
        most = limits.max_tres.get(resource)
        if most is not None and count > most:
            in_all = "" if key == "nodes" else f" on {size.all_nodes} nodes"
            yield Finding(
                key=key,
                value=f"{count // size.all_nodes if in_all else count}{in_all}",
                site=f"{limits.source} gives a job at most {most} (MaxTRES {resource})",
                remedy="Ask for less, or use another qos=.",
            )
    present = queued.get(limits.source, 0)
    if limits.max_submit is not None and present + jobs > limits.max_submit:
        more = f", and the array has {jobs} more" if jobs > 1 else ""
        yield Finding(
            key="qos" if limits.source.startswith("QOS") else "account",
            value=re.sub(r"^\w+ '|'$", "", limits.source),
            site=f"{limits.source} limits your jobs in the queue to {limits.max_submit} (MaxSubmitJobs), "
            f"and you have {present}{more}",
            remedy="Wait until a job ends, or use another qos=.",
        )


def _limits(source: str, wall: str, tres: str, submit: str) -> Limits:
    amounts = dict(re.findall(r"([\w/:]+)=(\d+)(?![\w.])", tres))
    return Limits(
        source=source,
        max_wall_min=parse_slurm_limit(wall) if wall else None,
        max_tres={name: int(amount) for name, amount in amounts.items()},
        max_submit=int(submit) if submit.isdigit() else None,
    )
