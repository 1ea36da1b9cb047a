"""Draft cluster files from this site's SLURM, or compare cluster files with it.

slurmddp cluster detect                print a draft for each partition that you may use
slurmddp cluster detect gpu --write    write conf/cluster/gpu.yaml; an existing file is never changed
slurmddp cluster check mine            compare conf/cluster/mine.yaml with this site
slurmddp cluster check mine --files    also measure the file system of the run folders, on two nodes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.messages import EXIT_CODES_HELP
from slurmddp.cli.new_files import write_new, write_schemas
from slurmddp.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError, SlurmError
from slurmddp.near_matches import near_matches
from slurmddp.runs.text_format import counted, print_table

if TYPE_CHECKING:
    from slurmddp.control.check import AvoidedNode
    from slurmddp.runs.folder.file_system import FileSystem
    from slurmddp.slurm.limits.site import Site

_LOCKS = {
    "excludes": "keep other hosts out",
    "one host": "hold on one host only",
    "unsupported": "not supported",
}


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
    check = actions.add_parser("check", help="compare cluster files with this site")
    check.add_argument(
        "names", nargs="*", metavar="NAME", help="names of cluster files (default: all in conf/cluster)"
    )
    check.add_argument(
        "--files",
        action="store_true",
        help="also measure the file system of the run folders, by a short step on two nodes",
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
    print(write_schemas(Path()))

    return EXIT_FINISHED


def _check(args: argparse.Namespace) -> int:
    """Print the differences between each cluster file and this site, the site's rules, and failed nodes.

    Returns:
        `EXIT_CONFIG` if a cluster file does not fit this site, or a run can't work in the file system of its
        folder; else `EXIT_FINISHED`.
    """
    from slurmddp.control.check import check_clusters

    result = check_clusters(Path.cwd(), args.names, files=args.files)
    if args.json:
        print_json(result)
    else:
        for name, findings in result.clusters.items():
            print(f"{name}: {counted(len(findings), 'finding') if findings else 'fits this site'}")
            for finding in findings:
                print(f"  {finding}")
            if name in result.files:
                _print_files(result.files[name])

        for rule in result.rules:
            print(rule)
        _print_avoided(result.avoided_nodes)

    unusable = any(shortfall.is_fault for files in result.files.values() for shortfall in files.shortfalls)
    return EXIT_CONFIG if unusable or any(result.clusters.values()) else EXIT_FINISHED


def _print_files(files: FileSystem) -> None:
    """Print the measurements of a file system by several hosts, and the requirements that it fails."""
    from slurmddp.runs.folder.file_system import BY_LISTING, BY_NAME

    print(f"\n{files.folder}, seconds until a change of another host is seen:")
    views = files.hosts
    rows = [
        [change, *(_seconds(view.seen_s[look], files.limit_s) for view in views)]
        for look, change in (BY_NAME | BY_LISTING).items()
    ]
    hosts = [view.host for view in views]
    kinds = [["type of the mount", *(view.kind or "not known" for view in views)]]
    print_table(["", *hosts], kinds + rows, sys.stdout, right=frozenset(hosts))

    print()
    for name, text in _facts(files):
        print(f"{name:<27}{text}")
    for shortfall in files.shortfalls:
        print(f"\n{'fault' if shortfall.is_fault else 'warning'}: {shortfall.text} {shortfall.remedy}")


def _seconds(seconds: float | None, limit_s: float) -> str:
    return f"> {limit_s:g} s" if seconds is None else f"{seconds:.1f} s"


def _facts(files: FileSystem) -> Iterator[tuple[str, str]]:
    """Yield name and value of each property of a file system that all hosts have measured together."""
    broken = f"{files.broken_reads} of {files.reads} reads of a replaced file found no file or a part"
    yield "rename", broken
    lost = f"{files.lost_lines} of {files.lines} lines lost, {files.broken_lines} broken"
    yield "append as slurmddp does", lost
    yield "append without a lock", f"{files.lost_plain_lines} lines lost"
    yield "new names (O_EXCL, mkdir)", f"{files.doubly_created} created by several hosts"
    yield "locks (flock; fcntl)", f"{_LOCKS[files.flock]}; {_LOCKS[files.fcntl]}"
    yield "hard links", "yes" if files.hard_links else "no: slurmddp copies or renames instead"
    yield "fsync of a folder", "yes" if files.synced_folders else "no"


def _print_avoided(nodes: Sequence[AvoidedNode]) -> None:
    """Print the nodes that new runs avoid, each with the reason, and how to use a node again."""
    from slurmddp.runs.folder.excluded_nodes import shared_file

    if nodes:
        print(f"New runs avoid these failed nodes. To use one again, delete its line in {shared_file()}:")

    for node in nodes:
        until = time.strftime("%d %b %H:%M", time.localtime(node.expires))
        print(f"  {node.node} until {until}: {node.reason} (run {node.run})")
