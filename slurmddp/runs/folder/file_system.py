"""Describe a measured file system, and decide which needs of slurmddp it does not meet; pure.

`measure_files.py` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SLOW_S = 5.0
"""Seconds after which a change of another host counts as seen late."""
EXCLUDES = "excludes"
ONE_HOST = "one host"
UNSUPPORTED = "unsupported"

BY_NAME = {"name": "a new file, by name", "open": "a new file, by open"}
"""Ways to look for a file that only SLURM and other programs use, with their texts for messages."""
BY_LISTING = {
    "listing": "a new file, by listing",
    "grown": "a grown file",
    "replaced": "a replaced file",
    "removed": "a removed file, by listing",
}
"""Ways to look for a file that slurmddp uses, with their texts for messages."""


@dataclass(frozen=True, kw_only=True)
class HostView:
    """The delays after which one host saw changes that other hosts made to files."""

    host: str
    kind: str = ""
    """The type of the mount, such as nfs4; empty if it is not known."""
    seen_s: Mapping[str, float | None]
    """Seconds until the host saw the slowest change of another host; None: not within the limit. Keys: name,
    open and listing (ways to look for a new file), grown, replaced, removed (changes of a file)."""
    unseen: tuple[str, ...] = ()
    """Keys of changes that the host did not see even after it had touched the folder."""


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A need of slurmddp that a file system does not meet."""

    text: str
    """A sentence with the measured values that show the shortfall."""
    remedy: str
    """Sentences on the consequence for runs, and on what to do."""
    is_fault: bool
    """Whether slurmddp can't work in the folder; otherwise it works with the consequence in `remedy`."""


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """The file system of a folder as the hosts that share the folder measured it."""

    folder: Path
    hosts: tuple[HostView, ...]
    limit_s: float
    """Longest time in seconds that the hosts waited to see a change."""
    reads: int
    """Number of reads of files that another host was replacing at that moment."""
    broken_reads: int
    """Number of such reads that found no file, or neither the whole old nor the whole new content."""
    lines: int
    """Number of lines that all hosts appended to one file at once, under a lock if the file can be locked."""
    lost_lines: int
    broken_lines: int
    lost_plain_lines: int
    """Number of lines that are missing after all hosts appended as many lines without a lock (O_APPEND)."""
    doubly_created: int
    """Number of new names that more than one host created (O_EXCL and mkdir)."""
    flock: str
    """excludes: a lock of one host keeps the other hosts out. one host: each host gets the lock. unsupported:
    no host gets a lock."""
    fcntl: str
    """The same for locks of fcntl, which other programs use."""
    hard_links: bool
    synced_folders: bool
    """Whether folders can be flushed to the disk (fsync)."""
    shortfalls: tuple[Shortfall, ...] = ()
    """The needs of slurmddp that are not met, the faults first."""


def shortfalls(files: FileSystem) -> tuple[Shortfall, ...]:
    """Return the needs of slurmddp that a file system does not meet, the faults first."""
    return (*_faults(files), *_warnings(files))


def _faults(files: FileSystem) -> Iterator[Shortfall]:
    other = "Use a folder on another file system: runs_dir=/another/folder."
    for view in files.hosts:
        if view.unseen:
            changes = ", ".join(BY_LISTING[look] for look in view.unseen)
            yield Shortfall(
                text=f"{view.host} did not see this change of another host, even after {view.host} touched "
                f"the folder: {changes}.",
                remedy=f"Shorten the times of the cache in the mount options. {other}",
                is_fault=True,
            )

    if files.broken_reads:
        yield Shortfall(
            text=f"{files.broken_reads} of {files.reads} reads of a file that another host replaced found "
            "no file or a part of it: a rename is not atomic.",
            remedy=other,
            is_fault=True,
        )

    if files.lost_lines or files.broken_lines:
        yield Shortfall(
            text=f"Of {files.lines} lines that {len(files.hosts)} hosts appended at once, "
            f"{files.lost_lines} are lost and {files.broken_lines} are broken.",
            remedy=f"If the mount options can switch on locks between hosts, do so. {other}",
            is_fault=True,
        )

    if files.doubly_created:
        yield Shortfall(
            text=f"{files.doubly_created} new names were each created by several hosts at once: neither "
            "O_EXCL nor mkdir is safe.",
            remedy=other,
            is_fault=True,
        )


def _warnings(files: FileSystem) -> Iterator[Shortfall]:
    late: dict[str, float | None] = {}
    for view in files.hosts:
        times = [view.seen_s[look] for look in BY_LISTING if look in view.seen_s]
        slow = [seconds for seconds in times if seconds is None or seconds > SLOW_S]
        if slow and not view.unseen:
            late[view.host] = None if None in slow else max(filter(None, slow))

    if late:
        slowest_s = max(files.limit_s if seconds is None else seconds for seconds in late.values())
        more = " or more" if None in late.values() else ""
        yield Shortfall(
            text=f"Changes of another host are seen only after {round(slowest_s, 1):g} s{more} on "
            f"{', '.join(late)}.",
            remedy="A stop of the run, and new steps in `slurmddp status`, may come this late. Shorten "
            "the times of listings in the mount options (NFS: acdirmax; sshfs: dcache_timeout).",
            is_fault=False,
        )

    # Where no file can be locked at all, a file names the holder of a run's lock instead.
    if files.flock == ONE_HOST:
        yield Shortfall(
            text="A lock (flock) of one host does not keep other hosts out.",
            remedy="Commands that start one run at once on two login nodes may submit two jobs, of which one "
            "exits at once. Use one login node for a run, or a mount option for locks (Lustre: flock).",
            is_fault=False,
        )
