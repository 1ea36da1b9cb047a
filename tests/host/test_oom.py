"""The kernel's count of processes killed for want of memory: which file holds it, and what it tells."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurmddp.host import oom
from slurmddp.host.oom import Counter, OomWatch, memory_group, parse_kills
from slurmddp.runs.failures import capture
from support.runs.agent_runs import make_run, start_agent, wait_until

V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = (
    "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)
SLURM_V1 = "9:memory:/slurm/uid_1000/job_7/step_0/task_0\n3:cpu,cpuacct:/slurm\n1:name=systemd:/x\n"
SLURM_V2 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"


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
def test_the_count_in_each_of_its_files(text: str, count: int | None) -> None:
    assert parse_kills(text) == count


@pytest.mark.parametrize(
    ("cgroup", "mounts", "folder", "version"),
    [
        (SLURM_V1, V1.format(root="/"), "/sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0/task_0", 1),
        (
            SLURM_V2,
            V2.format(root="/", mount="/sys/fs/cgroup"),
            "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
            2,
        ),
        # Both are mounted, and memory is counted by the first.
        (
            SLURM_V1 + "0::/\n",
            V1.format(root="/") + V2.format(root="/", mount="/sys/fs/cgroup/unified"),
            "/sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0/task_0",
            1,
        ),
        # A container that sees its own group as the top, by its namespace or by what is mounted.
        ("0::/\n", V2.format(root="/", mount="/sys/fs/cgroup"), "/sys/fs/cgroup", 2),
        ("4:memory:/docker/ab12\n", V1.format(root="/docker/ab12"), "/sys/fs/cgroup/memory", 1),
    ],
)
def test_the_group_of_a_process(cgroup: str, mounts: str, folder: str, version: int) -> None:
    found = memory_group(cgroup, OTHER + mounts)
    assert found is not None
    assert (str(found[0]), found[2]) == (folder, version)


@pytest.mark.parametrize(
    ("cgroup", "mounts"),
    [
        ("0::/../../elsewhere\n", V2.format(root="/", mount="/sys/fs/cgroup")),
        ("4:memory:/docker/ab12\n", V1.format(root="/docker/other")),
        (SLURM_V2, ""),
        ("", V1.format(root="/")),
    ],
)
def test_a_group_that_is_not_in_sight_is_none(cgroup: str, mounts: str) -> None:
    assert memory_group(cgroup, OTHER + mounts) is None


def make_proc(tmp_path: Path, kills: int) -> Path:
    """A /proc of a process in group job/step of a hierarchy where only the job counts memory."""
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (proc / "self", top / "job/step"):
        folder.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (proc / "self/mountinfo").write_text(V2.format(root="/", mount=top))
    (proc / "vmstat").write_text("oom_kill 100\n")
    (top / "job/memory.events").write_text(f"oom_kill {kills}\n")
    (top / "job/memory.max").write_text(f"{3 << 30}\n")
    (top / "memory.max").write_text("max\n")
    return proc


def test_a_rise_is_told_with_the_limit_of_the_group_that_counts(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, 5)
    watch = OomWatch(oom.counters(proc))
    assert watch.verdict() == ""
    (tmp_path / "cgroup/job/memory.events").write_text("oom_kill 6\n")
    assert watch.verdict() == "at the limit of 3 GiB"
    watch.begin()
    assert watch.verdict() == "", "what an earlier generation of ranks died of is no reason of the next"
    (tmp_path / "cgroup/job/memory.events").unlink()
    assert watch.verdict() is None


def test_without_groups_the_whole_host_is_counted(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, 5)
    (proc / "self/cgroup").unlink()
    watch = OomWatch(oom.counters(proc))
    (proc / "vmstat").write_text("oom_kill 101\n")
    assert watch.verdict() == "when this host was short of it"
    (proc / "vmstat").write_text("nothing\n")
    assert OomWatch(oom.counters(proc)).verdict() is None


def test_the_name_of_another_mount_is_bytes_of_any_encoding(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, 5)
    with (proc / "self/mountinfo").open("ab") as stream:
        stream.write(b"91 29 0:50 / /home/M\xfcller\x0c rw - tmpfs tmpfs rw\n")
    watch = OomWatch(oom.counters(proc))
    (tmp_path / "cgroup/job/memory.events").write_text("oom_kill 6\n")
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
from slurmddp.host import oom
if not group:
    count = Path(run_dir, "count")
    count.write_text("oom_kill 0")
    limit = Path(run_dir, "limit")
    limit.write_text("{limit}")
    oom.counters = lambda: [oom.Counter(count, (limit,))]
from slurmddp.launchers.agent.agent import run
os._exit(run(run_dir, entry="rank_program:main", preload=()))
"""


@pytest.fixture
def limited_group() -> Iterator[Path | None]:
    """A memory control group with a limit below this process's own; None where it may make none."""
    found = memory_group(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    group = found and found[0] / f"slurmddp-test-{os.getpid()}"
    try:
        assert group is not None
        group.mkdir()
        limit = {1: "memory.limit_in_bytes", 2: "memory.max"}[found[2] if found else 2]
        (group / limit).write_text(str(LIMIT))
    except (AssertionError, OSError):
        if group is not None:
            with suppress(OSError):
                group.rmdir()
        yield None
        return
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_told_as_that(
    tmp_path: Path, limited_group: Path | None
) -> None:
    """Really so, where control groups may be made; elsewhere a rank kills itself and raises the count."""
    instead = "return 0"
    if limited_group is None:
        instead = "open(run_dir + '/count', 'w').write('oom_kill 1'); os.kill(os.getpid(), 9)"
    folder = make_run(tmp_path, HUNGRY.format(instead=instead))
    script = tmp_path / "limited_agent.py"
    script.write_text(AGENT.format(limit=LIMIT))
    command = [sys.executable, str(script), str(limited_group or "")]
    with start_agent(folder, command=command) as agent:
        assert agent.wait(timeout=120) == 1
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.rank, found.signal) == (1, "SIGKILL")
    assert found.reason == "out of memory: the kernel killed it at the limit of 0.186 GiB"
    assert "mem_gb=" in capture.describe(found)


def test_a_rank_that_somebody_killed_is_not_called_out_of_memory(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "import os\ndef main(run_dir): os.kill(os.getpid(), 9)", ranks_per_node=1)
    with start_agent(folder) as agent:
        assert agent.wait(timeout=120) == 1
    found = capture.read(folder, 0)
    assert found is not None
    assert found.signal == signal.SIGKILL.name
    counted = OomWatch().verdict() is not None
    assert ("by a person, the site or SLURM" in found.reason) == counted


def test_a_limit_that_is_none_is_not_told(tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text("9223372036854771712\n")
    assert Counter(tmp_path / "count", (limit, tmp_path / "missing")).limit_bytes() is None
