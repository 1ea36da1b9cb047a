"""What this machine tells about the processors of a process: where they lie, and how many it may use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from slurmddp.host.cpus import Cpus, parse_cpu_list

_ROOT = Path("/")


def read_cpus(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Cpus:
    """Return the processors of this process; what the machine does not tell is left out."""
    own = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    return Cpus(own, _numa_nodes(root), _cores(root, own), _quota(root))


def numa_node_of(pci_address: str, root: Path = _ROOT) -> int | None:
    """Return the NUMA node beside which the device `0000:3b:00.0` lies; None where the machine is silent."""
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


def _quota(root: Path) -> float | None:
    """Return the smallest limit on processor time in the control groups of this process."""
    limits = []
    for file in _quota_files(root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            limit = file.read_text().split()  # v2: both numbers in one file; v1: `-1` for none
            period = limit[1] if len(limit) > 1 else file.with_name("cpu.cfs_period_us").read_text()
            if float(limit[0]) > 0:
                limits.append(float(limit[0]) / float(period))
    return min(limits, default=None)


def _quota_files(root: Path) -> Iterator[Path]:
    """Yield the files that may limit this process, of its group and of those around it.

    A container shows its own group as the top, and may name it by a path that leads nowhere: the top counts.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0":
                top, limit = root / "sys/fs/cgroup", "cpu.max"
            elif "cpu" in controllers.split(","):
                top, limit = root / "sys/fs/cgroup/cpu", "cpu.cfs_quota_us"
            else:
                continue
            group = top / name.strip("/")
            yield from (folder / limit for folder in (group, *group.parents) if folder.is_relative_to(top))
