"""The setting of earlier versions by which agents started torchrun, and the command in its place."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.errors import ConfigError

REMOVED_TORCHRUN = "program.torchrun"
_MEETING = "--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT"


def torchrun_command(ranks: object, program: Sequence[str], *, has_nodes: bool) -> list[str]:
    """Return the command that starts a program by torchrun, to stand behind `slurmddp run -n 1 --`.

    Args:
        ranks: the number of ranks on each node, or a word that torchrun knows, such as `auto`.
        program: `[-m] PROGRAM ARGUMENT...`.
        has_nodes: whether the torchruns of several nodes meet.
    """
    if not has_nodes:
        return ["torchrun", "--standalone", f"--nproc-per-node={ranks}", *program]
    start = f'exec torchrun --nnodes=$WORLD_SIZE {_MEETING} --nproc-per-node={ranks} "$@"'
    return ["sh", "-c", start, "torchrun", *program]


def removed_torchrun() -> ConfigError:
    """Return the error for the setting in a command or a file."""
    return ConfigError(
        f"`{REMOVED_TORCHRUN}` is gone: torchrun runs as any other command.",
        hint="Say slurmddp run -n 1 -- torchrun --standalone --nproc-per-node=N FILE.py; "
        "docs/own-script.md has the command for several nodes.",
    )
