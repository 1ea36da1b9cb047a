"""Choose the processors of each rank of a node, and its number of threads.

An agent and its ranks may run on all processors that SLURM gives to the job on the node. Without a choice,
the ranks would move between sockets, and each rank would start as many threads as there are processors for
all ranks together.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.environments.names import BIND_VARIABLE, RESTART_COUNT_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError
from slurmddp.host.cgroups import cpu_quota

_PERSONAL = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which a person binds threads to processors; if one is set, slurmddp binds no rank."""
_RANKS_PER_CPU = 16
_RANKS_ANYWHERE = 64


def most_ranks(cpus: int) -> int:
    """Return the largest number of ranks that may share `cpus` CPUs."""
    # For a small test, more ranks than CPUs are allowed. A number beyond this limit is a mistake: the
    # processes could use up the memory of a machine that other people work on.
    return max(_RANKS_PER_CPU * cpus, _RANKS_ANYWHERE)


def refuse_crowd(ranks: int, cpus: int, given: str, place: str, machines: int = 1) -> None:
    """Raise ConfigError if there are more ranks than may share the CPUs (see `most_ranks`).

    Args:
        ranks: the number of ranks on all machines.
        cpus: the number of CPUs of each machine.
        given: the setting as a person typed it, with `{}` in place of the number of ranks.
        place: the name of a machine in the message, such as "this machine".
        machines: the number of machines.
    """
    limit = most_ranks(cpus)
    if ranks > limit * machines:
        plural = "" if cpus == 1 else "s"
        raise ConfigError(
            f"{given.format(ranks)} is too much: {place} has {cpus} CPU{plural}, for at most {limit} ranks.",
            hint=f"Use {given.format(limit * machines)} or fewer.",
        )


@dataclass(frozen=True)
class Cpus:
    """The CPUs that a process may use, with their NUMA nodes and cores."""

    allowed: frozenset[int]
    numa: Mapping[int, int] = field(default_factory=dict)
    """The NUMA node of each processor, if known."""
    core: Mapping[int, int] = field(default_factory=dict)
    """The first hyper-thread of each processor's core; an unlisted processor counts as a core of its own."""
    quota: float | None = None
    """The limit of a control group on processor time, as a number of processors."""

    @property
    def usable(self) -> int:
        """The number of CPUs that can work at once: allowed by the affinity and by the quota, at least 1."""
        count = len(self.allowed)
        if self.quota is not None:
            count = min(count, int(self.quota))
        return max(1, count)

    @property
    def on_machine(self) -> int | None:
        """The number of CPUs of the machine; None if unknown."""
        return len(self.numa) or None

    def cores(self) -> list[tuple[int, ...]]:
        """Return the allowed CPUs of each core (its hyper-threads), sorted by NUMA node and core."""
        cores: dict[tuple[int, int], list[int]] = {}
        for cpu in sorted(self.allowed):
            place = (self.numa.get(cpu, 0), self.core.get(cpu, cpu))
            cores.setdefault(place, []).append(cpu)
        return [tuple(cores[place]) for place in sorted(cores)]


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers in a list of CPUs in the kernel's format, such as `0-3,8,10-11`."""
    numbers: set[int] = set()
    # Empty parts are ignored, because the list of a NUMA node without CPUs is empty.
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def may_bind(info: RankInfo, environ: Mapping[str, str], cpus: Cpus) -> bool:
    """Return whether ranks may be bound to CPUs: no other job uses these CPUs, no person has bound them."""
    if environ.get(BIND_VARIABLE, "").lower() in ("off", "0", "no", "false"):
        return False

    text = environ.get("SLURM_CPUS_ON_NODE", "")
    granted = int(text) if text.isdecimal() else 0
    # Without confinement by SLURM, a process may run on the CPUs of other jobs. Two jobs that bind their
    # ranks from the first CPU on would then share CPUs, as would two runs on a laptop. SLURM grants more CPUs
    # than the machine has if several nodes of a sandbox share it.
    confined = len(cpus.allowed) <= granted <= (cpus.on_machine or granted)

    by_agent = RESTART_COUNT_VARIABLE in environ and info.environment == "slurm" and not info.emulated
    return by_agent and confined and not any(environ.get(name) for name in _PERSONAL)


