"""Compare a job with the accounts, qualities of service and limits that a site enforces; pure.

sbatch queues a job that exceeds such a limit. The job then waits, and SLURM's reason names only the kind of
the limit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from slurmddp.near_matches import near_matches
from slurmddp.settings.spec import Job
from slurmddp.slurm.limits.finding import Finding, too_long
from slurmddp.slurm.units import parse_slurm_limit

QOS_FIELDS = "Name,MaxWall,MaxTRES,MaxSubmitJobsPerUser,GrpTRES,Flags"
ASSOCIATION_FIELDS = "Account,Partition,QOS,DefaultQOS,MaxWall,MaxTRES,MaxSubmitJobs,GrpTRES"
ACCOUNT_FIELDS = "Account,User,ParentName,GrpTRES"
"""Columns of sacctmgr for the rows of accounts, whose limits the rows of their users do not repeat."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one quality of service or one account; None, or a missing resource, means no limit."""

    key: str
    """The kind of the limits' owner, as the key that names it in a configuration: `qos` or `account`."""
    name: str
    """The name of the quality of service or the account."""
    max_wall_min: int | None = None
    """The longest time limit of a job, in minutes."""
    max_tres: Mapping[str, int] = field(default_factory=dict)
    """The largest amount of each resource for one job, by SLURM's name of the resource: `node`, `cpu`,
    `gres/gpu`."""
    grp_tres: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """For each resource, the largest amount for all running jobs together, and who sets this limit: the
    owner, or an account above it."""
    max_submit: int | None = None
    """The largest number of jobs that one user may have in the queue."""
    flags: frozenset[str] = frozenset()
    """The flags of a quality of service, such as `PartitionTimeLimit`."""

    @property
    def source(self) -> str:
        """The owner of the limits in the words of a message: `QOS 'short'` or `account 'physics'`."""
        return _owner(self.key, self.name)


@dataclass(frozen=True, kw_only=True)
class Association:
    """SLURM's association: an account that the user may use, in all partitions or in one."""

    account: str
    partition: str
    """The only partition in which the user may use the account; empty for all partitions."""
    qualities: tuple[str, ...]
    """The qualities of service that the user may use with the account."""
    default_qos: str
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The accounts, limits and queued jobs of one user, as a site's accounting shows them."""

    enforced: frozenset[str]
    """The values of AccountingStorageEnforce: `associations`, `limits`, `qos`, `safe`."""
    qualities: Mapping[str, Limits]
    """The limits of each QOS, by its name in lower case, because SLURM ignores the case of such names."""
    associations: tuple[Association, ...]
    default_account: str = ""
    """The account of a job that names no account; empty if it is not known."""
    queued: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of the user's queued jobs, by ("account", name) and by ("qos", name), names in lower case."""


def parse_qualities(text: str) -> dict[str, Limits]:
    """Return the limits of each quality of service, by its name in lower case.

    Args:
        text: the output of `sacctmgr show qos`.
    """
    rows = _rows(text, QOS_FIELDS)
    return {name.lower(): _limits("qos", name, *cells) for name, *cells in rows}


def parse_associations(text: str, accounts: str = "") -> tuple[Association, ...]:
    """Return the associations of one user: the accounts that the user may use.

    Args:
        text: the output of `sacctmgr show associations` for the user.
        accounts: the output of `sacctmgr show associations` for accounts, with their parents and limits.
    """
    groups = {
        account.lower(): (parent.lower(), _shared(_owner("account", account), tres))
        for account, user, parent, tres in _rows(accounts, ACCOUNT_FIELDS)
        if not user
    }
    return tuple(
        Association(
            account=account,
            partition=partition,
            qualities=tuple(name for name in qualities.split(",") if name),
            default_qos=default,
            limits=_within(_limits("account", account, *cells), account.lower(), groups),
        )
        for account, partition, qualities, default, *cells in _rows(text, ASSOCIATION_FIELDS)
    )


