"""Control groups of both versions: the group of a process, its limits, and the count of kills."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurmddp.host.cgroups import (
    OomCounter,
    OomWatch,
    available_bytes,
    copies_that_fit,
    cpu_quota,
    oom_counters,
    own_group,
)
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import describe
from support.runs.agent_runs import make_run, start_agent, wait_until

GB = 10**9
MEMORY_V1 = "35 31 0:32 {first} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
CPU_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {first} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
ALL_OF_V1 = MEMORY_V1.format(first="/")
UNIFIED = V2.format(first="/", mount="/sys/fs/cgroup/unified")
ALL_OF_V2 = V2.format(first="/", mount="/sys/fs/cgroup")
OTHER = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + CPU_V1
SLURM_V1 = "9:memory:/slurm/uid_1000/job_7/step_0/task_0\n3:cpu,cpuacct:/slurm\n1:name=systemd:/x\n"
SLURM_V2 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"


def host(root: Path, cgroup: str, mounts: str = ALL_OF_V2, available_gb: int = 90) -> Path:
    """Write the files of a host below `root`: the control groups of a process, and the free memory."""
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: 99 kB\nMemAvailable: {available_gb * GB // 1024} kB\n"
    (root / "proc/meminfo").write_text(text)
    (root / "proc/self/cgroup").write_bytes(os.fsencode(cgroup))
    (root / "proc/self/mountinfo").write_text(mounts)
    return root


@pytest.mark.parametrize(
    ("cgroup", "mounts", "folder", "version"),
    [
        (SLURM_V1, ALL_OF_V1, "memory/slurm/uid_1000/job_7/step_0/task_0", 1),
        (SLURM_V2, ALL_OF_V2, "system.slice/slurmstepd.scope/job_7/step_0/user/task_0", 2),
        # Both versions are mounted, and version 1 counts memory.
        (SLURM_V1 + "0::/\n", ALL_OF_V1 + UNIFIED, "memory/slurm/uid_1000/job_7/step_0/task_0", 1),
        # A container sees its own group as the topmost, because of its namespace or its mounts.
        ("0::/\n", ALL_OF_V2, "", 2),
        ("4:memory:/docker/ab12\n", MEMORY_V1.format(first="/docker/ab12"), "memory", 1),
    ],
)
def test_the_group_of_a_process(tmp_path: Path, cgroup: str, mounts: str, folder: str, version: int) -> None:
    group = own_group("memory", host(tmp_path, cgroup, OTHER + mounts))
    assert group is not None and group.visible
    top = tmp_path / "sys/fs/cgroup"
    assert (group.folders[0], group.version) == (top / folder, version)
    assert group.folders[-1] == (top / "memory" if version == 1 else top)


@pytest.mark.parametrize(
    ("cgroup", "mounts"),
    [
        ("0::/../../elsewhere\n", ALL_OF_V2),
        ("4:memory:/docker/ab12\n", MEMORY_V1.format(first="/docker/other")),
        (SLURM_V2, ""),
        ("", ALL_OF_V1),
    ],
)
def test_a_group_that_is_not_visible_counts_no_kills(tmp_path: Path, cgroup: str, mounts: str) -> None:
    root = host(tmp_path, cgroup, OTHER + mounts)
    group = own_group("memory", root)
    assert group is None or not group.visible
    assert oom_counters(root) == [OomCounter(root / "proc/vmstat")]


QUOTA_V1, PERIOD_V1 = "cpu/j/cpu.cfs_quota_us", "cpu/j/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/job/step\n", {"job/cpu.max": "350000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3.5),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # in a container
        ("0::/../other\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("3:cpu,cpuacct:/j\n", {QUOTA_V1: "50000\n", PERIOD_V1: "100000\n"}, 0.5),
        ("3:cpu,cpuacct:/j\n", {QUOTA_V1: "-1\n", PERIOD_V1: "100000\n"}, None),
        ("0::/j\udcf6b\n", {"j\udcf6b/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/gone\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_smallest_limit_on_processor_time(
    tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None
) -> None:
    root = host(tmp_path, cgroup, CPU_V1 + ALL_OF_V2)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cpu_quota(root) == quota


def group(folder: Path, names: tuple[str, str, str], limit: str, used_gb: int, cache_gb: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used_gb * GB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache_gb * GB}\n")


FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
FILES_V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("names", "mount", "line", "unlimited"),
    [
        (FILES_V1, "memory", "5:cpu:/\n4:memory,hugetlb:/slurm/job_7/step_0\n", "9223372036854771712"),
        (FILES_V2, "", "0::/slurm/job_7/step_0\n", "max"),
    ],
    ids=["v1", "v2"],
)
def test_the_tightest_group_counts_with_what_it_would_give_back(
    tmp_path: Path, names: tuple[str, str, str], mount: str, line: str, unlimited: str
) -> None:
    host(tmp_path, line, ALL_OF_V1 + ALL_OF_V2)
    top = tmp_path / "sys/fs/cgroup" / mount
    group(top / "slurm/job_7/step_0", names, unlimited, 3, 0)
    group(top / "slurm", names, str(64 * GB), 60, 1)
    for limit_gb, cache_gb, free_gb in ((16, 2, 5), (16, 0, 4), (8, 0, 0)):
        group(top / "slurm/job_7", names, str(limit_gb * GB), 12, cache_gb)
        assert available_bytes(tmp_path) == free_gb * GB


@pytest.mark.parametrize(
    ("limit", "high", "free_gb"),
    [("max", "max", None), ("max", str(8 * GB), 5), (str(16 * GB), str(8 * GB), 5), (str(6 * GB), "max", 3)],
)
def test_above_memory_high_training_would_crawl(
    tmp_path: Path, limit: str, high: str, free_gb: int | None
) -> None:
    host(tmp_path, "0::/job\n")
    job = tmp_path / "sys/fs/cgroup/job"
    group(job, FILES_V2, limit, 3, 0)
    (job / "memory.high").write_text(f"{high}\n")
    assert available_bytes(tmp_path) == (90 * GB // 1024 * 1024 if free_gb is None else free_gb * GB)


def test_without_groups_the_host_counts(tmp_path: Path) -> None:
    host(tmp_path, "0::/nowhere\n", available_gb=7)
    assert available_bytes(tmp_path) == 7 * GB // 1024 * 1024
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_bytes(tmp_path) == 7 * GB // 1024 * 1024


@pytest.mark.parametrize(
    ("size", "available", "copies"),
    [(10, 100, 2), (10, 39, 1), (10, 40, 2), (10, 20, 1), (10, 19, 0), (10, 0, 0)],
)
def test_copies_leave_half(size: int, available: int, copies: int) -> None:
    assert copies_that_fit(size, available) == copies


def test_without_meminfo_only_the_groups_count(tmp_path: Path) -> None:
    host(tmp_path, "0::/\n", available_gb=7)
    (tmp_path / "proc/meminfo").unlink()
    group(tmp_path / "sys/fs/cgroup", FILES_V2, str(5 * GB), 1, 0)
    assert available_bytes(tmp_path) == 4 * GB


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n", 4),
        ("nr_free_pages 1\noom_kill 0\n", 0),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("", None),
    ],
)
def test_the_count_of_kills_in_each_of_its_files(tmp_path: Path, text: str, count: int | None) -> None:
    (tmp_path / "count").write_text(text)
    assert OomCounter(tmp_path / "count").read() == count


def counting_host(root: Path, kills: int) -> Path:
    """Return a host with a process in group job/step of a hierarchy where only the job counts memory."""
    host(root, "0::/job/step\n")
    top = root / "sys/fs/cgroup"
    (top / "job/step").mkdir(parents=True)
    (root / "proc/vmstat").write_text("oom_kill 100\n")
    (top / "job/memory.events").write_text(f"oom_kill {kills}\n")
    (top / "job/memory.max").write_text(f"{3 << 30}\n")
    (top / "memory.max").write_text("max\n")
    return root


def test_a_kill_is_reported_with_the_limit_of_the_group_that_counts(tmp_path: Path) -> None:
    root = counting_host(tmp_path, 5)
    watch = OomWatch(oom_counters(root))
    assert watch.verdict() == ""
    (root / "sys/fs/cgroup/job/memory.events").write_text("oom_kill 6\n")
    assert watch.verdict() == "at the limit of 3 GiB"
    watch.begin()
    assert watch.verdict() == "", "a kill of earlier ranks is no reason for the ranks after a restart"
    (root / "sys/fs/cgroup/job/memory.events").unlink()
    assert watch.verdict() is None


def test_without_groups_the_whole_host_is_counted(tmp_path: Path) -> None:
    root = counting_host(tmp_path, 5)
    (root / "proc/self/cgroup").unlink()
    watch = OomWatch(oom_counters(root))
    (root / "proc/vmstat").write_text("oom_kill 101\n")
    assert watch.verdict() == "when this host was short of memory"
    (root / "proc/vmstat").write_text("nothing\n")
    assert OomWatch(oom_counters(root)).verdict() is None


def test_the_name_of_another_mount_is_bytes_of_any_encoding(tmp_path: Path) -> None:
    root = counting_host(tmp_path, 5)
    with (root / "proc/self/mountinfo").open("ab") as stream:
        stream.write(b"91 29 0:50 / /home/M\xfcller\x0c rw - tmpfs tmpfs rw\n")
    watch = OomWatch(oom_counters(root))
    (root / "sys/fs/cgroup/job/memory.events").write_text("oom_kill 6\n")
    assert watch.verdict() == "at the limit of 3 GiB"


HUNGRY = """
import os, time
def main(run_dir):
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    kept = []
    for _ in range(400):
        kept.append(b"x" * 1_000_000)
    {instead}
