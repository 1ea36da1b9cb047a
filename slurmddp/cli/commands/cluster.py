"""Draft cluster files from this site's SLURM, or compare cluster files with it.

slurmddp cluster detect                print a draft for each partition that you may use
slurmddp cluster detect gpu --write    write conf/cluster/gpu.yaml; a file that exists is never changed
slurmddp cluster check mine            compare conf/cluster/mine.yaml with this site
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli.messages import EXIT_CODES
from slurmddp.cli.new_files import write_new
from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError, SlurmError, near_matches
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from slurmddp.slurm.client import SlurmClient
    from slurmddp.slurm.limits.finding import Finding
    from slurmddp.slurm.limits.site import Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `slurmddp cluster`, and their arguments."""
    parser.epilog = EXIT_CODES
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    detect = actions.add_parser("detect", help="draft a cluster file for each partition that you may use")
    detect.add_argument("partitions", nargs="*", metavar="PARTITION", help="only these partitions")
    detect.add_argument(
        "--write",
        action="store_true",
        help="write conf/cluster/PARTITION.yaml; a file that exists is never changed",
    )
    check = actions.add_parser("check", help="compare cluster files with this site; queue nothing")
    check.add_argument(
        "names", nargs="*", metavar="NAME", help="cluster files (default: all of the project's conf/cluster)"
    )
    check.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print drafts, write them, or print findings; return the exit code."""
    return _detect(args.partitions, write=args.write) if args.action == "detect" else _check(args)


def drafts(site: Site, names: Sequence[str] = ()) -> dict[Path, str]:
    """Return drafts of cluster files by their paths in a project; raises ConfigError or SlurmError.

    Args:
        site: the site.
        names: partitions; all usable ones if empty.
    """
    from slurmddp.slurm.cluster_draft import draft, file_name, usable

    found = {one.name: one for one in usable(site)}
    if not found:
        raise SlurmError(
            "This SLURM has no partition with nodes that takes your jobs.",
            hint="`scontrol show partition` and `sinfo` show what there is.",
        )
    for name in names:
        if name not in found:
            raise ConfigError(
                f"There is no partition {name!r} here that takes your jobs.", hint=near_matches(name, found)
            )
    chosen = [found[name] for name in names] or [*found.values()]
    return {Path("conf/cluster") / f"{file_name(one)}.yaml": draft(one, site) for one in chosen}


def _detect(names: Sequence[str], *, write: bool) -> int:
    from slurmddp.slurm import client

    drafted = drafts(client.SlurmClient().describe(), names)
    if not write:
        print("\n".join(f"# {path}\n{text}" for path, text in drafted.items()), end="")
        print("slurmddp: nothing was written; --write writes these files.", file=sys.stderr)
        return EXIT_FINISHED
    for line in write_new(Path(), drafted):
        print(line)
    return EXIT_FINISHED


def _check(args: argparse.Namespace) -> int:
    from slurmddp.slurm import client

    project, slurm = Path.cwd(), client.SlurmClient()
    own = sorted(path.stem for path in (project / "conf" / "cluster").glob("*.yaml"))
    if not (names := args.names or own):
        raise ConfigError(
            "This folder has no conf/cluster/*.yaml.",
            hint="Name a cluster, or write a file with `slurmddp cluster detect --write`.",
        )
    site = slurm.describe()
    found = {name: _findings(name, project, site, slurm) for name in names}
    if args.json:
        print(json.dumps({name: [asdict(one) for one in some] for name, some in found.items()}, indent=2))
    else:
        for name, some in found.items():
            print(f"{name}: {counted(len(some), 'finding') if some else 'fits this site'}")
            for one in some:
                print(f"  {one}")
        for line in _failed_nodes(site.config.get("ClusterName", "")):
            print(line)
    return EXIT_CONFIG if any(found.values()) else EXIT_FINISHED


def _failed_nodes(cluster: str) -> list[str]:
    """Return the nodes of this SLURM that new runs avoid, each with its reason, and how to end that."""
    from slurmddp.runs.folder.excluded_nodes import shared_file, shared_nodes

    if not (failed := shared_nodes(cluster)):
        return []
    lines = [f"failed nodes, which new runs avoid; delete a line of {shared_file()} to end that:"]
    for one in failed:
        until = time.strftime("%d %b %H:%M", time.localtime(one["expires"]))
        lines.append(f"  {one['node']} until {until}: {one.get('reason')} (run {one.get('run')})")
    return lines


def _findings(name: str, project: Path, site: Site, slurm: SlurmClient) -> list[Finding]:
    """Return the findings of one cluster file, for a job that has no settings of its own."""
    from slurmddp.cli import check_job
    from slurmddp.config.composition.compose import compose
    from slurmddp.config.job import build_job
    from slurmddp.slurm.limits.site import at_largest_size, check_cluster

    overrides = [f"+cluster={name}"]
    job = build_job(compose(overrides, project), project_dir=project, overrides=overrides)
    findings = check_cluster(job, site)
    asked = at_largest_size(job) if findings else job
    return [*check_job.test([asked], slurm, site, findings).reasons]
