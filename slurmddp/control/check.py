"""Check by SLURM's limits and by sbatch whether SLURM would start jobs; nothing is queued or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.launchers.submit.fit import Fit, judge
from slurmddp.runs.folder.excluded_nodes import shared_nodes
from slurmddp.settings.spec import Job
from slurmddp.slurm import client
from slurmddp.slurm.limits import partitions
from slurmddp.slurm.limits import site as limits
from slurmddp.slurm.limits.finding import Finding
from slurmddp.slurm.limits.nodes import nodes_away
from slurmddp.slurm.limits.queries import describe
from slurmddp.slurm.limits.site import Site, may_lift, nodes_to_ask, partitions_for


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """Whether SLURM would start a job, or an array of jobs."""

    name: str
    """Name of the run; for an array, the name of its first run."""
    runs: int = 1
    """Number of runs; more than one: the elements of one array."""
    reasons: tuple[Finding, ...] = ()
    """The limits because of which SLURM would not start the job; empty if it would start it."""
    notes: tuple[str, ...] = ()
    """Doubts about a job that SLURM may start all the same, as sentences."""
    start: str = ""
    """The expected start, as a clause; empty if SLURM gives no estimate."""


@dataclass(frozen=True)
class Checked:
    """The result of a check of jobs."""

    jobs: tuple[CheckedJob, ...]


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A node that new runs avoid because it failed."""

    node: str
    expires: float
    """Time from which runs use the node again, in seconds since the epoch."""
    reason: str | None = None
    run: str | None = None
    """Name of the run in which the node failed."""


@dataclass(frozen=True)
class CheckedClusters:
    """The result of a check of cluster files."""

    clusters: Mapping[str, tuple[Finding, ...]]
    """The findings about each file, by the name of the file; none if it fits this site."""
    avoided_nodes: tuple[AvoidedNode, ...] = ()


def check(groups: Sequence[Sequence[Job]]) -> Checked:
    """Check whether SLURM would start jobs.

    Args:
        groups: the jobs of each submission: one job, or the jobs of an array, which are checked together.

    Raises:
        ConfigError: a job runs on this machine.
        SlurmError: SLURM does not answer.
    """
    for job in (job for group in groups for job in group):
        if job.launcher != "slurm":
            raise ConfigError(
                f"--check asks SLURM about a job, but {job.run_name} runs on this machine.",
                hint="Choose a cluster with +cluster=NAME, or omit --check.",
            )

    slurm = client.SlurmClient()
    site = describe(slurm)

    return Checked(tuple(_check(group, slurm, site) for group in groups))


def check_clusters(project: Path, names: Sequence[str] = ()) -> CheckedClusters:
    """Check cluster files, each by a job of the largest size that it allows.

    Args:
        project: the project folder.
        names: names of cluster files; empty: all files in the project's conf/cluster.

    Raises:
        ConfigError: a cluster file does not exist, or has wrong values.
        SlurmError: SLURM does not answer.
    """
    slurm = client.SlurmClient()
    names = names or sorted(path.stem for path in (project / "conf" / "cluster").glob("*.yaml"))
    if not names:
        raise ConfigError(
            "This folder has no conf/cluster/*.yaml.",
            hint="Name a cluster, or write a file with `slurmddp cluster detect --write`.",
        )

    site = describe(slurm)
    findings = {name: _check_cluster(name, project, slurm, site) for name in names}
    avoided = [
        AvoidedNode(
            node=record["node"],
            expires=record["expires"],
            reason=record.get("reason"),
            run=record.get("run"),
        )
        for record in shared_nodes(site.config.get("ClusterName", ""))
    ]

    return CheckedClusters(findings, tuple(avoided))


def _check_cluster(name: str, project: Path, slurm: client.SlurmClient, site: Site) -> tuple[Finding, ...]:
    """Return the findings about a cluster file, for a job without further settings."""
    from slurmddp.config.composition.compose import compose
    from slurmddp.config.job import build_job

    overrides = [f"+cluster={name}"]
    job = build_job(compose(overrides, project), project_dir=project, overrides=overrides)
    findings = limits.check_cluster(job, site)
    if findings:
        job = limits.at_largest_size(job)

    return _fit([job], slurm, site, findings).reasons