"""
LIMIT = 200_000_000
AGENT = """
import os, sys
from pathlib import Path
group, run_dir = sys.argv[1:]
if group:
    Path(group, "cgroup.procs").write_text("0")
from slurmddp.host import cgroups
if not group:
    count = Path(run_dir, "count")
    count.write_text("oom_kill 0")
    limit = Path(run_dir, "limit")
    limit.write_text("{limit}")
    cgroups.oom_counters = lambda: [cgroups.OomCounter(count, (limit,))]
from slurmddp.launchers.agent.agent import run
os._exit(run(run_dir, entry="rank_program:main", preload=()))
"""


@pytest.fixture
def limited_group() -> Iterator[Path | None]:
    """A memory control group with a limit, below the group of this process; None if it may create none."""
    agents_group = own_group("memory")
    group = agents_group and agents_group.visible and agents_group.folders[0] / f"slurmddp-test-{os.getpid()}"
    try:
        assert agents_group and group
        group.mkdir()
        limit = {1: "memory.limit_in_bytes", 2: "memory.max"}[agents_group.version]
        (group / limit).write_text(str(LIMIT))
    except (AssertionError, OSError):
        if group:
            with suppress(OSError):
                group.rmdir()
        yield None
        return
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory_is_reported_so(
    tmp_path: Path, limited_group: Path | None
) -> None:
    """The kernel kills a rank if this account may create control groups; else a rank kills itself."""
    instead = "return 0"
    if limited_group is None:
        instead = "open(run_dir + '/count', 'w').write('oom_kill 1'); os.kill(os.getpid(), 9)"
    folder = make_run(tmp_path, HUNGRY.format(instead=instead))
    script = tmp_path / "limited_agent.py"
    script.write_text(AGENT.format(limit=LIMIT))
    command = [sys.executable, str(script), str(limited_group or "")]
    with start_agent(folder, command=command) as agent:
        assert agent.wait(timeout=120) == 1
    failure = capture.read(folder, 0)
    assert failure is not None
    assert (failure.rank, failure.signal) == (1, "SIGKILL")
    assert failure.reason == "out of memory: the kernel killed it at the limit of 0.186 GiB"
    assert "mem_gb=" in describe(failure)


def test_a_rank_that_somebody_killed_is_not_called_out_of_memory(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "import os\ndef main(run_dir): os.kill(os.getpid(), 9)", ranks_per_node=1)
    with start_agent(folder) as agent:
        assert agent.wait(timeout=120) == 1
    failure = capture.read(folder, 0)
    assert failure is not None
    assert failure.signal == signal.SIGKILL.name
    counted = OomWatch().verdict() is not None
    assert ("by a person, the site or SLURM" in failure.reason) == counted
