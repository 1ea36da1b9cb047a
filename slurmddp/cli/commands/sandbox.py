"""Start a SLURM of your own on this machine, to try jobs without a cluster.

slurmddp sandbox up
eval "$(slurmddp sandbox env)"
slurmddp train +cluster=sandbox nodes=2
slurmddp sandbox down
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from slurmddp.errors import EXIT_FINISHED, EXIT_SLURM
from slurmddp.sandbox import Sandbox
from slurmddp.sandbox.cluster import describe
from slurmddp.sandbox.plan import SHARED
from slurmddp.sandbox.record import names
from slurmddp.sandbox.shell import export_lines, unset_lines

ACTIONS = {
    "up": "start the sandbox and wait until its nodes are idle",
    "down": "stop the sandbox and remove its files; jobs are lost, run folders stay",
    "status": "show the daemons, nodes and jobs of the sandbox",
    "env": 'print shell lines that select the sandbox: eval "$(slurmddp sandbox env)"',
}
SIZES = {
    "nodes": "number of nodes (default: 2)",
    "cpus": "CPUs per node, which may be more than the machine has (default: 4)",
    "gpus": "fake GPUs per node (default: 2)",
    "grace_s": "seconds from a preempted job's SIGTERM to its end (default: 10)",
    "link_mbit": "speed of each node's link in Mbit/s, to compare collectives (default: no limit)",
    "slurmd_timeout_s": "seconds after which SLURM marks a silent node as down (default: 30)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their flags to the parser of `slurmddp sandbox`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, purpose in ACTIONS.items():
        action = actions.add_parser(name, help=purpose, description=purpose)
        action.add_argument("--name", default="default", help="name of the sandbox, if you run several")
        action.add_argument(
            "--dir", type=Path, help="its folder (default: ~/.local/state/slurmddp/sandbox/NAME)"
        )
        if name == "up":
            _add_sizes(action)

        if name == "env":
            action.add_argument(
                "--unset", action="store_true", help="print the lines that undo the selection"
            )


def _add_sizes(up: argparse.ArgumentParser) -> None:
    """Add the flags of `slurmddp sandbox up`."""
    for name, purpose in SIZES.items():
        flag = f"--{name.removesuffix('_s').replace('_', '-')}"
        up.add_argument(flag, dest=name, type=int, metavar="N", help=purpose)

    up.add_argument(
        "--shared",
        choices=SHARED,
        help="mount a folder on each node through this file system, with its caches",
    )
    up.add_argument(
        "--folder", type=Path, dest="shared_folder", help="the folder to mount (default: the current folder)"
    )
    up.add_argument(
        "--mount-options",
        metavar="OPTIONS",
        help="options of these mounts, such as acdirmin=60 for nfs, separated by commas",
    )
    up.add_argument(
        "--accounting",
        action="store_true",
        default=None,
        help="also start slurmdbd and a MariaDB, for sacct",
    )
    up.add_argument(
        "--no-namespaces",
        action="store_false",
        dest="namespaces",
        default=None,
        help="put all nodes into one network namespace (always so without root)",
    )


def run(args: argparse.Namespace) -> int:
    """Start, stop or show a sandbox, or print the lines that select it; return the exit code."""
    if args.action == "up":
        return _up(args)

    sandbox = Sandbox(args.name, root=args.dir)
    if args.action == "down":
        if sandbox.down():
            print(f"The sandbox {args.name!r} was stopped and removed.")
        else:
            print(f"There was no sandbox {args.name!r}.")
        return EXIT_FINISHED
    if args.action == "status":
        return _status(sandbox)

    if args.unset:
        lines = unset_lines(os.environ)
    else:
        lines = [f"# The sandbox has {describe(sandbox.plan)}.", *export_lines(sandbox.environment())]
    print("\n".join(lines))

    return EXIT_FINISHED


def _up(args: argparse.Namespace) -> int:
    """Start the sandbox, and print how to use it; return the exit code."""
    given = {name: value for name, value in vars(args).items() if name not in ("action", "name", "dir")}
    if args.shared:
        given["shared_folder"] = args.shared_folder or Path()
    sandbox = Sandbox(args.name, root=args.dir, **given)
    started = sandbox.up()
    flags = _flags(args)
    print(f"The sandbox {args.name!r} {'is up' if started else 'was up already'}: {describe(sandbox.plan)}.")
    print(f'Select it in this shell:     eval "$(slurmddp sandbox env{flags})"')
    print("Train on it:                 slurmddp train +cluster=sandbox")
    print(f"Stop and remove it:          slurmddp sandbox down{flags}")

    return EXIT_FINISHED


def _flags(args: argparse.Namespace) -> str:
    """Return the flags `--name` and `--dir` for another command on the same sandbox; empty by default."""
    flags = ""
    if args.name != "default":
        flags += f" --name {args.name}"
    if args.dir:
        flags += f" --dir {shlex.quote(str(args.dir.absolute()))}"

    return flags


def _status(sandbox: Sandbox) -> int:
    """Print the daemons that don't run, the states of the nodes, and the number of jobs.

    Returns:
        `EXIT_FINISHED` if the sandbox is healthy, else `EXIT_SLURM`.
    """
    status = sandbox.status()
    print(f"The sandbox {sandbox.request.name!r} in {sandbox.root}: {describe(sandbox.plan)}.")
    dead = ", ".join(name for name, alive in status.daemons.items() if not alive)
    print(f"Not running: {dead}." if dead else f"All {len(status.daemons)} daemons run.")
    for node, state in status.nodes.items():
        print(f"  {node:<24} {state}")

    if not status.nodes:
        print("SLURM does not answer. Run `slurmddp sandbox down`, then `slurmddp sandbox up`.")
    else:
        print(f"Jobs: {len(sandbox.jobs())}.")

    others = [name for name in names(os.environ) if name != sandbox.request.name]
    if others:
        print(f"Other sandboxes: {', '.join(others)}.")

    return EXIT_FINISHED if status.healthy else EXIT_SLURM