def share_of(cpus: Cpus, local_rank: int, ranks: int, gpu_numa: Sequence[int | None] = ()) -> frozenset[int]:
    """Return the CPUs to which a rank is bound: adjacent whole cores that no other rank of the node has.

    If there are more ranks than cores, each rank gets hyper-threads. If there are more ranks than
    hyper-threads, all ranks share all CPUs.

    Args:
        cpus: the CPUs of the node.
        local_rank: the local rank of the rank.
        ranks: the number of ranks on the node.
        gpu_numa: the NUMA node of each rank's GPU, by local rank. If all are known, and each NUMA node has a
            core for each of its ranks, each rank gets cores of the NUMA node of its GPU.
    """
    cores = cpus.cores()

    if len(gpu_numa) == ranks and None not in gpu_numa:
        beside = {node: [core for core in cores if cpus.numa.get(core[0]) == node] for node in gpu_numa}
        if all(len(beside[node]) >= gpu_numa.count(node) for node in beside):
            node = gpu_numa[local_rank]
            return _part(beside[node], gpu_numa[:local_rank].count(node), gpu_numa.count(node))

    if ranks > len(cores):
        cores = [(cpu,) for core in cores for cpu in core]
    return _part(cores, local_rank, ranks) or cpus.allowed


def _part(cores: Sequence[tuple[int, ...]], index: int, parts: int) -> frozenset[int]:
    first = index * len(cores) // parts
    last = (index + 1) * len(cores) // parts
    return frozenset(cpu for core in cores[first:last] for cpu in core)


def threads_on(cpus: Cpus, share: Collection[int]) -> int:
    """Return the number of threads for a rank that is bound to the CPUs `share`: one for each core."""
    return max(1, len({cpus.core.get(cpu, cpu) for cpu in share}))


def shortage(info: RankInfo, cpus: Cpus, together: bool) -> str | None:
    """Return a warning if fewer CPUs can be used than SLURM has promised; None if there are enough.

    Args:
        info: this rank.
        cpus: the CPUs of this process.
        together: whether `cpus` are for all ranks of the node together, as in an agent.
    """
    if info.cpus is None or info.emulated:
        return None

    promised = info.cpus
    receiver = "this rank"
    if together:
        promised *= info.local_world_size
        receiver = "the ranks of this node"
    if cpus.usable >= promised:
        return None

    if cpus.on_machine == cpus.usable:
        limit = "this machine has"
        advice = "the configuration of its partition in SLURM claims more CPUs than the machine has"
    elif cpus.usable == len(cpus.allowed):
        limit = "the processes are bound to"
        advice = "`srun` needs the job's `--cpus-per-task` too"
    else:
        limit = "a control group (cpu.max) lets them use"
        advice = "raise the limit of the container"
    return f"SLURM promises {promised} CPU(s) to {receiver}, but {limit} {cpus.usable}: {advice}."


_ROOT = Path("/")


def read_cpus(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Cpus:
    """Return the CPUs of this process, with their NUMA nodes, cores and quota as far as they are known.

    Args:
        root: the folder that holds the host's `proc` and `sys`.
        allowed: the numbers of the CPUs; None for the affinity of this process.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    cpus = frozenset(allowed)
    return Cpus(cpus, _numa_nodes(root), _cores(root, cpus), cpu_quota(root))


def numa_node_of(pci_address: str, root: Path = _ROOT) -> int | None:
    """Return the NUMA node of a PCI device such as `0000:3b:00.0`; None if it is unknown."""
    with suppress(OSError, ValueError):
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
        # The kernel writes -1 for a device without a NUMA node.
        return node if node >= 0 else None
    return None


def _numa_nodes(root: Path) -> dict[int, int]:
    """Return the NUMA node of each CPU; empty if the kernel or a container does not show them."""
    nodes: dict[int, int] = {}
    for file in root.glob("sys/devices/system/node/node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            number = int(file.parent.name.removeprefix("node"))
            nodes.update(dict.fromkeys(parse_cpu_list(file.read_text()), number))
    return nodes


def _cores(root: Path, allowed: Iterable[int]) -> dict[int, int]:
    """Return, for each CPU, the first hyper-thread of its core; CPUs of unknown cores are left out."""
    cores: dict[int, int] = {}
    for cpu in allowed:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        with suppress(OSError, ValueError):
            cores[cpu] = min(parse_cpu_list(file.read_text()))
    return cores
