"""Build the hosts of a sandbox: namespaces and an address per node, a bridge, and names in /etc/hosts.

An idle process holds each namespace, not a mount under /run/netns. So the kernel removes the namespace and
its interfaces when the last process of the node ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.host.process import PROC
from slurmddp.sandbox import processes
from slurmddp.sandbox.machine import HOSTS_FILE, find_program
from slurmddp.sandbox.plan import RECORD, Plan, SandboxNode

MARK = "slurmddp sandbox"
HOLD = 'hostname "$0" && exec sleep infinity'


def holder(node: SandboxNode) -> str:
    """Return the name of the record of the process that keeps a node's namespaces open."""
    return f"host-{node.name}"


def enter(plan: Plan, node: SandboxNode, environment: Mapping[str, str]) -> list[str]:
    """Return the command prefix that runs a command in the namespaces of `node`; empty if it has none.

    Raises:
        SlurmError: the node is not up.
    """
    if not plan.namespaces:
        return []

    entry = processes.recorded(plan.root).get(holder(node))
    if entry is None or not entry.alive():
        raise SlurmError(f"The node {node.name} is not up.", hint="Run slurmddp sandbox status.")

    nsenter = find_program("nsenter", environment["PATH"])
    return [nsenter, f"--target={entry.pid}", *_kinds(plan), "--"]


def _kinds(plan: Plan) -> list[str]:
    """Return the options of nsenter and unshare for the kinds of namespaces that each node has."""
    kinds = ["--net", "--uts"]
    if plan.request.shared:
        kinds.append("--mount")
    return kinds


def namespaces_of(plan: Plan) -> frozenset[str]:
    """Return the network namespaces of nodes that are up, as /proc names them; empty without namespaces."""
    if not plan.namespaces:
        return frozenset()

    records = processes.recorded(plan.root)
    names = set()
    for node in plan.nodes:
        entry = records.get(holder(node))
        if entry is not None and entry.alive():
            names.add(processes.network_namespace(entry.pid))

    # A holder that has not entered its namespace yet is still in the namespace of this process, whose other
    # processes do not belong to the sandbox.
    names -= {None, processes.network_namespace(os.getpid())}
    return frozenset(name for name in names if name is not None)


def build(plan: Plan, environment: Mapping[str, str]) -> None:
    """Create the namespaces of the nodes, connect them, and write their names to /etc/hosts."""
    _refuse_taken_names(plan)
    ip(environment, [f"link add {plan.bridge} type bridge"])
    pids = {node: _start_holder(plan, node, environment) for node in plan.nodes}

    lines = [f"addr add {plan.controller_address}/24 dev {plan.bridge}", f"link set {plan.bridge} up"]
    for node, pid in pids.items():
        lines += [
            f"link add {node.link} type veth peer name eth0 netns {pid}",
            f"link set {node.link} master {plan.bridge} up",
        ]
    ip(environment, lines)

    for node in plan.nodes:
        commands = [f"addr add {node.address}/24 dev eth0", "link set lo up", "link set eth0 up"]
        ip(environment, commands, prefix=enter(plan, node, environment))
        if plan.request.link_mbit:
            _limit_link(plan, node, environment)

    edit_hosts(plan.root, [f"{node.address}\t{node.name}" for node in plan.nodes])


def _limit_link(plan: Plan, node: SandboxNode, environment: Mapping[str, str]) -> None:
    """Limit the bandwidth at both ends of a node's link: each end delays the packets that it sends."""
    # The burst is the number of bytes that the link sends in 10 ms, but at least a segment of the kernel's
    # offloading (64 kB). A packet waits for 50 ms at most.
    burst = max(64_000, plan.request.link_mbit * 1_250)
    shape = f"root tbf rate {plan.request.link_mbit}mbit burst {burst}b latency 50ms"
    tc = find_program("tc", environment["PATH"])
    for prefix, device in (([], node.link), (enter(plan, node, environment), "eth0")):
        command = [*prefix, tc, "qdisc", "add", "dev", device, *shape.split()]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if result.returncode != 0:
            raise SlurmError(
                f"The link of {node.name} could not be limited: {result.stderr.strip()}",
                hint="Load the kernel module sch_tbf, or leave out --link-mbit.",
            )


