"""Draft cluster files from this site's SLURM, or compare cluster files with it.

slurmddp cluster detect                print a draft for each partition that you may use
slurmddp cluster detect gpu --write    write conf/cluster/gpu.yaml; an existing file is never changed
slurmddp cluster check mine            compare conf/cluster/mine.yaml with this site
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.messages import EXIT_CODES_HELP
from slurmddp.cli.new_files import write_new
from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError, SlurmError, near_matches
from slurmddp.runs.text_format import counted

if TYPE_CHECKING:
    from slurmddp.control.check import AvoidedNode
    from slurmddp.slurm.limits.site import Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `slurmddp cluster`, and their arguments."""
    parser.epilog = EXIT_CODES_HELP
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    detect = actions.add_parser("detect", help="draft a cluster file for each partition that you may use")
    detect.add_argument("partitions", nargs="*", metavar="PARTITION", help="only these partitions")
    detect.add_argument(
        "--write",
        action="store_true",
        help="write conf/cluster/PARTITION.yaml; an existing file is never changed",
    )
    check = actions.add_parser("check", help="compare cluster files with this site; queue nothing")
    check.add_argument(
        "names", nargs="*", metavar="NAME", help="names of cluster files (default: all in conf/cluster)"
    )
    add_json(check)


def run(args: argparse.Namespace) -> int:
    """Draft cluster files, or compare cluster files with this site; return the exit code."""
    return _detect(args.partitions, write=args.write) if args.action == "detect" else _check(args)


def drafts(site: Site, names: Sequence[str] = ()) -> dict[Path, str]:
    """Return drafts of cluster files, by their paths in a project.

    Args:
        site: the limits, partitions and nodes of this SLURM.
        names: partitions to draft; empty: all partitions that take jobs of this account.

    Raises:
        ConfigError: a partition of `names` does not exist, or takes no jobs of this account.
        SlurmError: no partition takes jobs of this account.
    """
    from slurmddp.slurm.limits.cluster_draft import draft, file_name, usable

    partitions = {partition.name: partition for partition in usable(site)}
    if not partitions:
        raise SlurmError(
            "This SLURM has no partition that has nodes and takes your jobs.",
            hint="`scontrol show partition` and `sinfo` show all partitions.",
        )

    for name in names:
        if name not in partitions:
            raise ConfigError(
                f"This SLURM has no partition {name!r} that takes your jobs.",
                hint=near_matches(name, partitions),
            )

    chosen = [partitions[name] for name in names] or [*partitions.values()]
    return {Path("conf/cluster") / f"{file_name(each)}.yaml": draft(each, site) for each in chosen}


def _detect(names: Sequence[str], *, write: bool) -> int:
    """Print drafts of cluster files, or write them; return the exit code."""
    from slurmddp.slurm import client
    from slurmddp.slurm.limits.queries import describe

    drafted = drafts(describe(client.SlurmClient()), names)
    if not write:
        print("\n".join(f"# {path}\n{text}" for path, text in drafted.items()), end="")
        print("slurmddp: nothing was written; add --write to write these files.", file=sys.stderr)
        return EXIT_FINISHED

    for line in write_new(Path(), drafted):
        print(line)

    return EXIT_FINISHED


def _check(args: argparse.Namespace) -> int:
    """Print in what each cluster file differs from this site, and the nodes that new runs avoid.

    Returns:
        `EXIT_CONFIG` if a cluster file does not fit this site, else `EXIT_FINISHED`.
    """
    from slurmddp.control.check import check_clusters

    result = check_clusters(Path.cwd(), args.names)
    if args.json:
        print_json(result)
    else:
        for name, findings in result.clusters.items():
            print(f"{name}: {counted(len(findings), 'finding') if findings else 'fits this site'}")
            for finding in findings:
                print(f"  {finding}")

        _print_avoided(result.avoided_nodes)

    return EXIT_CONFIG if any(result.clusters.values()) else EXIT_FINISHED


def _print_avoided(nodes: Sequence[AvoidedNode]) -> None:
    """Print the nodes that new runs avoid, each with the reason, and how to use a node again."""
    from slurmddp.runs.folder.excluded_nodes import shared_file

    if nodes:
        print(f"New runs avoid these failed nodes. To use one again, delete its line in {shared_file()}:")

    for node in nodes:
        until = time.strftime("%d %b %H:%M", time.localtime(node.expires))
        print(f"  {node.node} until {until}: {node.reason} (run {node.run})")
