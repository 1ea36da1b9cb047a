"""How much memory a copy of the state may take: asked before it is taken, since the kernel only kills after.

Pages of a memory file count in the control group of the job as any others do. Its limit, that of every group
above it, and what the host has left are all looked at; above memory.high of cgroup v2 the kernel does not
kill, but slows training down to a crawl. What a group holds of files that nobody has touched for a while
(checkpoints that were written, say) the kernel gives back by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_SHARE = 0.5
"""Copies may take so much of what is left. They are made before the first step; activations come later."""
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = (("memory.max", "memory.high"), "memory.current", "inactive_file")


def copies_that_fit(size: int, available: int, wanted: int = 2) -> int:
    """Return how many copies of `size` bytes, at most `wanted`, may be taken of `available` bytes."""
    return min(wanted, int(_SHARE * available) // max(1, size))


def available_bytes(root: Path = Path("/")) -> int:
    """Return what this process may still take before a limit is reached; `root` is where the host's / is."""
    left = [_of_host(root), *(limit - used for limit, used in _groups(root))]
    return max(0, min(left))


def _of_host(root: Path) -> int:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62  # A kernel that does not tell; the limits of the job are left.


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each memory control group that this process is in, from its own upwards."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _upwards(mount / "memory", path, *_V1)
        elif number == "0":
            yield from _upwards(mount, path, *_V2)


def _upwards(
    mount: Path, path: str, limits: Sequence[str], usage: str, cache: str
) -> Iterator[tuple[int, int]]:
    folder = mount / path.strip("/")
    while True:
        found = _read(folder, limits, usage, cache)
        if found is not None:
            yield found
        if folder in (mount, folder.parent):
            return
        folder = folder.parent


def _read(folder: Path, limits: Sequence[str], usage: str, cache: str) -> tuple[int, int] | None:
    """Return limit and use of one group; None where it has no limit, or does not show it."""
    told = [text for name in limits if (text := _text(folder / name)).isdecimal()]
    try:
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return (min(map(int, told)), used - int(stat.get(cache, 0))) if told else None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
