"""Check by a site's limits and by `sbatch --test-only` whether SLURM would start jobs; queue nothing.

Only the measurement of a file system queues a short step, if it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmddp.errors import ConfigError
from slurmddp.launchers.submit.file_step import START_S, measure_on_nodes
from slurmddp.launchers.submit.fit import Fit, judge
from slurmddp.runs.folder.excluded_nodes import shared_nodes
from slurmddp.runs.folder.file_system import FileSystem, shortfalls
from slurmddp.settings.spec import Job
from slurmddp.slurm import client
from slurmddp.slurm.limits import partitions
from slurmddp.slurm.limits import site as limits
from slurmddp.slurm.limits.finding import Finding
from slurmddp.slurm.limits.nodes import nodes_away
from slurmddp.slurm.limits.queries import describe
from slurmddp.slurm.limits.site import Site, may_lift, nodes_to_ask, partitions_for
from slurmddp.slurm.limits.site_rules import private_tmp, requeue_delay

_NODES = 2
"""Number of nodes that measure the file system of the run folders."""


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """The result of `check` for one job, or for one array of jobs."""

    name: str
    """Name of the run; for an array, the name of its first run."""
    runs: int = 1
    """Number of runs; more than one: the elements of one array."""
    reasons: tuple[Finding, ...] = ()
    """The limits because of which SLURM would not start the job; empty if it would start it."""
    notes: tuple[str, ...] = ()
    """Sentences about limits that the job exceeds, although SLURM may start the job all the same."""
    start: str = ""
    """The expected start, as a clause; empty if SLURM gives no estimate."""


@dataclass(frozen=True)
class Checked:
    """The results of `check`, one for each submission."""

    jobs: tuple[CheckedJob, ...]


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A node that new runs avoid until `expires`, because it failed in an earlier run."""

    node: str
    expires: float
    """Time from which runs use the node again, in seconds since the epoch."""
    reason: str | None = None
    run: str | None = None
    """Name of the run in which the node failed."""


@dataclass(frozen=True)
class CheckedClusters:
    """The result of `check_clusters`: findings on cluster files, rules of the site, nodes, file systems."""

    clusters: Mapping[str, tuple[Finding, ...]]
    """The findings about each cluster file, by its name; empty for a file that fits this site."""
    rules: tuple[str, ...] = ()
    """Rules of the site that a cluster file can't change, as sentences."""
    avoided_nodes: tuple[AvoidedNode, ...] = ()
    files: Mapping[str, FileSystem] = field(default_factory=dict)
    """The file systems of the run folders, by the name of the cluster file; only if they were measured."""


def check(groups: Sequence[Sequence[Job]]) -> Checked:
    """Check whether SLURM would start jobs; nothing is queued or written.

    Args:
        groups: the jobs of each submission: one job, or the jobs of an array, which are checked together.

    Returns:
        For each submission, the reasons against it, doubts, and the expected start.

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


def check_clusters(
    project: Path, names: Sequence[str] = (), *, files: bool = False, start_s: float = START_S
) -> CheckedClusters:
    """Check whether this site accepts cluster files, each by a job of the largest size that the file allows.

    Args:
        project: the project folder.
        names: names of cluster files; empty: all files in the project's conf/cluster.
        files: whether to measure the file system of the run folders as well, by a short step on two nodes.
            This is not done for a cluster file that the site does not accept.
        start_s: seconds that such a step may wait in the queue.

    Raises:
        ConfigError: a cluster file does not exist, or has wrong values; or a node does not see the folder of
            the runs.
        SlurmError: SLURM does not answer, or the step does not start in time.
    """
    slurm = client.SlurmClient()
    names = names or sorted(path.stem for path in (project / "conf" / "cluster").glob("*.yaml"))
    if not names:
        raise ConfigError(
            "This folder has no conf/cluster/*.yaml.",
            hint="Name a cluster, or write a file with `slurmddp cluster detect --write`.",
        )

    site = describe(slurm)
    jobs = {name: _job(name, project) for name in names}
    findings = {name: _check_cluster(job, slurm, site) for name, job in jobs.items()}
    measured = {}
    if files:
        accepted = {name: job for name, job in jobs.items() if not findings[name]}
        measured = {name: _measure(job, slurm, site, start_s) for name, job in accepted.items()}

    avoided = [
        AvoidedNode(
            node=record["node"],
            expires=record["expires"],
            reason=record.get("reason"),
            run=record.get("run"),
        )
        for record in shared_nodes(site.config.get("ClusterName", ""))
    ]

    rules = tuple(filter(None, [requeue_delay(site.config), private_tmp(site.config)]))
    return CheckedClusters(findings, rules, tuple(avoided), measured)


def _job(name: str, project: Path) -> Job:
    """Return a job with the cluster file `name` and no other settings."""
    from slurmddp.config.composition.compose import compose
    from slurmddp.config.job import build_job

    overrides = [f"+cluster={name}"]
    return build_job(compose(overrides, project), project_dir=project, overrides=overrides)


def _measure(job: Job, slurm: client.SlurmClient, site: Site, start_s: float) -> FileSystem:
    """Measure the file system in which a job would have its run folder."""
    # The folder of the runs may not exist yet, so the nearest folder above it is measured.
    folder = next(parent for parent in job.run_dir.parents if parent.is_dir())
    sizes = [job.cluster.max_nodes or _NODES]
    for partition in partitions.chosen(job, site.partitions):
        sizes.append(min(partition.max_nodes or _NODES, partition.total_nodes or _NODES))

    files = measure_on_nodes(job, folder, min(_NODES, *sizes), slurm, start_s=start_s)
    return replace(files, shortfalls=shortfalls(files))


def _check_cluster(job: Job, slurm: client.SlurmClient, site: Site) -> tuple[Finding, ...]:
    """Return the values of a cluster file that the site does not accept, for a job with this file alone."""
    findings = limits.check_cluster(job, site)
    if findings:
        job = limits.at_largest_size(job)

    return _fit([job], slurm, site, findings).reasons


def _check(group: Sequence[Job], slurm: client.SlurmClient, site: Site) -> CheckedJob:
    """Compare a job, or the jobs of an array, with the site's limits, and ask sbatch about it."""
    different = {repr((job.resources, job.cluster)): job for job in group}.values()
    findings = [finding for job in different for finding in limits.check(job, site, jobs=len(group))]
    fit = _fit(group, slurm, site, findings)
    return CheckedJob(
        name=group[0].run_name,
        runs=len(group),
        reasons=fit.reasons,
        notes=tuple(fit.notes),
        # The estimate of `sbatch --test-only` does not consider that a partition is down.
        start=_after_downtime(group[0], site) or fit.start,
    )


