"""Say whether this SLURM would start a job, for `--check` and `slurmddp cluster check`; nothing is queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError
from slurmddp.launchers.submit.fit import Fit, judge
from slurmddp.runs.text_format import counted
from slurmddp.slurm.limits import partitions
from slurmddp.slurm.limits.finding import Finding
from slurmddp.slurm.limits.nodes import nodes_away
from slurmddp.slurm.limits.site import Site, check, may_lift, nodes_to_ask, partitions_for

if TYPE_CHECKING:
    from slurmddp.slurm.client import SlurmClient
    from slurmddp.spec import Job


def show(groups: Sequence[Sequence[Job]]) -> int:
    """Print why this SLURM would not start jobs, or when it would; return the exit code.

    Args:
        groups: single jobs, and the jobs of each array. An array is checked as a whole.

    Raises:
        ConfigError: a job runs on this machine.
        SlurmError: SLURM does not answer.
    """
    from slurmddp.slurm import client

    for job in (job for group in groups for job in group):
        if job.launcher != "slurm":
            raise ConfigError(
                f"--check compares a job with SLURM, and {job.run_name} runs on this machine.",
                hint="Choose a cluster with +cluster=NAME, or leave --check out.",
            )
    slurm = client.SlurmClient()
    site = slurm.describe()
    return max((_show(group, slurm, site) for group in groups), default=EXIT_FINISHED)


def _show(group: Sequence[Job], slurm: SlurmClient, site: Site) -> int:
    different = {repr((job.resources, job.cluster)): job for job in group}.values()
    findings = [finding for job in different for finding in check(job, site, jobs=len(group))]
    fit = test(group, slurm, site, findings)
    first = group[0].run_name
    what = f"the array of {counted(len(group), 'run')} from {first} on" if len(group) > 1 else first

    for finding in fit.reasons:
        print(finding)
    if fit.reasons:
        print(f"This SLURM would not start {what}. Nothing was queued or written.")
        return EXIT_CONFIG

    for note in fit.notes:
        print(f"note: {note}")
    start = (
        _after_downtime(group[0], site) or fit.start
    )  # sbatch's estimate ignores a partition that is down.
    expected = f", {start}" if start else ""
    print(f"This SLURM would start {what}{expected}. Nothing was queued or written.")
    return EXIT_FINISHED


def _after_downtime(job: Job, site: Site) -> str:
    """Return when the job starts, as a clause, if its partitions are down and only queue jobs now."""
    states = {one.name: one.state for one in partitions.chosen(job, site.partitions)}
    if not states or set(states.values()) != {"DOWN"}:
        return ""
    return f"once the site has partition {' or '.join(map(repr, states))} up again (DOWN now)"


def _after_repair(job: Job, site: Site) -> str:
    """Return when the job starts, as a clause, if too few nodes are up now in each of its partitions."""
    names = [one.name for one in partitions.chosen(job, site.partitions)]
    away = [nodes_away(job, [group for group in site.groups if group.partition == name]) for name in names]
    if not away or not all(away):
        return ""
    where = " or ".join(map(repr, names))
    return f"once enough nodes of partition {where} are up ({sum(away)} down or drained now, see `sinfo -R`)"


def test(group: Sequence[Job], slurm: SlurmClient, site: Site, findings: Sequence[Finding]) -> Fit:
    """Ask sbatch whether it takes a job, or the array of several jobs, and judge findings by its answer.

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
    """Return what is known of a job if sbatch was asked about fewer nodes.

    Its answer says nothing about the start and the number of nodes, for which the limits of the partitions
    are certain.
    """
    sizes = [finding for finding in findings if finding.key in ("nodes", "max_nodes") and not finding.limit]
    limits = partitions.check(job, partitions_for(job, site))
    certain = [finding for finding in sizes if finding in limits and not may_lift(job, site, finding)]
    uncertain = [finding for finding in sizes if finding not in certain]

    reasons = [finding for finding in fit.reasons if finding not in sizes]
    doubts = [finding for finding in fit.doubts if finding not in sizes]
    return replace(fit, start="", reasons=(*reasons, *certain), doubts=(*doubts, *uncertain))


def _later(job: Job, site: Site, refusal: str) -> str:
    """Return when a job starts, as a clause, if sbatch queues it although `sbatch --test-only` refuses it."""
    if "configuration is not available" in refusal:
        return _after_repair(job, site)
    if "Invalid time specified" in refusal and job.cluster.reservation:
        return f"once reservation {job.cluster.reservation!r} begins"
    return ""


def _ask(group: Sequence[Job], slurm: SlurmClient) -> str:
    """Return the start that sbatch expects for a job or an array."""
    from slurmddp.launchers.submit import array, sbatch
    from slurmddp.slurm.script import render_array

    job = group[0]
    if len(group) > 1:
        return slurm.test(render_array(group, array.free_folder(job.run_dir.parent, job.name)))
    return slurm.test(sbatch.build(job.submitter, slurm).script(job))
