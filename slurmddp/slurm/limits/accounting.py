"""Compare a job with the accounts, qualities of service and limits that a site enforces; pure.

sbatch queues a job over such a limit, and the job then waits with a reason that names only the limit's kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from slurmddp.errors import near_matches
from slurmddp.settings.spec import Job
from slurmddp.slurm.limits.finding import Finding, too_long
from slurmddp.slurm.units import parse_slurm_limit

QOS_FIELDS = "Name,MaxWall,MaxTRES,MaxSubmitJobsPerUser,GrpTRES,Flags"
ASSOCIATION_FIELDS = "Account,Partition,QOS,DefaultQOS,MaxWall,MaxTRES,MaxSubmitJobs,GrpTRES"
ACCOUNT_FIELDS = "Account,User,ParentName,GrpTRES"
"""Columns of sacctmgr that show the limits of an account itself; the rows of its users lack them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one quality of service or one account; None and a missing resource stand for no limit."""

    key: str
    """The key of a job that names it: `qos` or `account`."""
    name: str
    max_wall_min: int | None = None
    max_tres: Mapping[str, int] = field(default_factory=dict)
    """Most of each resource for one job: `node`, `cpu`, `gres/gpu`."""
    grp_tres: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Most of each resource for all running jobs together, and the source of this limit: an account above
    may set it."""
    max_submit: int | None = None
    """Most jobs of one user in the queue."""
    flags: frozenset[str] = frozenset()
    """The flags of a quality of service, such as `PartitionTimeLimit`."""

    @property
    def source(self) -> str:
        """The owner for a message: `QOS 'short'` or `account 'physics'`."""
        return _called(self.key, self.name)


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
    """By the name in lower case: SLURM compares the names of accounts and QOS without case."""
    associations: tuple[Association, ...]
    default_account: str = ""
    """The account of a job that names none; empty if it is not known."""
    queued: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The person's jobs in the queue, by ("account", name) and by ("qos", name); names in lower case."""


def parse_qualities(text: str) -> dict[str, Limits]:
    """Return the limits of each quality of service in the output of `sacctmgr show qos`."""
    rows = _rows(text, QOS_FIELDS)
    return {name.lower(): _limits("qos", name, *cells) for name, *cells in rows}


def parse_associations(text: str, accounts: str = "") -> tuple[Association, ...]:
    """Return the accounts of one person.

    Args:
        text: the output of `sacctmgr show associations` for the person.
        accounts: its output for the accounts themselves, which have parents and limits of their own.
    """
    rows = _rows(text, ASSOCIATION_FIELDS)
    groups = {
        account.lower(): (parent.lower(), _shared(_called("account", account), tres))
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
        for account, partition, qualities, default, *cells in rows
    )


def parse_queued(text: str) -> Counter[tuple[str, str]]:
    """Return the number of jobs by account and by QOS in the output of `squeue -o %a|%q`."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 1]
    owners = [owner for account, qos in rows for owner in (("account", account), ("qos", qos))]
    return Counter((key, name.lower()) for key, name in owners)


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
    findings = list(_names(job, site))
    if findings or "limits" not in site.enforced:
        return findings
    of_partitions = [site.qualities.get(name.lower()) for name in partition_qos] or [None]
    alternatives = [_over(job, _in_order(job, site, quality), site.queued, jobs) for quality in of_partitions]
    # A job that fits one of its partitions starts there.
    return min(map(list, alternatives), key=len)


def has_flag(job: Job, site: Accounting, flag: str) -> bool | None:
    """Return whether the quality of service of a job has a flag; None if it is not known."""
    name = _qos_of(job, site)
    if name:
        return name in site.qualities and flag in site.qualities[name].flags
    # SLURM chooses one that the account may use.
    association = _association(job, site)
    possible = association.qualities if association else site.qualities
    known = [site.qualities[quality.lower()] for quality in possible if quality.lower() in site.qualities]
    return None if any(flag in quality.flags for quality in known) else False


def _association(job: Job, site: Accounting) -> Association | None:
    """Return the account in which a job runs; one for the job's partition comes first."""
    account = (job.cluster.account or site.default_account).lower()
    asked = (job.cluster.partition or "").split(",")
    usable = [one for one in site.associations if one.account.lower() == account]
    ordered = [one for one in usable if one.partition in asked and one.partition]
    ordered += [one for one in usable if not one.partition]
    return ordered[0] if ordered else None


def _qos_of(job: Job, site: Accounting) -> str:
    """Return the name of a job's quality of service in lower case; empty if it is not known."""
    if job.cluster.qos:
        return job.cluster.qos.lower()
    association = _association(job, site)
    if association is None:
        return ""
    if not association.default_qos and len(association.qualities) == 1:
        return association.qualities[0].lower()
    return association.default_qos.lower()


