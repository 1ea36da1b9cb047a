"""Refuse the removed setting `program.torchrun`, and build the command that takes its place."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.errors import ConfigError

REMOVED_TORCHRUN = "program.torchrun"
"""The setting of earlier versions by which agents started torchrun."""
_MEETING = "--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"


def torchrun_command(ranks: object, program: Sequence[str], *, has_nodes: bool) -> list[str]:
    """Return the command that starts a program by torchrun, to be written after `slurmddp run -n 1 --`.

    Args:
        ranks: the value of torchrun's `--nproc-per-node`: a number of ranks, or a word such as `auto`.
        program: `[-m] PROGRAM ARGUMENT...`.
        has_nodes: whether the run has several nodes, so that torchrun needs the address of a rendezvous.
    """
    if not has_nodes:
        return ["torchrun", "--standalone", f"--nproc-per-node={ranks}", *program]

    # A shell starts torchrun, so that it replaces $WORLD_SIZE, $MASTER_ADDR and $MASTER_PORT on each node.
    start = f'exec torchrun --nnodes=$WORLD_SIZE {_MEETING} --nproc-per-node={ranks} "$@"'
    return ["sh", "-c", start, "torchrun", *program]


def removed_torchrun() -> ConfigError:
    """Return the error for the removed setting `program.torchrun`, in a command line or a file."""
    return ConfigError(
        f"`{REMOVED_TORCHRUN}` is no longer a setting: torchrun runs like any other command.",
        hint="Write `slurmddp run -n 1 -- torchrun --standalone --nproc-per-node=N FILE.py`; "
        "docs/guides/torchrun.md shows the command for several nodes.",
    )
