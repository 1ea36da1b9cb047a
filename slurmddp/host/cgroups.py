"""Control groups of this process: limits on memory and processor time, and out-of-memory kills.

SLURM and containers limit a job by control groups. No other module reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Smallest number of bytes that means no limit: cgroups version 1 writes a number of this size."""
_SHARE = 0.5
"""Fraction of the free memory that copies may take: the first step still has to allocate its activations."""
_MEMORY_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
"""Files with memory limits. Above memory.high the kernel slows processes extremely, but kills none."""
_MEMORY_USE = {
    1: ("memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.current", "inactive_file"),
}
"""The file with the bytes in use, and the line of memory.stat with the bytes that the kernel can free."""
_OOM_COUNT = {1: "memory.oom_control", 2: "memory.events"}
_CPU_QUOTA = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


@dataclass(frozen=True)
class ControlGroup:
    """The control group (cgroup) of this process for the controller `memory` or `cpu`."""

    version: int
    folders: tuple[Path, ...]
    """Folders of the group and of all groups above it, upwards; only the topmost folder if not `visible`."""
    visible: bool = True
    """False in a container that names the group by a path outside the mounted part of the hierarchy."""


def own_group(controller: str, root: Path = _ROOT) -> ControlGroup | None:
    """Return the control group of this process for `controller`; None if its hierarchy is not mounted.

    Args:
        controller: `memory` or `cpu`.
        root: the folder that holds the host's `proc` and `sys`.
    """
    topmost: ControlGroup | None = None
    with suppress(OSError, ValueError):
        groups = _groups(_lines(root / "proc/self/cgroup"), controller)
        mountinfo = _lines(root / "proc/self/mountinfo")

        # Version 1 comes first: on a host with both versions, it controls what /proc/self/cgroup lists for
        # it.
        for version, group in sorted(groups.items()):
            for first, mount in _mounts(mountinfo, version, controller):
                top = root / mount.lstrip("/")
                if group.is_relative_to(first) and ".." not in group.parts:
                    folder = top / group.relative_to(first)
                    above = [parent for parent in folder.parents if parent.is_relative_to(top)]
                    return ControlGroup(version, (folder, *above))
                topmost = topmost or ControlGroup(version, (top,), visible=False)
    return topmost


def _lines(path: Path) -> list[str]:
    # fsdecode, because names of groups and mounts may be invalid UTF-8.
    return list(filter(None, os.fsdecode(path.read_bytes()).split("\n")))


def _groups(cgroup: list[str], controller: str) -> dict[int, PurePosixPath]:
    """Return, by version, the group of a controller in the lines `cgroup` of /proc/self/cgroup."""
    groups = {}
    for line in cgroup:
        number, controllers, name = line.split(":", 2)
        if controller in controllers.split(","):
            groups[1] = PurePosixPath(name)
        # The line with number 0 is the single hierarchy of version 2.
        elif number == "0":
            groups[2] = PurePosixPath(name)
    return groups