def _in_order(job: Job, site: Accounting, of_partition: Limits | None) -> list[Limits]:
    """Return whose limits hold for a job: of those that set a limit, the first one counts."""
    quality, association = site.qualities.get(_qos_of(job, site)), _association(job, site)
    sources = [of_partition, quality]
    if quality and "OverPartQOS" in quality.flags:
        sources.reverse()
    return [one for one in (*sources, association.limits if association else None) if one is not None]


def _names(job: Job, site: Accounting) -> Iterator[Finding]:
    accounts = [one.account for one in site.associations]
    account, qos = job.cluster.account, job.cluster.qos
    if account and "associations" in site.enforced and account.lower() not in map(str.lower, accounts):
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
        name
        for one in site.associations
        if not account or account.lower() == one.account.lower()
        for name in one.qualities
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
        sources: whose limits hold. Of those that set a limit, the first one counts.
        queued: the person's jobs in the queue, by account and by QOS.
        jobs: the number of such jobs, the elements of an array.
    """
    size = job.resources
    wall = next((one for one in sources if one.max_wall_min is not None), None)
    if wall is not None:
        yield from too_long(size.time_limit_min, wall.max_wall_min, wall.source, "MaxWall")
    asked = {
        "node": ("nodes", size.all_nodes),
        "cpu": ("cpus_per_node", size.all_nodes * (size.cpus_per_node or 1)),
        "gres/gpu": ("gpus_per_node", size.all_nodes * size.gpus_per_node),
    }
    for resource, (key, count) in asked.items():
        largest = next((one for one in sources if resource in one.max_tres), None)
        if largest is not None and count > largest.max_tres[resource]:
            site = f"{largest.source} gives a job at most {largest.max_tres[resource]} (MaxTRES {resource})"
            yield _too_much(job, key, count, site, "MaxTRES")
        shared = next((one for one in sources if resource in one.grp_tres), None)
        if shared is not None and count > shared.grp_tres[resource][0]:
            most, owner = shared.grp_tres[resource]
            site = f"{owner} gives all its jobs at most {most} together (GrpTRES {resource})"
            yield _too_much(job, key, count, site, "GrpTRES")
    crowd = next((one for one in sources if one.max_submit is not None), None)
    if crowd is not None and crowd.max_submit is not None:
        present = queued.get((crowd.key, crowd.name.lower()), 0)
        if present + jobs > crowd.max_submit:
            yield _too_many(crowd, present, jobs)


def _too_much(job: Job, key: str, count: int, site: str, limit: str) -> Finding:
    nodes = job.resources.all_nodes
    value = str(count) if key == "nodes" else f"{count // nodes} on {nodes} nodes"
    return Finding(
        key=key,
        value=value,
        site=site,
        remedy="Ask for less, or use another qos=.",
        limit=limit,
    )


def _too_many(limits: Limits, present: int, jobs: int) -> Finding:
    more = f", and the array has {jobs} more" if jobs > 1 else ""
    return Finding(
        key=limits.key,
        value=limits.name,
        site=f"{limits.source} limits your jobs in the queue to {limits.max_submit} (MaxSubmitJobs), "
        f"and you have {present}{more}",
        remedy="Wait until a job ends, or use another qos=.",
        limit="MaxSubmitJobs",
    )


def _rows(text: str, fields: str) -> list[list[str]]:
    """Return the cells of each line of sacctmgr that has all `fields`."""
    return [line.split("|") for line in text.splitlines() if line.count("|") == fields.count(",")]


def _amounts(tres: str) -> dict[str, int]:
    return {name: int(amount) for name, amount in re.findall(r"([\w/:]+)=(\d+)(?![\w.])", tres)}


def _shared(source: str, tres: str) -> dict[str, tuple[int, str]]:
    return {name: (amount, source) for name, amount in _amounts(tres).items()}


def _within(
    limits: Limits, account: str, groups: Mapping[str, tuple[str, Mapping[str, tuple[int, str]]]]
) -> Limits:
    """Return the limits of a person in an account with the limits of the account and of all above it."""
    shared, above = dict(limits.grp_tres), set[str]()
    while account in groups and account not in above:
        above.add(account)
        account, amounts = groups[account]
        for name, limit in amounts.items():
            # An account above counts only with a smaller limit.
            shared[name] = min(shared.get(name, limit), limit, key=itemgetter(0))
    return replace(limits, grp_tres=shared)


def _called(key: str, name: str) -> str:
    """Return what a QOS or an account is called in a message."""
    return f"{'QOS' if key == 'qos' else key} {name!r}"


def _limits(key: str, name: str, wall: str, tres: str, submit: str, shared: str, flags: str = "") -> Limits:
    return Limits(
        key=key,
        name=name,
        max_wall_min=parse_slurm_limit(wall) if wall else None,
        max_tres=_amounts(tres),
        grp_tres=_shared(_called(key, name), shared),
        max_submit=int(submit) if submit.isdigit() else None,
        flags=frozenset(flags.split(",")),
    )