def parse_queued(text: str) -> Counter[tuple[str, str]]:
    """Return the number of jobs by account and by QOS in the output of `squeue -o %a|%q`."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 1]
    owners = [owner for account, qos in rows for owner in (("account", account), ("qos", qos))]
    return Counter((key, name.lower()) for key, name in owners)


def parse_enforced(value: str) -> frozenset[str]:
    """Return the values of AccountingStorageEnforce, and further values that they imply (slurm.conf(5))."""
    enforced = {word for word in value.lower().split(",") if word not in ("", "none", "(null)")}
    if "all" in enforced:
        enforced = {"associations", "limits", "qos", "safe"}

    if "safe" in enforced:
        enforced.add("limits")
    if enforced & {"limits", "qos"}:
        enforced.add("associations")
    return frozenset(enforced)


def check(job: Job, site: Accounting, partition_qos: Sequence[str] = (), *, jobs: int = 1) -> list[Finding]:
    """Return a finding for each account, QOS or limit that would keep `job` from starting.

    Args:
        job: the job.
        site: the facts of the accounting.
        partition_qos: the QOS that each partition sets, for the partitions that the job may run in.
        jobs: the number of equal jobs that are submitted together, as elements of an array.
    """
    # SLURM refuses a job with a wrong account or QOS. Then its size need not be compared.
    findings = list(_names(job, site))
    # Without `limits` in AccountingStorageEnforce, SLURM starts jobs of any size.
    if findings or "limits" not in site.enforced:
        return findings

    of_partitions = [site.qualities.get(name.lower()) for name in partition_qos] or [None]
    alternatives = [
        list(_over(job, _in_order(job, site, quality), site.queued, jobs)) for quality in of_partitions
    ]
    # A job may start in any of its partitions, so the partition with the fewest findings decides.
    return min(alternatives, key=len)


def has_flag(job: Job, site: Accounting, flag: str) -> bool | None:
    """Return whether the quality of service of a job has a flag; None if the job's quality is not known."""
    name = _qos_of(job, site)
    if name:
        return name in site.qualities and flag in site.qualities[name].flags

    # The job's quality of service is not known, because SLURM chooses one that the account may use.
    association = _association(job, site)
    possible = association.qualities if association else site.qualities
    known = [site.qualities[quality.lower()] for quality in possible if quality.lower() in site.qualities]
    # If one of these qualities has the flag, the answer depends on SLURM's choice, which no command shows.
    return None if any(flag in quality.flags for quality in known) else False


def _association(job: Job, site: Accounting) -> Association | None:
    """Return the association of a job, preferably one for its partition; None if it is not known."""
    account = (job.cluster.account or site.default_account).lower()
    partitions = (job.cluster.partition or "").split(",")
    usable = [association for association in site.associations if association.account.lower() == account]
    in_partition = [
        association for association in usable if association.partition and association.partition in partitions
    ]
    everywhere = [association for association in usable if not association.partition]
    return next(iter([*in_partition, *everywhere]), None)


def _qos_of(job: Job, site: Accounting) -> str:
    """Return the name of a job's quality of service in lower case; empty if it is not known."""
    if job.cluster.qos:
        return job.cluster.qos.lower()

    association = _association(job, site)
    if association is None:
        return ""
    # If an account has no default quality of service but only one that it may use, SLURM uses that one.
    if not association.default_qos and len(association.qualities) == 1:
        return association.qualities[0].lower()
    return association.default_qos.lower()


def _in_order(job: Job, site: Accounting, of_partition: Limits | None) -> list[Limits]:
    """Return the owners of limits for a job in SLURM's order; if several set one limit, the first counts."""
    quality = site.qualities.get(_qos_of(job, site))
    # The limits of the partition's QOS come first, unless the job's QOS has the flag OverPartQOS.
    sources = [of_partition, quality]
    if quality and "OverPartQOS" in quality.flags:
        sources.reverse()

    association = _association(job, site)
    if association is not None:
        sources.append(association.limits)
    return [limits for limits in sources if limits is not None]


def _names(job: Job, site: Accounting) -> Iterator[Finding]:
    """Yield a finding if the user may not use the account or the quality of service that a job names."""
    account = job.cluster.account
    accounts = [association.account for association in site.associations]
    if account and "associations" in site.enforced and account.lower() not in map(str.lower, accounts):
        yield Finding(
            key="account",
            value=account,
            site=f"your accounts here are {', '.join(dict.fromkeys(accounts)) or 'none'}",
            remedy=near_matches(account, accounts, else_all=False) or "Name one of them with account=.",
        )
        return

    qos = job.cluster.qos
    if not qos or "qos" not in site.enforced:
        return
    usable = {
        name
        for association in site.associations
        if not account or account.lower() == association.account.lower()
        for name in association.qualities
        if name.lower() in site.qualities
    }

    if qos.lower() not in map(str.lower, usable):
        yield Finding(
            key="qos",
            value=qos,
            site=f"your account may use {', '.join(sorted(usable)) or 'no QOS'}",
            remedy=near_matches(qos, usable, else_all=False) or "Name one of them with qos=.",
        )


def _over(
    job: Job, sources: Sequence[Limits], queued: Mapping[tuple[str, str], int], jobs: int
) -> Iterator[Finding]:
    """Yield a finding for each limit that a job exceeds.

    Args:
        job: the job.
        sources: the limits that hold for the job; the first that sets a limit counts.
        queued: the person's jobs in the queue, by account and by QOS.
        jobs: the number of equal jobs that are submitted together, as elements of an array.
    """
    size = job.resources
    wall = _first(sources, lambda limits: limits.max_wall_min is not None)
    if wall is not None:
        yield from too_long(size.time_limit_min, wall.max_wall_min, wall.source, "MaxWall")

    demands = {
        "node": ("nodes", size.all_nodes),
        # A job that asks for no CPUs gets at least one CPU on each node.
        "cpu": ("cpus_per_node", size.all_nodes * (size.cpus_per_node or 1)),
        "gres/gpu": ("gpus_per_node", size.all_nodes * size.gpus_per_node),
    }
    for resource, (key, count) in demands.items():
        yield from _over_tres(job, sources, resource, key, count)

    queue = _first(sources, lambda limits: limits.max_submit is not None)
    if queue is not None and queue.max_submit is not None:
        present = queued.get((queue.key, queue.name.lower()), 0)
        if present + jobs > queue.max_submit:
            yield _too_many_jobs(queue, present, jobs)


