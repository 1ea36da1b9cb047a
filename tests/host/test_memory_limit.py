"""How much memory a copy may take, in control groups of both kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.host.memory_limit import available_bytes, copies_that_fit

GB = 10**9


def host(root: Path, available_gb: int, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: 99 kB\nMemAvailable: {available_gb * GB // 1024} kB\n"
    (root / "proc/meminfo").write_text(text)
    (root / "proc/self/cgroup").write_text(cgroup)


def group(folder: Path, names: tuple[str, str, str], limit: str, used_gb: int, cache_gb: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used_gb * GB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache_gb * GB}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("names", "mount", "line"),
    [
        (V1, "sys/fs/cgroup/memory", "5:cpu:/\n4:memory,hugetlb:/slurm/job_7/step_0\n"),
        (V2, "sys/fs/cgroup", "0::/slurm/job_7/step_0\n"),
    ],
    ids=["v1", "v2"],
)
def test_the_tightest_group_counts_with_what_it_would_give_back(
    tmp_path: Path, names: tuple[str, str, str], mount: str, line: str
) -> None:
    host(tmp_path, 90, line)
    top = tmp_path / mount
    group(top / "slurm/job_7/step_0", names, "9223372036854771712" if names is V1 else "max", 3, 0)
    group(top / "slurm/job_7", names, str(16 * GB), 12, 2)
    group(top / "slurm", names, str(64 * GB), 60, 1)
    assert available_bytes(tmp_path) == 5 * GB
    group(top / "slurm/job_7", names, str(16 * GB), 12, 0)
    assert available_bytes(tmp_path) == 4 * GB
    group(top / "slurm/job_7", names, str(8 * GB), 12, 0)
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize(("limit", "left"), [("max", 5), (str(16 * GB), 5), (str(6 * GB), 3)])
def test_above_memory_high_training_would_crawl(tmp_path: Path, limit: str, left: int) -> None:
    host(tmp_path, 90, "0::/job\n")
    job = tmp_path / "sys/fs/cgroup/job"
    group(job, V2, limit, 3, 0)
    (job / "memory.high").write_text(f"{8 * GB}\n")
    assert available_bytes(tmp_path) == left * GB
    (job / "memory.high").write_text("max\n")
    assert available_bytes(tmp_path) == (90 * GB // 1024 * 1024 if limit == "max" else int(limit) - 3 * GB)


def test_without_groups_the_host_counts(tmp_path: Path) -> None:
    host(tmp_path, 7, "0::/nowhere\n")
    assert available_bytes(tmp_path) == 7 * GB // 1024 * 1024
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_bytes(tmp_path) == 7 * GB // 1024 * 1024


def test_this_host_has_some() -> None:
    assert available_bytes() > 0


@pytest.mark.parametrize(
    ("size", "available", "copies"),
    [(10, 100, 2), (10, 39, 1), (10, 40, 2), (10, 20, 1), (10, 19, 0), (10, 0, 0)],
)
def test_copies_leave_half(size: int, available: int, copies: int) -> None:
    assert copies_that_fit(size, available) == copies


def test_a_host_that_tells_nothing_leaves_the_groups(tmp_path: Path) -> None:
    host(tmp_path, 7, "0::/\n")
    (tmp_path / "proc/meminfo").unlink()
    group(tmp_path / "sys/fs/cgroup", V2, str(5 * GB), 1, 0)
    assert available_bytes(tmp_path) == 4 * GB


def test_groups_with_names_in_no_encoding_are_read(tmp_path: Path) -> None:
    name = "j\udcf6b"
    host(tmp_path, 90, "")
    (tmp_path / "proc/self/cgroup").write_bytes(os.fsencode(f"0::/{name}\n"))
    group(tmp_path / "sys/fs/cgroup" / name, V2, str(8 * GB), 5, 0)
    assert available_bytes(tmp_path) == 3 * GB
