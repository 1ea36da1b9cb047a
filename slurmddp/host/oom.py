"""Whether the kernel has killed a process here for want of memory: nothing else tells it from a `kill -9`.

The kernel counts such kills for each memory control group, before it sends the signal. Ranks live in the
group of their agent, so that group's count is the right one; where there is none, that of the whole host.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""The first version of control groups says `unlimited` by a number of this size."""
_FILES = {1: ("memory.oom_control", "memory.limit_in_bytes"), 2: ("memory.events", "memory.max")}


@dataclass(frozen=True)
class Counter:
    """A file in which the kernel counts, and the folders whose limits hold for those that it counts."""

    file: Path
    limits: tuple[Path, ...] = ()
    whole_host: bool = False

    def read(self) -> int | None:
        """Return how many processes have been killed so far; None when the kernel does not say."""
        try:
            return parse_kills(self.file.read_text())
        except (OSError, ValueError):
            return None

    def limit_bytes(self) -> int | None:
        """Return the memory that all of the group may use together; None without a limit."""
        found = []
        for path in self.limits:
            with suppress(OSError, ValueError):
                found.append(int(path.read_text()))
        smallest = min(found, default=_NO_LIMIT)
        return smallest if smallest < _NO_LIMIT else None


def parse_kills(text: str) -> int | None:
    """Return the number behind `oom_kill` in memory.events, memory.oom_control or vmstat."""
    numbers = (line.split()[1] for line in text.splitlines() if line.startswith("oom_kill "))
    return next((int(number) for number in numbers), None)


def memory_group(cgroup: str, mountinfo: str) -> tuple[Path, Path, int] | None:
    """Return the folder of a process's memory control group, where its hierarchy begins, and its version.

    `cgroup` and `mountinfo` are the texts of these files in /proc/PID. A container may see only a part of the
    hierarchy: the mount then begins at some group of it, and a name can lead out of what is mounted.
    """
    names = {}
    for line in cgroup.splitlines():
        number, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            names[1] = name
        elif number == "0":
            names[2] = name
    for version in sorted(names):  # A host may have both; memory is then counted by the first.
        group = PurePosixPath(names[version])
        for root, mount in _mounts(mountinfo, version):
            if group.is_relative_to(root) and ".." not in group.parts:
                return mount / group.relative_to(root), mount, version
    return None


def _mounts(mountinfo: str, version: int) -> list[tuple[str, Path]]:
    """Return (group at which the mount begins, folder) of the mounted hierarchies that count memory."""
    found = []
    for line in filter(None, mountinfo.split("\n")):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(","):
            _, _, _, root, mount, *_ = fields.split(" ")
            found.append((root, Path(mount)))
    return found


def counters(proc: Path = Path("/proc")) -> list[Counter]:
    """Return where kills of this process's like are counted, the most telling first."""
    group = None
    with suppress(OSError, ValueError):
        # Names of groups and mounts are bytes, of any encoding.
        texts = [os.fsdecode((proc / "self" / name).read_bytes()) for name in ("cgroup", "mountinfo")]
        group = memory_group(*texts)
    found = []
    if group is not None:
        folder, top, version = group
        count, limit = _FILES[version]
        groups = [one for one in (folder, *folder.parents) if one.is_relative_to(top)]
        limits = tuple(one / limit for one in groups)
        # A group for which memory is not counted is counted with the one above it.
        found = [Counter(one / count, limits) for one in groups]
    return [*found, Counter(proc / "vmstat", whole_host=True)]


class OomWatch:
    """Counts the kernel's kills for want of memory; `begin` sets the count to zero."""

    def __init__(self, among: list[Counter] | None = None) -> None:
        among = counters() if among is None else among
        self._counter = next((counter for counter in among if counter.read() is not None), None)
        self.begin()

    def begin(self) -> None:
        """Forget what was counted so far."""
        self._before = self._counter.read() if self._counter is not None else None

    def verdict(self) -> str | None:
        """Return None when nothing is counted here, "" when none was killed since, else how, in words."""
        now = self._counter.read() if self._counter is not None else None
        if self._counter is None or now is None or self._before is None:
            return None
        if now <= self._before:
            return ""
        if self._counter.whole_host:
            return "when this host was short of it"
        limit = self._counter.limit_bytes()
        return f"at the limit of {limit / 2**30:.3g} GiB" if limit else "when this host was short of it"
