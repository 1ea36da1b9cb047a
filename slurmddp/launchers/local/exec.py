"""Start any program as the ranks of one job, as mpiexec does.

On one machine the nodes are emulated. In an allocation of SLURM, srun starts this module once on each node,
and the module starts the ranks of its node. In both cases a rank gets the variables of torchrun and of MPI,
and the first failure ends all ranks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmddp.environments.detect import detect
from slurmddp.environments.emit import rank_environment
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.srun_options import STEP_OPTIONS
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError, SlurmError
from slurmddp.host import process
from slurmddp.host.address import Address, find_rank_zero
from slurmddp.host.cpu_shares import refuse_crowd
from slurmddp.host.ports import candidate_ports, free_address, listen
from slurmddp.launchers.local.allocation import current
from slurmddp.launchers.local.launch import FAULTHANDLER_VARIABLE
from slurmddp.launchers.local.script_run import ScriptRun
from slurmddp.runs.text_format import counted

_EVERY_ADDRESS = Address(socket.AF_INET, "0.0.0.0")
"""The address to probe ports on: a port that is free on it is free on any address that the ranks use."""


def run(command: Sequence[str], ranks: int, nodes: int | None) -> int:
    """Run `command` as `ranks` ranks on `nodes` nodes; return the first failure's exit code, or 0.

    In an allocation this process becomes srun and does not return.

    Args:
        command: a program and its arguments.
        ranks: the number of ranks on all nodes.
        nodes: the number of nodes; None: all nodes of the allocation, or one node.

    Raises:
        ConfigError: there is no such program, the ranks don't fill the nodes evenly, or they are too many.
        SlurmError: srun is missing.
    """
    program = _program(command[0])
    allocation = current(os.environ)
    if not nodes:
        nodes = allocation.nodes if allocation else 1
    if ranks % nodes:
        raise ConfigError(
            f"-n {ranks} ranks can't be divided evenly among {counted(nodes, 'node')}.",
            hint=f"Use a multiple of the number of nodes, such as -n {max(1, ranks // nodes) * nodes}.",
        )

    if allocation is not None:
        if allocation.cpus is not None:
            refuse_crowd(ranks, allocation.cpus, "-n {}", "a node of this allocation", nodes)
        allocation.require(nodes, f"--nodes {nodes}")
        return _in_allocation(command, ranks, nodes)

    refuse_crowd(ranks, process.usable_cpus(), "-n {}", "this machine")
    per_node = ranks // nodes
    launch_id = secrets.token_hex(8)
    infos = [_emulated(node_rank, nodes, launch_id) for node_rank in range(nodes)]
    master = free_address(infos[0], "exec")
    environments = [
        _environment(info, local_rank, per_node, master) for info in infos for local_rank in range(per_node)
    ]
    return _run([program, *command[1:]], environments)


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node and return their exit code; srun starts this on each node.

    Args:
        argv: `MASTER_PORT RANKS_PER_NODE PROGRAM ARGUMENT...`. If empty, print a port that is free on this
            node instead.
    """
    node = detect(os.environ)
    if not argv:
        with listen(_EVERY_ADDRESS, candidate_ports(f"{node.launch_id} exec")) as probe:
            print(probe.getsockname()[1])
        return EXIT_FINISHED

    port, count, program, *arguments = argv
    per_node = int(count)
    master = (find_rank_zero(node)[0].text, int(port))
    environments = [_environment(node, local_rank, per_node, master) for local_rank in range(per_node)]
    code = _run([_program(program), *arguments], environments)
    # srun returns the largest exit code of its tasks. After a failure it ends the other nodes, whose code is
    # then 143. Return 1 for such codes, so that they don't hide the code of the failure.
    return EXIT_FAILED if code > 128 else code


def _run(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    stdin = subprocess.DEVNULL
    # Ranks run in another session than this process, and so can't read from its terminal.
    if sys.stdin is not None and not sys.stdin.isatty():
        stdin = sys.stdin.fileno()
    ranks = range(int(environments[0]["WORLD_SIZE"]))
    return ScriptRun(command, environments, labelled=ranks, stdin=stdin).run()


def _program(name: str) -> str:
    """Return the path of a program that is on PATH or given by its path.

    Raises:
        ConfigError: there is no such program, or it is not executable.
    """
    path = shutil.which(name)
    if path is not None:
        return path

    if Path(name).is_file():
        hint = f"Make it executable: chmod +x {name}"
        if name.endswith(".py"):
            hint = f"Use `python {name}`."
        raise ConfigError(f"{name} is not executable.", hint=hint)
    if Path(name).is_dir():
        raise ConfigError(
            f"{name} is a folder, not a program.", hint="Give the path of a program in this folder."
        )
    raise ConfigError(
        f"There is no program {name!r} in this folder or on PATH.", hint="Give its path from this folder."
    )


def _in_allocation(command: Sequence[str], ranks: int, nodes: int) -> int:
    """Replace this process by srun, which starts this module on each node and so runs `main` there."""
    task = [*STEP_OPTIONS, "--ntasks-per-node=1"]
    this_module = [sys.executable, "-m", __name__]
    step = [f"--nodes={nodes}", f"--ntasks={nodes}", "--kill-on-bad-exit=1", "--unbuffered"]
    node = [*this_module, _free_port([*task, *this_module]), str(ranks // nodes), *command]
    sys.stdout.flush()
    os.execvp("srun", ["srun", *task, *step, *node])


def _free_port(task: Sequence[str]) -> str:
    """Return a port that is free on the first node of the allocation, as a string.

    A separate srun runs this module on that node.

    Args:
        task: the options of srun, and the command that starts this module.

    Raises:
        SlurmError: srun failed.
    """
    step = ["srun", "--nodes=1", "--ntasks=1", "--relative=0", *task]
    reply = subprocess.run(step, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if reply.returncode or not reply.stdout.strip().isdigit():
        raise SlurmError(
            f"srun could not find a free port on the first node: {reply.stderr.strip() or reply.stdout!r}.",
            hint="Try `srun --nodes=1 --ntasks=1 hostname` in this allocation.",
        )
    return reply.stdout.strip()


def _emulated(node_rank: int, nodes: int, launch_id: str) -> RankInfo:
    return RankInfo(
        environment="exec",
        rank=node_rank,
        node_rank=node_rank,
        world_size=nodes,
        nodes=nodes,
        hosts=("localhost",) * nodes,
        launch_id=launch_id,
    )


def _environment(node: RankInfo, local_rank: int, per_node: int, master: tuple[str, int]) -> dict[str, str]:
    """Return the environment of one rank, with the variables of torchrun, Open MPI and MPICH."""
    values = rank_environment(node, local_rank, per_node, os.environ)
    rank = values["RANK"]
    world_size = values["WORLD_SIZE"]
    values |= {
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "GROUP_RANK": values["NODE_RANK"],
        "GROUP_WORLD_SIZE": str(node.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RUN_ID": node.launch_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": world_size,
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMI_RANK": rank,
        "PMI_SIZE": world_size,
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(per_node),
        # The output of a rank goes through a pipe, into which Python would otherwise write in blocks.
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
        FAULTHANDLER_VARIABLE: os.environ.get(FAULTHANDLER_VARIABLE, "1"),
    }
    # One thread per rank, so that the ranks of a node don't compete for CPUs; torchrun does the same.
    if per_node > 1:
        values["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, **values}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
