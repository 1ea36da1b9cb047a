"""The needs of slurmddp that a measured file system does not meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.folder.file_system import BY_LISTING, BY_NAME, SLOW_S, FileSystem, HostView, shortfalls

AT_ONCE = dict.fromkeys(BY_NAME | BY_LISTING, 0.02)
SOUND = FileSystem(
    folder=Path("/shared"),
    hosts=(HostView(host="n1", seen_s=AT_ONCE), HostView(host="n2", seen_s=AT_ONCE)),
    limit_s=70,
    reads=40,
    broken_reads=0,
    lines=200,
    lost_lines=0,
    broken_lines=0,
    lost_plain_lines=0,
    doubly_created=0,
    flock="excludes",
    fcntl="excludes",
    hard_links=True,
    synced_folders=True,
)


def seeing(**views: Any) -> FileSystem:
    """Return a file system whose second host has the fields `views`."""
    return replace(SOUND, hosts=(SOUND.hosts[0], replace(SOUND.hosts[1], **views)))


@pytest.mark.parametrize(
    "files",
    [
        SOUND,
        # slurmddp makes no use of these.
        seeing(seen_s={**AT_ONCE, "name": None, "open": 30.1}),
        replace(SOUND, lost_plain_lines=30, fcntl="one host", hard_links=False, synced_folders=False),
        # A file names the holder of the run's lock.
        replace(SOUND, flock="unsupported"),
        seeing(seen_s={**AT_ONCE, "listing": SLOW_S}),
        # A measurement may leave out looks.
        seeing(seen_s={"listing": 0.02}),
    ],
)
def test_a_file_system_that_gives_all_that_slurmddp_needs_has_no_shortfall(files: FileSystem) -> None:
    assert shortfalls(files) == ()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            seeing(seen_s={**AT_ONCE, "grown": None}, unseen=("grown", "removed")),
            "n2 did not see this change of another host, even after n2 touched the folder: a grown file, "
            "a removed file, by listing.",
        ),
        (replace(SOUND, broken_reads=3), "3 of 40 reads of a file that another host replaced found no file"),
        (
            replace(SOUND, lost_lines=3),
            "Of 200 lines that 2 hosts appended at once, 3 are lost and 0 are broken.",
        ),
        (replace(SOUND, broken_lines=1), "0 are lost and 1 are broken"),
        (replace(SOUND, doubly_created=2), "2 new names were each created by several hosts at once"),
    ],
)
def test_a_need_that_is_not_met_is_a_fault(files: FileSystem, text: str) -> None:
    (shortfall,) = shortfalls(files)
    assert text in shortfall.text
    assert shortfall.is_fault and "runs_dir=/another/folder" in shortfall.remedy


@pytest.mark.parametrize(
    ("files", "text", "remedy"),
    [
        (
            seeing(seen_s={**AT_ONCE, "listing": 61.04, "removed": 30.0}),
            "Changes of another host are seen only after 61 s on n2.",
            "A stop of the run, and new steps in `slurmddp status`, may come this late.",
        ),
        (
            seeing(seen_s={**AT_ONCE, "listing": None}),
            "Changes of another host are seen only after 70 s or more on n2.",
            "acdirmax",
        ),
        (
            replace(
                SOUND,
                hosts=(
                    HostView(host="n1", seen_s={**AT_ONCE, "grown": 9.0}),
                    HostView(host="n2", seen_s={**AT_ONCE, "replaced": 31.26}),
                ),
            ),
            "Changes of another host are seen only after 31.3 s on n1, n2.",
            "dcache_timeout",
        ),
        (
            replace(SOUND, flock="one host"),
            "A lock (flock) of one host does not keep other hosts out.",
            "may submit two jobs, of which one exits at once",
        ),
    ],
)
def test_what_slurmddp_can_do_without_is_a_warning(files: FileSystem, text: str, remedy: str) -> None:
    (shortfall,) = shortfalls(files)
    assert shortfall.text == text and remedy in shortfall.remedy
    assert not shortfall.is_fault


def test_faults_come_first() -> None:
    found = shortfalls(replace(SOUND, flock="one host", broken_reads=1))
    assert [shortfall.is_fault for shortfall in found] == [True, False]
