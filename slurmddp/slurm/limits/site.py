"""Describe a site, as SLURM shows it, and compare a job with its partitions, nodes and accounts; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slurmddp.settings.spec import Job
from slurmddp.slurm.limits import accounting, partitions
from slurmddp.slurm.limits.accounting import Accounting
from slurmddp.slurm.limits.finding import Finding
from slurmddp.slurm.limits.nodes import NodeGroup, listed_nodes
from slurmddp.slurm.limits.partitions import Partition


@dataclass(frozen=True, kw_only=True)
class Site:
    """The partitions, nodes, settings and accounting of one SLURM, as `queries.describe` returns them."""

    partitions: Mapping[str, Partition]
    groups: tuple[NodeGroup, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    """The `Key = value` pairs of `scontrol show config`."""
    accounting: Accounting | None = None
    """The accounts and limits of the user; None if the site's accounting is missing or does not answer."""

    @property
    def has_accounting(self) -> bool:
        """Whether jobs of this site have accounts and qualities of service."""
        storage = self.config.get("AccountingStorageType", "")
        return storage not in ("", "(null)", "accounting_storage/none")

    def with_empty_queue(self) -> Site:
        """Return the site with no queued jobs of the user, to compare a job that is itself in the queue."""
        if self.accounting is None:
            return self
        return replace(self, accounting=replace(self.accounting, queued=Counter()))


def partitions_for(job: Job, site: Site) -> dict[str, Partition]:
    """Return the site's partitions, without the limits that the quality of service of a job overrides."""
    partitions = dict(site.partitions)
    if _has_flag(job, site, "PartitionMaxNodes"):
        partitions = {name: replace(partition, max_nodes=None) for name, partition in partitions.items()}
    if _has_flag(job, site, "PartitionTimeLimit"):
        partitions = {name: replace(partition, max_time_min=None) for name, partition in partitions.items()}
    return partitions


def may_lift(job: Job, site: Site, finding: Finding) -> bool:
    """Decide whether a rule that no command of SLURM shows may override the limit of a finding."""
    # A job_submit plugin may choose the partition and the QOS, and change the time limit.
    has_plugins = site.config.get("JobSubmitPlugins", "(null)") not in ("", "(null)")
    if has_plugins and (finding.limit or not job.cluster.partition):
        return True

    # A quality of service may override the MaxNodes of a partition.
    if finding.key in ("nodes", "max_nodes") and not finding.limit:
        return _has_flag(job, site, "PartitionMaxNodes") is None
    if finding.limit != "MaxTime":
        return False

    # A reservation or `time-min` may override the MaxTime of a partition.
    sbatch = {str(name).replace("_", "-") for name, value in job.cluster.sbatch.items() if value}
    if job.cluster.reservation or not sbatch.isdisjoint({"reservation", "time-min"}):
        return True
    return _has_flag(job, site, "PartitionTimeLimit") is None


def nodes_to_ask(job: Job, site: Site) -> int | None:
    """Return the number of nodes to ask for in `sbatch --test-only`; None: the job's number of nodes.

    `sbatch --test-only` refuses more nodes than `nodelist` names or than the partition's MaxNodes, although
    sbatch itself would accept the job: SLURM adds nodes to such a list, and a quality of service may override
    MaxNodes. So fewer nodes are asked for.
    """
    listed = listed_nodes(job)
    if listed:
        return listed

    limits = [partition.max_nodes for partition in partitions.chosen(job, site.partitions)]
    largest = max((limit for limit in limits if limit is not None), default=0)
    if not largest or None in limits or job.resources.all_nodes <= largest:
        return None
    return None if _has_flag(job, site, "PartitionMaxNodes") is False else largest


def _has_flag(job: Job, site: Site, flag: str) -> bool | None:
    """Return whether the quality of service of a job has a flag; None if the job's quality is not known."""
    if site.accounting is not None:
        return accounting.has_flag(job, site.accounting, flag)
    # The accounting did not answer, so a quality of service may have any flag.
    return None if job.cluster.qos or site.has_accounting else False


def check(job: Job, site: Site, *, nodes_key: str = "nodes", jobs: int = 1) -> list[Finding]:
    """Return a finding for each reason why this site would not start `job`.

    Args:
        job: the job.
        site: the site.
        nodes_key: the key to name in findings about the number of nodes: `nodes`, or `max_nodes` of a cluster
            file.
        jobs: the number of equal jobs that are submitted together, as elements of an array.
    """
    findings = partitions.check(job, partitions_for(job, site), site.groups, nodes_key=nodes_key)
    findings += _gpu_request(job, site)
    findings += _segments(job, nodes_key)
    if site.accounting is not None:
        candidates = partitions.chosen(job, site.partitions)
        of_partitions = [partition.qos for partition in candidates if partition.qos]
        findings += accounting.check(job, site.accounting, of_partitions, jobs=jobs)
    return findings


def check_cluster(job: Job, site: Site) -> list[Finding]:
    """Return a finding for each key of a cluster file that does not fit the site.

    Args:
        job: a job with the cluster of the file and no other settings.
        site: the site.
    """
    nodes_key = "nodes" if job.cluster.max_nodes is None else "max_nodes"
    return check(at_largest_size(job), site, nodes_key=nodes_key)


def at_largest_size(job: Job) -> Job:
    """Return the job with the largest number of nodes that its cluster file allows."""
    largest = job.cluster.max_nodes
    if largest is None:
        return job
    # A smaller job may fit if the largest one is no multiple of `segment`.
    segment = _segment(job)
    if segment and largest > segment:
        largest -= largest % segment
    return replace(job, resources=replace(job.resources, nodes=largest, spare_nodes=0))


def _gpu_request(job: Job, site: Site) -> list[Finding]:
    """Return a finding for `--gpus-per-node` at a site whose scheduler does not know this option."""
    if not job.resources.gpus_per_node or job.cluster.gpu_request != "gpus-per-node":
        return []

    # With other plugins than select/cons_tres, SLURM knows only --gres for GPUs.
    plugin = site.config.get("SelectType", "select/cons_tres")
    if plugin.endswith("cons_tres"):
        return []
    return [
        Finding(
            key="cluster.gpu_request",
            value="gpus-per-node",
            site=f"this SLURM has SelectType={plugin}, which does not know --gpus-per-node",
            remedy="Set gpu_request: gres in the cluster file.",
        )
    ]


def _segment(job: Job) -> int:
    """Return the number of nodes in a segment (`sbatch --segment`); 0 if the job asks for none."""
    size = str(job.cluster.sbatch.get("segment", ""))
    return int(size) if size.isdigit() else 0


def _segments(job: Job, nodes_key: str) -> list[Finding]:
    """Return a finding if the job is larger than one segment, and no multiple of it."""
    segment = _segment(job)
    nodes = job.resources.all_nodes
    if not segment or nodes <= segment or not nodes % segment:
        return []

    spare = job.resources.spare_nodes
    fewer = nodes - nodes % segment
    remedy = f"Use spare_nodes={spare + fewer + segment - nodes} for {fewer + segment} nodes in all"
    if fewer >= job.resources.nodes:
        remedy += f", or spare_nodes={fewer - job.resources.nodes} for {fewer}"
    elif fewer > spare:
        remedy += f", or {nodes_key}={fewer - spare} for {fewer}"
    return [
        Finding(
            key="spare_nodes" if spare else nodes_key,
            value=str(spare or job.resources.nodes),
            site=f"segment={segment} does not divide the {nodes} nodes of the job",
            remedy=f"{remedy}.",
        )
    ]