def _start_holder(plan: Plan, node: SandboxNode, environment: Mapping[str, str]) -> int:
    """Start the process that holds the namespaces of a node, and wait until it has entered them."""
    # unshare makes the mounts of a new mount namespace private.
    command = ["unshare", *_kinds(plan), "/bin/sh", "-c", HOLD, node.name]
    entry = processes.start(holder(node), command, root=plan.root, environment=environment)

    # The process becomes `sleep` after it has entered the namespaces.
    deadline = time.monotonic() + 10
    while _command_name(entry.pid) != "sleep":
        if not entry.alive() or time.monotonic() > deadline:
            raise SlurmError(
                f"No network namespace could be created for {node.name}: {_output(plan, node)}",
                hint="Leave the namespaces out with --no-namespaces.",
            )
        time.sleep(0.005)

    return entry.pid


def _command_name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _output(plan: Plan, node: SandboxNode) -> str:
    return (plan.root / "log" / f"{holder(node)}.out").read_text(encoding="utf-8", errors="replace").strip()


def remove(plan: Plan, environment: Mapping[str, str]) -> None:
    """Remove bridge, links and host names, as far as they exist."""
    if not plan.namespaces:
        return

    # An interrupted start may not have created all of these links.
    for link in (plan.bridge, *(node.link for node in plan.nodes)):
        if Path("/sys/class/net", link).exists():
            ip(environment, [f"link delete {link}"], must_work=False)

    edit_hosts(plan.root, [])


def ip(
    environment: Mapping[str, str],
    lines: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    must_work: bool = True,
) -> None:
    """Run commands of the program `ip`, which configures network interfaces.

    Args:
        environment: the variables of the daemons, for PATH.
        lines: the commands, without the name of the program.
        prefix: a command that runs `ip` on a node (`enter`); empty: on this machine.
        must_work: whether to raise SlurmError if a command fails.
    """
    command = [*prefix, find_program("ip", environment["PATH"]), "-batch", "-"]
    result = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False, timeout=60
    )
    if must_work and result.returncode != 0:
        raise SlurmError(
            f"The network of the nodes could not be created: {result.stderr.strip()}",
            hint="Leave the namespaces out with --no-namespaces.",
        )


def _refuse_taken_names(plan: Plan) -> None:
    """Raise ConfigError if /etc/hosts has names of the nodes outside of this sandbox's block."""
    text = without_stale(without_block(HOSTS_FILE.read_text(encoding="utf-8"), plan.root))
    known_names: set[str] = set()
    for line in text.splitlines():
        known_names.update(line.partition("#")[0].split()[1:])

    taken = {node.name for node in plan.nodes} & known_names
    if taken:
        raise ConfigError(
            f"{HOSTS_FILE} already contains {', '.join(sorted(taken))}, the names that the nodes would get.",
            hint="Give this sandbox another --name, which its nodes are named after, or remove the other "
            "sandbox with slurmddp sandbox down --dir FOLDER: a comment in that file names FOLDER.",
        )


def edit_hosts(root: Path, lines: Sequence[str]) -> None:
    """Replace the block of the sandbox in /etc/hosts by `lines`; remove the block if there are none."""
    # In a container the file is often a mount, so that it can't be replaced by a rename.
    with HOSTS_FILE.open("r+", encoding="utf-8") as stream:
        before = stream.read()
        after = with_block(without_stale(before), root, lines)
        if after != before:
            stream.seek(0)
            stream.write(after)
            stream.truncate()


def with_block(text: str, root: Path, lines: Sequence[str]) -> str:
    """Return the text of a hosts file with the block of `root` replaced by `lines`."""
    rest = without_block(text, root)
    if not lines:
        return rest

    newline = "" if not rest or rest.endswith("\n") else "\n"
    block = [f"# >>> {MARK} {root}", *lines, f"# <<< {MARK} {root}"]

    return rest + newline + "\n".join(block) + "\n"


def without_block(text: str, root: Path) -> str:
    """Return the text of a hosts file without the block of `root`."""
    edge = re.escape(f"{MARK} {root}")
    return re.sub(rf"^# >>> {edge}\n(?:.*\n)*?# <<< {edge}\n", "", text, flags=re.M)


def without_stale(text: str) -> str:
    """Return the text of a hosts file without the blocks of sandboxes whose folder was deleted."""
    for folder in re.findall(rf"^# >>> {MARK} (.+)$", text, flags=re.M):
        if not Path(folder, RECORD).exists():
            text = without_block(text, Path(folder))
    return text