def _check(group: Sequence[Job], slurm: client.SlurmClient, site: Site) -> CheckedJob:
    """Check a job, or the jobs of an array."""
    different = {repr((job.resources, job.cluster)): job for job in group}.values()
    findings = [finding for job in different for finding in limits.check(job, site, jobs=len(group))]
    fit = _fit(group, slurm, site, findings)
    return CheckedJob(
        name=group[0].run_name,
        runs=len(group),
        reasons=fit.reasons,
        notes=tuple(fit.notes),
        # sbatch's estimate ignores a partition that is down.
        start=_after_downtime(group[0], site) or fit.start,
    )


def _after_downtime(job: Job, site: Site) -> str:
    """Return when the job starts, as a clause, if all its partitions are down and only queue jobs."""
    states = {partition.name: partition.state for partition in partitions.chosen(job, site.partitions)}
    if not states or set(states.values()) != {"DOWN"}:
        return ""
    return f"once the site has partition {' or '.join(map(repr, states))} up again (DOWN now)"


def _after_repair(job: Job, site: Site) -> str:
    """Return when the job starts, as a clause, if each of its partitions has too few nodes up."""
    names = [partition.name for partition in partitions.chosen(job, site.partitions)]
    away = [nodes_away(job, [group for group in site.groups if group.partition == name]) for name in names]
    if not away or not all(away):
        return ""

    listed = " or ".join(map(repr, names))
    return f"once enough nodes of partition {listed} are up ({sum(away)} down or drained now, see `sinfo -R`)"


def _fit(group: Sequence[Job], slurm: client.SlurmClient, site: Site, findings: Sequence[Finding]) -> Fit:
    """Ask sbatch about a job, or about the array of several jobs, and judge findings by its answer.

    Raises:
        SlurmError: SLURM does not answer.
    """
    job = group[0]
    few = nodes_to_ask(job, site)
    if few:
        group = [_with_nodes(point, few) for point in group]

    fit = judge(job, findings, site, lambda: _ask(group, slurm))
    if few:
        fit = _about_all_nodes(fit, job, site, findings)
    if fit.refusal is None or fit.reasons:
        return fit

    later = _later(job, site, fit.refusal.message)
    if later:
        return replace(fit, start=later)

    message = " ".join(fit.refusal.message.split()).rstrip(".")
    refusal = Finding(key="cluster", value=job.cluster.name, site=message, remedy=fit.refusal.hint)

    return replace(fit, reasons=(refusal,))


def _with_nodes(job: Job, nodes: int) -> Job:
    return replace(job, resources=replace(job.resources, nodes=nodes, spare_nodes=0))


def _about_all_nodes(fit: Fit, job: Job, site: Site, findings: Sequence[Finding]) -> Fit:
    """Correct the answer of sbatch about a job with fewer nodes.

    The answer holds neither for the start nor for the number of nodes. About the number, the limits of the
    partitions are certain.
    """
    sizes = [finding for finding in findings if finding.key in ("nodes", "max_nodes") and not finding.limit]
    too_large = partitions.check(job, partitions_for(job, site))
    certain = [finding for finding in sizes if finding in too_large and not may_lift(job, site, finding)]
    uncertain = [finding for finding in sizes if finding not in certain]

    reasons = [finding for finding in fit.reasons if finding not in sizes]
    doubts = [finding for finding in fit.doubts if finding not in sizes]

    return replace(fit, start="", reasons=(*reasons, *certain), doubts=(*doubts, *uncertain))


def _later(job: Job, site: Site, refusal: str) -> str:
    """Return when a job starts, as a clause, if sbatch queues it though `sbatch --test-only` refuses it."""
    if "configuration is not available" in refusal:
        return _after_repair(job, site)
    if "Invalid time specified" in refusal and job.cluster.reservation:
        return f"once reservation {job.cluster.reservation!r} begins"
    return ""


def _ask(group: Sequence[Job], slurm: client.SlurmClient) -> str:
    """Return the start that `sbatch --test-only` estimates for a job or an array."""
    from slurmddp.launchers.submit import array, submitter
    from slurmddp.slurm.script import render_array

    job = group[0]
    if len(group) > 1:
        return slurm.test(render_array(group, array.free_folder(job.run_dir.parent, job.name)))
    return slurm.test(submitter.build(job.submitter, slurm).script(job))
