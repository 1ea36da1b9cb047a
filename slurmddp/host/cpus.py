"""Choose the processors of each rank of a node, and its number of threads.

An agent and its ranks may run on all processors that SLURM gives to the job on the node. Without a choice the
ranks move between sockets, and each rank starts as many threads as all ranks together may run.
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
"""A person who sets one of these variables places the threads."""
_RANKS_PER_CPU, _RANKS_ANYWHERE = 16, 64


def most_ranks(cpus: int) -> int:
    """Return the number of ranks that may share `cpus` CPUs.

    A small trial may crowd a machine, as under mpiexec. A number beyond this limit is a mistake, and its
    processes could use up the memory of a machine that other people work on.
    """
    return max(_RANKS_PER_CPU * cpus, _RANKS_ANYWHERE)


def refuse_crowd(ranks: int, cpus: int, given: str, place: str, machines: int = 1) -> None:
    """Raise ConfigError if the ranks are more than may share the CPUs.

    Args:
        ranks: the number of ranks on all machines.
        cpus: the number of CPUs of each machine.
        given: the words that set the number, with `{}` in its place.
        place: the name of such a machine.
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
    """The processors of a process, and their place in the machine."""

    allowed: frozenset[int]
    numa: Mapping[int, int] = field(default_factory=dict)
    """The NUMA node of each processor, if known."""
    core: Mapping[int, int] = field(default_factory=dict)
    """The first hyper-thread of each processor's core; missing if the processor is the whole core."""
    quota: float | None = None
    """The limit of a control group on processor time, as a number of processors."""

    @property
    def usable(self) -> int:
        """The number of processors that can work at once."""
        return max(1, len(self.allowed) if self.quota is None else min(len(self.allowed), int(self.quota)))

    @property
    def on_machine(self) -> int | None:
        """The number of processors of the machine; None if unknown."""
        return len(self.numa) or None

    def cores(self) -> list[tuple[int, ...]]:
        """Return the processors by core, sorted by NUMA node."""
        found: dict[tuple[int, int], list[int]] = {}
        for cpu in sorted(self.allowed):
            found.setdefault((self.numa.get(cpu, 0), self.core.get(cpu, cpu)), []).append(cpu)
        return [tuple(found[place]) for place in sorted(found)]


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list in the kernel's format: `0-3,8,10-11`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def may_bind(info: RankInfo, environ: Mapping[str, str], cpus: Cpus) -> bool:
    """Return whether the processors of this process belong to the ranks of its node only.

    Without a control group or a binding by SLURM, a process may run on processors of other jobs. Two jobs
    that both bind from the first processor on would then share processors, as would two runs on a laptop.
    """
    if environ.get(BIND_VARIABLE, "").lower() in ("off", "0", "no", "false"):
        return False
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    granted = int(text) if text.isdecimal() else 0
    # SLURM grants more than the machine has if nodes of a sandbox share it.
    confined = len(cpus.allowed) <= granted <= (cpus.on_machine or granted)
    by_agent = RESTART_COUNT_VARIABLE in environ and info.environment == "slurm" and not info.emulated
    return by_agent and confined and not any(environ.get(name) for name in _PERSONAL)


def share_of(cpus: Cpus, local_rank: int, ranks: int, gpu_numa: Sequence[int | None] = ()) -> frozenset[int]:
    """Return the processors of one rank: whole adjacent cores that no other rank of the node has.

    With more ranks than cores each rank gets hyper-threads. With more ranks than these all ranks share all.

    Args:
        cpus: of the node.
        local_rank: of the rank.
        ranks: of the node.
        gpu_numa: the NUMA node of each rank's GPU. Each rank then gets cores of this NUMA node, if these
            suffice for all ranks.
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
    first, last = index * len(cores) // parts, (index + 1) * len(cores) // parts
    return frozenset(cpu for core in cores[first:last] for cpu in core)


def threads_on(cpus: Cpus, taken: Collection[int]) -> int:
    """Return the number of threads for the processors `taken`: one per core."""
    return max(1, len({cpus.core.get(cpu, cpu) for cpu in taken}))


def shortage(info: RankInfo, cpus: Cpus, together: bool) -> str | None:
    """Return a warning if fewer processors can be used than SLURM promises; None if they suffice.

    `together`: the processors are for all ranks of the node, as under an agent, not for this rank only.
    """
    if info.cpus is None or info.emulated:
        return None
    asked = info.cpus * (info.local_world_size if together else 1)
    if cpus.usable >= asked:
        return None
    if cpus.on_machine == cpus.usable:
        limit, advice = "this machine has", "the configuration of its partition claims more than there is"
    elif cpus.usable == len(cpus.allowed):
        limit, advice = "the processes are bound to", "`srun` needs the job's `--cpus-per-task` too"
    else:
        limit, advice = "a control group (cpu.max) lets them use", "raise the limit of the container"
    whom = "the ranks of this node" if together else "this rank"
    return f"SLURM promises {asked} CPU(s) to {whom}, but {limit} {cpus.usable}: {advice}."


_ROOT = Path("/")


def read_cpus(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Cpus:
    """Return the processors of this process, with the facts that the machine shows."""
    own = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    return Cpus(own, _numa_nodes(root), _cores(root, own), cpu_quota(root))


def numa_node_of(pci_address: str, root: Path = _ROOT) -> int | None:
    """Return the NUMA node of a PCI device such as `0000:3b:00.0`; None if the machine does not say."""
    with suppress(OSError, ValueError):
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _numa_nodes(root: Path) -> dict[int, int]:
    found: dict[int, int] = {}
    for file in root.glob("sys/devices/system/node/node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            number = int(file.parent.name.removeprefix("node"))
            found.update(dict.fromkeys(parse_cpu_list(file.read_text()), number))
    return found


def _cores(root: Path, allowed: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for cpu in allowed:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        with suppress(OSError, ValueError):
            found[cpu] = min(parse_cpu_list(file.read_text()))
    return found