def _mounts(mountinfo: list[str], version: int, controller: str) -> Iterator[tuple[str, str]]:
    """Yield, for each mount of a controller's hierarchy, the group at its root and the folder of the mount.

    Args:
        mountinfo: the lines of /proc/self/mountinfo.
        version: the cgroup version, 1 or 2.
        controller: `memory` or `cpu`; ignored for version 2.
    """
    for line in mountinfo:
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if version == 2:
            is_hierarchy = kind == "cgroup2"
        else:
            is_hierarchy = kind == "cgroup" and controller in options.split(",")

        if is_hierarchy:
            _, _, _, first, mount, *_ = fields.split(" ")
            yield first, mount


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the smallest CPU quota of the group and the groups above it, in CPUs; None without a limit."""
    group = own_group("cpu", root)
    if group is None:
        return None

    limits: list[float] = []
    for folder in group.folders:
        # Version 2 writes `max` for no limit, which is no number.
        with suppress(OSError, ValueError, ZeroDivisionError):
            texts = [(folder / name).read_text() for name in _CPU_QUOTA[group.version]]
            quota, period = map(float, " ".join(texts).split())
            # Version 1 writes -1 for no limit.
            if quota > 0:
                limits.append(quota / period)
    return min(limits, default=None)


def copies_that_fit(size: int, available: int, wanted: int = 2) -> int:
    """Return the number of copies of `size` bytes that may take `_SHARE` of `available`; at most `wanted`."""
    return min(wanted, int(_SHARE * available) // max(1, size))


def available_bytes(root: Path = _ROOT) -> int:
    """Return the number of bytes that are left below the limits of the control groups and of the host."""
    available = [_available_on_host(root)]
    group = own_group("memory", root)
    # The limits of all groups above the process's own group hold as well.
    if group is not None:
        available += [size for folder in group.folders for size in _available_in(folder, group.version)]
    return max(0, min(available))


def _available_on_host(root: Path) -> int:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Without /proc/meminfo, this very large number leaves the decision to the limits of the groups.
    return 1 << 62


def _available_in(folder: Path, version: int) -> list[int]:
    """Return, for each memory limit of a group, the bytes that are left; empty without a readable limit."""
    limits = _read_limits(folder / name for name in _MEMORY_LIMITS[version])
    usage, cache = _MEMORY_USE[version]
    with suppress(OSError, ValueError):
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The cache is added: the bytes in use include the page cache, which the kernel frees when memory is
        # short.
        return [limit - used + int(stat.get(cache, 0)) for limit in limits]
    return []


def _read_limits(paths: Iterable[Path]) -> list[int]:
    """Return the limits in files, in bytes; files that are missing or mean "no limit" are left out."""
    limits = []
    for path in paths:
        # Version 2 writes `max` for no limit, which is no number.
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            if limit < _UNLIMITED:
                limits.append(limit)
    return limits


@dataclass(frozen=True)
class OomCounter:
    """A file in which the kernel counts out-of-memory kills, and the files of the limits that cause them."""

    file: Path
    limits: tuple[Path, ...] = ()

    def read(self) -> int | None:
        """Return the number of kills so far; None if the kernel does not count them in this file."""
        with suppress(OSError, ValueError):
            # The count is called oom_kill in memory.events, memory.oom_control and vmstat alike.
            for line in self.file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return None

    def limit_bytes(self) -> int | None:
        """Return the limit of the memory of all processes of the group, in bytes; None without a limit."""
        return min(_read_limits(self.limits), default=None)


def oom_counters(root: Path = _ROOT) -> list[OomCounter]:
    """Return the counters of out-of-memory kills of this process's group, the groups above, and the host."""
    group = own_group("memory", root)
    counters = []
    if group is not None and group.visible:
        limits = tuple(folder / _MEMORY_LIMITS[group.version][0] for folder in group.folders)
        # The groups above follow, for the case that the kernel counts nothing for the group itself.
        counters = [OomCounter(folder / _OOM_COUNT[group.version], limits) for folder in group.folders]
    return [*counters, OomCounter(root / "proc/vmstat")]


class OomWatch:
    """Counts out-of-memory kills since `begin`: without this count, such a kill looks like a `kill -9`.

    Ranks are in the control group of their agent, so the agent reads the count of its own group. Without a
    group it reads the count of the whole host.
    """

    def __init__(self, counters: list[OomCounter] | None = None) -> None:
        if counters is None:
            counters = oom_counters()
        self._counter = next((counter for counter in counters if counter.read() is not None), None)
        self.begin()

    def begin(self) -> None:
        """Start counting: kills before this call do not count."""
        self._before = None
        if self._counter is not None:
            self._before = self._counter.read()

    def verdict(self) -> str | None:
        """Return a phrase about the kills since `begin`, such as "at the limit of 4 GiB".

        The phrase is empty if there was no such kill, and None if the kernel does not count them.
        """
        if self._counter is None or self._before is None:
            return None
        count = self._counter.read()
        if count is None:
            return None
        if count <= self._before:
            return ""

        limit = self._counter.limit_bytes()
        if limit:
            return f"at the limit of {limit / 2**30:.3g} GiB"
        return "when this host was short of memory"
