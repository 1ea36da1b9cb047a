"""Ask SLURM about the site: its partitions, nodes, settings and accounting."""

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
_Shown = TypeVar("_Shown")


def describe(slurm: SlurmClient) -> Site:
    """Return partitions, nodes, settings and accounting of a SLURM; raises SlurmError.

    What the site shows to its staff only (`PrivateData`) is left out, with a line about it.
    """
    config = _config(slurm)
    site = Site(
        partitions=_if_shown(slurm, partitions, "partitions") or {},
        groups=_if_shown(slurm, _groups, "nodes") or (),
        config=config,
    )
    return replace(site, accounting=_accounting(slurm, config)) if site.has_accounting else site


def partitions(slurm: SlurmClient) -> dict[str, Partition]:
    """Return the partitions and their limits, by name."""
    # Hidden ones too: sbatch takes them.
    return parse_partitions(slurm.query(["scontrol", "--all", "-o", "show", "partition"]))


def cluster_name(slurm: SlurmClient) -> str:
    """Return the name that SLURM's configuration gives this cluster; raises SlurmError."""
    name = _config(slurm).get("ClusterName", "")
    if not name:
        raise SlurmError("scontrol show config names no cluster.", hint="Look for ClusterName in slurm.conf.")
    return name


def max_array_size(slurm: SlurmClient) -> int:
    """Return how many elements an array may have: MaxArraySize bounds the index.

    0: there are no arrays here, or the site does not say. Raises SlurmError without an answer.
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
    groups = parse_groups(slurm.query(["sinfo", "--noheader", "--all", "--exact", "-o", SINFO_FORMAT]))
    nodes = slurm.query(["scontrol", "--all", "-o", "show", "nodes"]).splitlines()
    return without_reserved(groups, [parse_facts(line) for line in nodes])


def _if_shown(slurm: SlurmClient, ask: Callable[[SlurmClient], _Shown], what: str) -> _Shown | None:
    """Return the answer to a query; None if SLURM gives it to the site's staff only."""
    try:
        return ask(slurm)
    except SlurmError as error:
        if _DENIED.search(error.message) is None:
            raise
        slurm.say(f"{error.message} The {what} of this site are left out of the comparison.")
        return None


def _accounting(slurm: SlurmClient, config: Mapping[str, str]) -> accounting.Accounting | None:
    if shutil.which("sacctmgr") is None:
        return None
    show = ["sacctmgr", "--noheader", "--parsable2", "show"]
    name = pwd.getpwuid(os.getuid()).pw_name
    associations = [*show, "associations"]
    if cluster := config.get("ClusterName"):  # One database may serve several clusters.
        associations.append(f"cluster={cluster}")
    try:
        qualities = slurm.query([*show, "qos", f"format={accounting.QOS_FIELDS}"])
        of_user = [*associations, "where", f"user={name}", f"format={accounting.ASSOCIATION_FIELDS}"]
        of_accounts = [*associations, "where", "user=", f"format={accounting.ACCOUNT_FIELDS}"]
        limits = accounting.parse_associations(slurm.query(of_user), slurm.query(of_accounts))
        default = slurm.query([*show, "user", name, "format=DefaultAccount"])
        user = ["--user", str(os.getuid())]
        queued = slurm.query(["squeue", "--noheader", "--all", "--array", *user, "-o", "%a|%q"])
    except SlurmError as error:
        slurm.say(f"{error.message} Limits of accounts and QOS are not compared.")
        return None
    return accounting.Accounting(
        enforced=accounting.parse_enforced(config.get("AccountingStorageEnforce", "")),
        qualities=accounting.parse_qualities(qualities),
        associations=limits,
        default_account=default.strip(),
        queued=accounting.parse_queued(queued),
    )
