"""Query SLURM about the site: its partitions, nodes, settings and accounting."""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from slurmddp.errors import SlurmError
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.command_output import parse_facts
from slurmddp.slurm.limits import accounting
from slurmddp.slurm.limits.nodes import SINFO_FORMAT, NodeGroup, parse_groups, without_reserved
from slurmddp.slurm.limits.partitions import Partition, parse_partitions
from slurmddp.slurm.limits.site import Site

_DENIED = re.compile("access/permission denied", re.IGNORECASE)
"""Matches SLURM's error for a query that only the site's staff may make (PrivateData)."""
_Shown = TypeVar("_Shown")


def describe(slurm: SlurmClient) -> Site:
    """Return the partitions, nodes, settings and accounting of a SLURM.

    Facts that the site shows only to its staff (`PrivateData`) are omitted, and their lack is reported.

    Raises:
        SlurmError: SLURM does not answer.
    """
    config = _config(slurm)
    site = Site(
        partitions=_if_shown(slurm, partitions, "partitions") or {},
        groups=_if_shown(slurm, _groups, "nodes") or (),
        config=config,
    )
    if site.has_accounting:
        site = replace(site, accounting=_accounting(slurm, config))
    return site


def partitions(slurm: SlurmClient) -> dict[str, Partition]:
    """Return the partitions and their limits, by name."""
    # `--all` also shows hidden partitions, because sbatch accepts them.
    return parse_partitions(slurm.query(["scontrol", "--all", "-o", "show", "partition"]))


def cluster_name(slurm: SlurmClient) -> str:
    """Return the name that SLURM's configuration gives this cluster; raise SlurmError without a name."""
    name = _config(slurm).get("ClusterName", "")
    if not name:
        raise SlurmError("scontrol show config names no cluster.", hint="Look for ClusterName in slurm.conf.")
    return name


def max_array_size(slurm: SlurmClient) -> int:
    """Return the largest number of elements of a job array (MaxArraySize); 0 if the site has no arrays.

    0 is also returned if the site does not show its limit.

    Raises:
        SlurmError: SLURM does not answer.
    """
    try:
        text = _config(slurm).get("MaxArraySize", "")
    except SlurmError as error:
        if error.may_be_queued:
            raise
        return 0
    return int(text) if text.isdigit() else 0


def _config(slurm: SlurmClient) -> dict[str, str]:
    return parse_facts(slurm.query(["scontrol", "show", "config"]))


def _groups(slurm: SlurmClient) -> tuple[NodeGroup, ...]:
    # Without --exact, sinfo groups different nodes and shows only the smallest CPU count and memory of a
    # group.
    groups = parse_groups(slurm.query(["sinfo", "--noheader", "--all", "--exact", "-o", SINFO_FORMAT]))
    nodes = slurm.query(["scontrol", "--all", "-o", "show", "nodes"]).splitlines()
    return without_reserved(groups, [parse_facts(line) for line in nodes])


def _if_shown(slurm: SlurmClient, ask: Callable[[SlurmClient], _Shown], what: str) -> _Shown | None:
    """Return the result of a query; if only the site's staff may make it, report this and return None.

    Args:
        slurm: the client of the site's SLURM.
        ask: makes the query.
        what: name of the facts that the query returns, such as "nodes", for the report.
    """
    try:
        return ask(slurm)
    except SlurmError as error:
        if _DENIED.search(error.message) is None:
            raise
        slurm.report(f"{error.message} So jobs are not compared with the {what} of this site.")
        return None


def _accounting(slurm: SlurmClient, config: Mapping[str, str]) -> accounting.Accounting | None:
    """Return the accounting of a site; None without sacctmgr, or if it does not answer, which is reported."""
    if shutil.which("sacctmgr") is None:
        return None

    show = ["sacctmgr", "--noheader", "--parsable2", "show"]
    name = pwd.getpwuid(os.getuid()).pw_name
    show_associations = [*show, "associations"]
    # Name the cluster, because a database of several clusters would also return associations of other
    # clusters.
    if cluster := config.get("ClusterName"):
        show_associations.append(f"cluster={cluster}")

    where_user = [f"user={name}", f"format={accounting.ASSOCIATION_FIELDS}"]
    # Rows without a user are the limits of whole accounts.
    where_account = ["user=", f"format={accounting.ACCOUNT_FIELDS}"]
    try:
        qualities = slurm.query([*show, "qos", f"format={accounting.QOS_FIELDS}"])
        of_user = slurm.query([*show_associations, "where", *where_user])
        of_accounts = slurm.query([*show_associations, "where", *where_account])
        default = slurm.query([*show, "user", name, "format=DefaultAccount"])
        user = ["--user", str(os.getuid())]
        queued = slurm.query(["squeue", "--noheader", "--all", "--array", *user, "-o", "%a|%q"])
    except SlurmError as error:
        slurm.report(f"{error.message} So jobs are not compared with limits of accounts and QOS.")
        return None

    return accounting.Accounting(
        enforced=accounting.parse_enforced(config.get("AccountingStorageEnforce", "")),
        qualities=accounting.parse_qualities(qualities),
        associations=accounting.parse_associations(of_user, of_accounts),
        default_account=default.strip(),
        queued=accounting.parse_queued(queued),
    )