def _after_downtime(job: Job, site: Site) -> str:
    """Return "once the site has partition ... up again" if all partitions of a job are DOWN; else empty.

    Such a partition queues jobs, but starts none.
    """
    states = {partition.name: partition.state for partition in partitions.chosen(job, site.partitions)}
    if not states or set(states.values()) != {"DOWN"}:
        return ""
    return f"once the site has partition {' or '.join(map(repr, states))} up again (DOWN now)"


def _after_repair(job: Job, site: Site) -> str:
    """Return "once enough nodes of partition ... are up" if each partition of a job lacks nodes; else ""."""
    names = [partition.name for partition in partitions.chosen(job, site.partitions)]
    away = [nodes_away(job, [group for group in site.groups if group.partition == name]) for name in names]
    if not away or not all(away):
        return ""

    listed = " or ".join(map(repr, names))
    return f"once enough nodes of partition {listed} are up ({sum(away)} down or drained now, see `sinfo -R`)"


def _fit(group: Sequence[Job], slurm: client.SlurmClient, site: Site, findings: Sequence[Finding]) -> Fit:
    """Ask sbatch about a job or an array, and decide which findings prevent a start.

    Args:
        group: the job, or the jobs of the array.
        slurm: the client of the site's SLURM.
        site: the limits of the site.
        findings: the values of the jobs that the site does not allow.

    Returns:
        The findings as reasons or doubts, and the expected start. If sbatch refuses the job for another
        reason, this refusal is the only reason.

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
    """Correct a result for which sbatch was asked about fewer nodes than the job has.

    The estimated start is removed. Findings about the number of nodes are reasons if a limit of the job's
    partitions is exceeded and nothing at the site can lift this limit; the others are doubts.
    """
    sizes = [finding for finding in findings if finding.key in ("nodes", "max_nodes") and not finding.limit]
    too_large = partitions.check(job, partitions_for(job, site))
    certain = [finding for finding in sizes if finding in too_large and not may_lift(job, site, finding)]
    uncertain = [finding for finding in sizes if finding not in certain]

    reasons = [finding for finding in fit.reasons if finding not in sizes]
    doubts = [finding for finding in fit.doubts if finding not in sizes]

    return replace(fit, start="", reasons=(*reasons, *certain), doubts=(*doubts, *uncertain))


def _later(job: Job, site: Site, refusal: str) -> str:
    """Return the start, as a clause, of a job that `sbatch --test-only` refuses but sbatch would queue.

    sbatch queues such a job if nodes are down, or if its reservation has not begun. Else the text is empty.
    """
    if "configuration is not available" in refusal:
        return _after_repair(job, site)
    if "Invalid time specified" in refusal and job.cluster.reservation:
        return f"once reservation {job.cluster.reservation!r} begins"
    return ""


def _ask(group: Sequence[Job], slurm: client.SlurmClient) -> str:
    """Return the start that `sbatch --test-only` estimates for a job or an array; nothing is queued."""
    from slurmddp.launchers.submit import array, submitter
    from slurmddp.slurm.script import render_array

    job = group[0]
    if len(group) > 1:
        return slurm.test(render_array(group, array.free_folder(job.run_dir.parent, job.name)))
    return slurm.test(submitter.build(job.submitter, slurm).script(job))