def _first(sources: Sequence[Limits], sets_limit: Callable[[Limits], bool]) -> Limits | None:
    return next(filter(sets_limit, sources), None)


def _over_tres(job: Job, sources: Sequence[Limits], resource: str, key: str, count: int) -> Iterator[Finding]:
    """Yield a finding if a job asks for more of a resource than one job, or all jobs together, may use.

    Args:
        job: the job.
        sources: the limits that hold for the job; the first that sets a limit counts.
        resource: SLURM's name of the resource.
        key: the key that asks for the resource.
        count: the amount that the whole job asks for.
    """
    of_job = _first(sources, lambda limits: resource in limits.max_tres)
    if of_job is not None and count > of_job.max_tres[resource]:
        site = f"{of_job.source} gives a job at most {of_job.max_tres[resource]} (MaxTRES {resource})"
        yield _too_much(job, key, count, site, "MaxTRES")

    of_all_jobs = _first(sources, lambda limits: resource in limits.grp_tres)
    if of_all_jobs is not None and count > of_all_jobs.grp_tres[resource][0]:
        largest, owner = of_all_jobs.grp_tres[resource]
        site = f"{owner} gives all its jobs at most {largest} together (GrpTRES {resource})"
        yield _too_much(job, key, count, site, "GrpTRES")


def _too_much(job: Job, key: str, count: int, site: str, limit: str) -> Finding:
    value = str(count)
    if key != "nodes":
        nodes = job.resources.all_nodes
        value = f"{count // nodes} on {nodes} nodes"

    return Finding(
        key=key,
        value=value,
        site=site,
        remedy=f"Lower {key}, or use another qos=.",
        limit=limit,
    )


def _too_many_jobs(limits: Limits, present: int, jobs: int) -> Finding:
    site = (
        f"{limits.source} limits your jobs in the queue to {limits.max_submit} (MaxSubmitJobs), "
        f"and you have {present}"
    )
    if jobs > 1:
        site += f", and the array has {jobs} more"

    return Finding(
        key=limits.key,
        value=limits.name,
        site=site,
        remedy="Wait until one of your jobs has ended, or use another qos=.",
        limit="MaxSubmitJobs",
    )


def _rows(text: str, fields: str) -> list[list[str]]:
    """Return the cells of sacctmgr's lines; lines that do not have all `fields` are ignored."""
    return [line.split("|") for line in text.splitlines() if line.count("|") == fields.count(",")]


def _amounts(tres: str) -> dict[str, int]:
    """Return the amount of each resource in a list such as `cpu=64,gres/gpu:a100=8`."""
    # The pattern skips amounts with a unit, such as mem=64G, because no finding compares memory with a TRES.
    return {name: int(amount) for name, amount in re.findall(r"([\w/:]+)=(\d+)(?![\w.])", tres)}


def _shared(source: str, tres: str) -> dict[str, tuple[int, str]]:
    return {name: (amount, source) for name, amount in _amounts(tres).items()}


def _within(
    limits: Limits, account: str, groups: Mapping[str, tuple[str, Mapping[str, tuple[int, str]]]]
) -> Limits:
    """Return the limits of a user in an account, together with the limits of the accounts above.

    Args:
        limits: the user's own limits in the account.
        account: the name of the account in lower case.
        groups: for each account, its parent and its limits for all running jobs together.
    """
    shared = dict(limits.grp_tres)
    visited: set[str] = set()
    while account in groups and account not in visited:
        visited.add(account)
        account, amounts = groups[account]
        for name, limit in amounts.items():
            # SLURM applies the limits of all these accounts, so the smallest one decides.
            shared[name] = min(shared.get(name, limit), limit, key=itemgetter(0))

    return replace(limits, grp_tres=shared)


def _owner(key: str, name: str) -> str:
    """Return the name of a QOS or an account for a message."""
    return f"{'QOS' if key == 'qos' else key} {name!r}"


def _limits(key: str, name: str, wall: str, tres: str, submit: str, shared: str, flags: str = "") -> Limits:
    """Return the limits in the cells of a row of sacctmgr; an empty cell means no limit."""
    return Limits(
        key=key,
        name=name,
        max_wall_min=parse_slurm_limit(wall) if wall else None,
        max_tres=_amounts(tres),
        grp_tres=_shared(_owner(key, name), shared),
        max_submit=int(submit) if submit.isdigit() else None,
        flags=frozenset(flags.split(",")),
    )
