"""Control groups of this process: limits on memory and processor time, out-of-memory kills.

SLURM and containers limit a job by control groups. This module is the only one that reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Version 1 writes a number of about this size for `no limit`."""
_SHARE = 0.5
"""The share of the free memory that copies may take: copies precede the first step, activations follow."""
_MEMORY_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
"""Above memory.high the kernel does not kill a process, but slows it down to a crawl."""
_MEMORY_USE = {
    1: ("memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.current", "inactive_file"),
}
"""The file with the bytes in use, and the line of memory.stat with the bytes that the kernel can free."""
_OOM_COUNT = {1: "memory.oom_control", 2: "memory.events"}
_CPU_QUOTA = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


@dataclass(frozen=True)
class ControlGroup:
    """The control group of this process for one controller."""

    version: int
    folders: tuple[Path, ...]
    """Folders of the group and of all groups above it, upwards; only the topmost folder if not `visible`."""
    visible: bool = True
    """False in a container that names the group by a path outside of the mounted part of the hierarchy."""


def own_group(controller: str, root: Path = _ROOT) -> ControlGroup | None:
    """Return the control group that holds this process for `controller`; None if none is mounted.

    Args:
        controller: `memory` or `cpu`.
        root: the folder that holds the host's `proc` and `sys`.
    """
    topmost: ControlGroup | None = None
    with suppress(OSError, ValueError):
        # Names of groups and mounts are bytes of any encoding.
        cgroup, mounts = (
            os.fsdecode((root / "proc/self" / name).read_bytes()).split("\n")
            for name in ("cgroup", "mountinfo")
        )
        names = {}
        for line in filter(None, cgroup):
            number, controllers, name = line.split(":", 2)
            if controller in controllers.split(","):
                names[1] = PurePosixPath(name)
            elif number == "0":
                names[2] = PurePosixPath(name)
        for version in sorted(names):  # On a host with both versions, version 1 counts what it lists.
            for first, mount in _mounts(mounts, version, controller):
                top, group = root / mount.lstrip("/"), names[version]
                if group.is_relative_to(first) and ".." not in group.parts:
                    folder = top / group.relative_to(first)
                    above = (one for one in folder.parents if one.is_relative_to(top))
                    return ControlGroup(version, (folder, *above))
                topmost = topmost or ControlGroup(version, (top,), visible=False)
    return topmost


def _mounts(mountinfo: list[str], version: int, controller: str) -> Iterator[tuple[str, str]]:
    """Yield the group at which each mount of a hierarchy begins, and the folder of the mount."""
    for line in filter(None, mountinfo):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(","):
            _, _, _, first, mount, *_ = fields.split(" ")
            yield first, mount


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the smallest limit on processor time, as a number of processors; None without a limit."""
    group, limits = own_group("cpu", root), []
    if group is None:
        return None
    for folder in group.folders:
        with suppress(OSError, ValueError, ZeroDivisionError):
            texts = [(folder / name).read_text() for name in _CPU_QUOTA[group.version]]
            quota, period = map(float, " ".join(texts).split())
            limits += [quota / period] if quota > 0 else []  # Version 1 writes -1 for no limit.
    return min(limits, default=None)


def copies_that_fit(size: int, available: int, wanted: int = 2) -> int:
    """Return how many copies of `size` bytes, at most `wanted`, may be taken of `available` bytes."""
    return min(wanted, int(_SHARE * available) // max(1, size))


def available_bytes(root: Path = _ROOT) -> int:
    """Return how many bytes this process can allocate before it reaches a limit of a group or of the host."""
    group = own_group("memory", root)
    left = [_available_on_host(root)]
    if group is not None:
        left += [free for folder in group.folders for free in _available_in(folder, group.version)]
    return max(0, min(left))


def _available_on_host(root: Path) -> int:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62  # The kernel does not say; only the limits of the groups count.


def _available_in(folder: Path, version: int) -> list[int]:
    """Return the bytes that one group leaves; empty if the group has no limit, or does not show it."""
    limits = [limit for name in _MEMORY_LIMITS[version] if (limit := _read_limit(folder / name)) is not None]
    usage, cache = _MEMORY_USE[version]
    with suppress(OSError, ValueError):
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [limit - used + int(stat.get(cache, 0)) for limit in limits]
    return []


def _read_limit(path: Path) -> int | None:
    """Return a limit in bytes; None for `max`, for a number that means no limit, and without the file."""
    with suppress(OSError, ValueError):
        limit = int(path.read_text())
        return limit if limit < _UNLIMITED else None
    return None


@dataclass(frozen=True)
class OomCounter:
    """A file in which the kernel counts out-of-memory kills, and the limits that cause these kills."""

    file: Path
    limits: tuple[Path, ...] = ()

    def read(self) -> int | None:
        """Return the number of kills so far; None if the kernel does not count them here."""
        with suppress(OSError, ValueError):
            # memory.events, memory.oom_control and vmstat name the count alike.
            lines = (line.split() for line in self.file.read_text().splitlines())
            return next((int(words[1]) for words in lines if words[:1] == ["oom_kill"]), None)
        return None

    def limit_bytes(self) -> int | None:
        """Return the memory that all processes of the group may use together; None without a limit."""
        return min((limit for path in self.limits if (limit := _read_limit(path)) is not None), default=None)


def oom_counters(root: Path = _ROOT) -> list[OomCounter]:
    """Return the counters of kills among processes like this one, the most specific counter first."""
    group = own_group("memory", root)
    found = []
    if group is not None and group.visible:
        limits = tuple(folder / _MEMORY_LIMITS[group.version][0] for folder in group.folders)
        # If memory is not counted for a group, the group above it counts.
        found = [OomCounter(folder / _OOM_COUNT[group.version], limits) for folder in group.folders]
    return [*found, OomCounter(root / "proc/vmstat")]


class OomWatch:
    """Counts the out-of-memory kills since `begin`: nothing else tells such a kill from a `kill -9`.

    Ranks live in the control group of their agent, so the agent reads the count of this group. Without a
    group it reads the count of the whole host.
    """

    def __init__(self, counters: list[OomCounter] | None = None) -> None:
        counters = oom_counters() if counters is None else counters
        self._counter = next((counter for counter in counters if counter.read() is not None), None)
        self.begin()

    def begin(self) -> None:
        """Set the count to zero."""
        self._before = self._counter.read() if self._counter is not None else None

    def verdict(self) -> str | None:
        """Return how the kernel killed since `begin`, in words; "" without a kill, None without a count."""
        now = self._counter.read() if self._counter is not None else None
        if self._counter is None or now is None or self._before is None:
            return None
        if now <= self._before:
            return ""
        limit = self._counter.limit_bytes()
        return f"at the limit of {limit / 2**30:.3g} GiB" if limit else "when this host was short of it"
