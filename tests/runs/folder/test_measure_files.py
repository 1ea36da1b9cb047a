"""Two processes measure a folder; one of them, or both, see it through a file system with a fault."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs.folder.measure_files import LOOKS
from support import ROOT

FAR_S = 3600.0
"""A limit that no host reaches, however late it gets a processor."""
SHORT_S = 0.1
"""A limit for hosts that see nothing in time."""
SOUND = {
    "broken_reads": 0,
    "lost_lines": 0,
    "broken_lines": 0,
    "lost_plain_lines": 0,
    "doubly_created": 0,
    "flock": "excludes",
    "fcntl": "excludes",
    "hard_links": True,
    "synced_folders": True,
}


def measured(
    folder: Path,
    *,
    faults: tuple[str, str] = ("", ""),
    limit_s: float = FAR_S,
    folders: tuple[str, str] = ("", ""),
) -> list[dict[str, Any]]:
    """Return what the two hosts print; `faults` and `folders` have a value for each host."""
    ends = socket.socketpair()
    hosts = []
    for index, end in enumerate(ends):
        command = [sys.executable, "-m", "support.runs.measuring_host"]
        command += [folders[index] or str(folder), str(index), str(limit_s), str(end.fileno())]
        command += [faults[index]] if faults[index] else []
        hosts.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[end.fileno()],
                env={**os.environ, "PYTHONPATH": f"{ROOT}/tests"},
            )
        )
    for end in ends:
        end.close()
    results = [json.loads(host.communicate()[0]) for host in hosts]
    assert [*folder.iterdir()] == [], "nothing is left"
    return results


def test_two_hosts_on_one_disk_find_all_that_slurmddp_needs(tmp_path: Path) -> None:
    first, second = measured(tmp_path)
    assert first == second
    assert first["folder"] == str(tmp_path) and [view["host"] for view in first["hosts"]] == ["n0", "n1"]
    assert {name: first[name] for name in SOUND} == SOUND
    assert first["reads"] > 1 and first["lines"] > 1
    for view in first["hosts"]:
        assert [*view["seen_s"]] == [*LOOKS] and None not in view["seen_s"].values()
        assert view["unseen"] == []


@pytest.mark.parametrize("fault", ["sees nothing", "sees no change"])
def test_changes_that_a_host_never_sees_are_named(tmp_path: Path, fault: str) -> None:
    first, second = measured(tmp_path, faults=(fault, ""), limit_s=SHORT_S)
    assert first == second
    blind, seeing = first["hosts"]
    assert blind["unseen"] == ["grown", "listing", "removed", "replaced"]
    assert [look for look, seconds in blind["seen_s"].items() if seconds is None] == [
        "listing",
        "grown",
        "replaced",
        "removed",
    ]
    assert seeing["unseen"] == []


def test_changes_that_a_host_sees_once_it_has_touched_the_folder_are_late(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("sees changes after a touch", ""), limit_s=SHORT_S)
    assert first["hosts"][0]["seen_s"]["listing"] is None
    assert first["hosts"][0]["unseen"] == []


FAULTS = {
    "replaces in place": "broken_reads",
    "replaces by removal": "broken_reads",
    "replaces by a part": "broken_reads",
    "replaces by a mixture": "broken_reads",
    "loses lines": "lost_lines",
    "loses plain lines": "lost_plain_lines",
    "waits for no lines": "lost_plain_lines",
    "creates again": "doubly_created",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_need_that_a_host_does_not_get_is_counted(tmp_path: Path, fault: str) -> None:
    first, second = measured(tmp_path, faults=("", fault), limit_s=SHORT_S)
    assert first == second
    wrong = {name for name, value in SOUND.items() if first[name] != value}
    assert wrong == {FAULTS[fault]} and first[FAULTS[fault]] > 0


def test_broken_reads_of_each_host_count(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("replaces by a part", ""))
    assert first["broken_reads"] > 0


def test_new_names_that_no_host_can_create_are_not_created_twice(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("has all names taken",) * 2)
    assert first["doubly_created"] == 0


def test_a_new_file_that_listings_alone_show_is_late_by_name(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("sees no names", ""), limit_s=SHORT_S)
    view = first["hosts"][0]
    assert [look for look, seconds in view["seen_s"].items() if seconds is None] == ["name", "open"]
    assert view["unseen"] == []


def test_a_host_that_does_not_see_the_folder_of_another_host_sees_no_change(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("sees no folder", ""), limit_s=SHORT_S)
    assert set(first["hosts"][0]["seen_s"].values()) == {None}


@pytest.mark.parametrize(
    "fault",
    [
        "reports stale handles",
        "sees lines late",
        "sees lines after a touch",
        "refuses taken names",
        "shows the folder late",
        "removes what is listed",
    ],
)
def test_what_slurmddp_copes_with_is_no_fault(tmp_path: Path, fault: str) -> None:
    # No host waits in vain for lines that it sees late; a touch comes after a wait in vain.
    limit_s = SHORT_S if fault == "sees lines after a touch" else FAR_S
    first, second = measured(tmp_path, faults=(fault, fault), limit_s=limit_s)
    assert first == second
    assert {name: first[name] for name in SOUND} == SOUND


@pytest.mark.parametrize("faults", [("cuts the last lines", ""), ("", "cuts the last lines")])
def test_lines_that_one_host_does_not_see_are_lost(tmp_path: Path, faults: tuple[str, str]) -> None:
    first, _ = measured(tmp_path, faults=faults, limit_s=SHORT_S)
    assert (first["lost_lines"], first["broken_lines"], first["lost_plain_lines"]) == (1, 1, 1)


def test_an_empty_line_takes_the_place_of_no_lost_line(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("empties the last lines", ""), limit_s=SHORT_S)
    assert (first["lost_lines"], first["broken_lines"], first["lost_plain_lines"]) == (1, 0, 1)


def test_lines_that_a_host_appends_in_part_are_broken_and_lost(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("", "appends half lines"), limit_s=SHORT_S)
    assert first["broken_lines"] > 0 and first["lost_lines"] > 0


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (("", "locks here alone"), "one host"),
        (("locks here alone", ""), "one host"),
        (("has no locks", ""), "unsupported"),
        (("", "has no locks"), "unsupported"),
        (("", "is refused locks"), "unsupported"),
    ],
)
def test_locks_that_keep_no_other_host_out_are_named(
    tmp_path: Path, faults: tuple[str, str], expected: str
) -> None:
    first, _ = measured(tmp_path, faults=faults)
    assert (first["flock"], first["fcntl"]) == (expected, expected)


def test_a_lock_that_fails_in_another_way_than_by_a_holder_is_unsupported(tmp_path: Path) -> None:
    first, _ = measured(tmp_path, faults=("", "has no fcntl at first"))
    assert (first["flock"], first["fcntl"]) == ("excludes", "unsupported")


@pytest.mark.parametrize(
    ("fault", "field"), [("has no links", "hard_links"), ("flushes no folders", "synced_folders")]
)
def test_one_host_without_a_feature_is_enough_to_name_it(tmp_path: Path, fault: str, field: str) -> None:
    first, _ = measured(tmp_path, faults=("", fault))
    assert first[field] is False


def test_a_folder_that_one_host_does_not_see_is_an_error_on_both(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    first, second = measured(tmp_path, folders=("", str(missing)), limit_s=SHORT_S)
    assert first == second
    assert "n1: " in first["error"] and f"No such file or directory: '{missing}'" in first["error"]
    assert "It must have the same path on the nodes and on the login node" in first["error"]
