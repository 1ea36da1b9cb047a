"""Nodes of a sandbox see a folder through mounts of their own, and nothing of the mounts stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.sandbox import daemons, mounts, processes
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import bring_back

pytestmark = pytest.mark.slurm

# `make test` does not install GlusterFS.
KINDS = ("nfs", "sshfs", pytest.param("glusterfs", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=KINDS)
def mounted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultySandbox]:
    """A sandbox of two nodes that mount an own folder, which has a blank in its name and a file in it."""
    folder = tmp_path_factory.mktemp("a folder")
    (folder / "older").write_text("than the sandbox")
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as root:
        made = FaultySandbox(
            f"m{os.getpid()}",
            root=Path(root) / "sandbox",
            shared=request.param,
            shared_folder=folder,
        )
        made.up()
        try:
            yield made
        finally:
            made.down()

    assert_plain(folder)


def assert_plain(folder: Path) -> None:
    """Fail if a folder is mounted, or shows that it was a brick."""
    assert str(folder).replace(" ", "\\040") not in Path("/proc/mounts").read_text()
    assert not (folder / ".glusterfs").exists()
    assert {
        path.name: os.listxattr(path) for path in [folder, *folder.rglob("*")] if os.listxattr(path)
    } == {}
    assert (folder / "older").read_text() == "than the sandbox"


@pytest.fixture
def folder(mounted: FaultySandbox) -> Path:
    """The shared folder, as the login node sees it."""
    assert mounted.request.shared_folder is not None
    return mounted.request.shared_folder


def on(sandbox: FaultySandbox, node: int, program: str, *words: object) -> str:
    """Run a Python program on a node without SLURM, and return what it prints."""
    command = [*sandbox.on_node(sandbox.nodes[node]), sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORTS = "import fcntl, mmap, os, sys; path = sys.argv[1]; "
WRITE = IMPORTS + "open(path, 'w').write(sys.argv[2])"
READ = IMPORTS + "print(open(path).read())"
LIST = IMPORTS + "print(*sorted(os.listdir(path)))"
MAP = (
    IMPORTS + "file = open(path, 'w+b'); file.truncate(9000); view = mmap.mmap(file.fileno(), 9000); "
    "view[5000:5005] = b'hello'; view.flush(); view[0:3] = b'yes'; view.close()"
)
LOCK = IMPORTS + "fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)"
SIZE = IMPORTS + "print(os.stat(path).st_size)"


def test_jobs_on_all_nodes_and_the_login_node_share_the_folder(mounted: FaultySandbox, folder: Path) -> None:
    script = 'date > "$0/$SLURMD_NODENAME"; pwd; findmnt -n -o FSTYPE --target .'
    words = mounted.command("srun", "-N2", f"--chdir={folder}", "sh", "-c", script, str(folder))
    rows = words.splitlines()
    assert rows.count(str(folder)) == 2
    assert sum(row.startswith("fuse") for row in rows) == 2
    assert {path.name for path in folder.iterdir()} >= set(mounted.nodes)


def test_a_file_that_is_older_than_the_sandbox_is_there(mounted: FaultySandbox, folder: Path) -> None:
    assert on(mounted, 0, READ, folder / "older") == "than the sandbox"
    assert on(mounted, 0, LIST, folder).split()[-1] != ".glusterfs"


def test_a_file_goes_from_one_node_to_the_other(mounted: FaultySandbox, folder: Path) -> None:
    on(mounted, 0, WRITE, folder / "from one", "hello")
    assert on(mounted, 1, READ, folder / "from one") == "hello"
    assert (folder / "from one").read_text() == "hello"


def test_names_attributes_and_mapped_memory_work(mounted: FaultySandbox, folder: Path) -> None:
    on(mounted, 0, MAP, folder / "mapped")
    data = (folder / "mapped").read_bytes()
    assert (data[:4], data[5000:5005], len(data)) == (b"yes\0", b"hello", 9000)


def test_an_open_file_keeps_its_data_after_its_own_host_removes_it(
    mounted: FaultySandbox, folder: Path
) -> None:
    program = (
        IMPORTS + "file = open(path, 'w+'); file.write('data'); file.flush(); os.unlink(path); "
        "file.write(' more'); file.seek(0); print(file.read())"
    )
    assert on(mounted, 0, program, folder / "unlinked") == "data more"
    assert not [path.name for path in folder.iterdir() if "unlinked" in path.name or "hidden" in path.name]


def test_a_rename_that_must_not_replace_a_file_does_not(mounted: FaultySandbox, folder: Path) -> None:
    (folder / "target").write_text("kept")
    program = (
        "import ctypes, sys; renameat2 = ctypes.CDLL(None).renameat2; "
        "print(renameat2(-100, sys.argv[1].encode(), -100, sys.argv[2].encode(), 1))"
    )
    on(mounted, 0, WRITE, folder / "source", "new")
    assert on(mounted, 0, program, folder / "source", folder / "target") == "-1"
    assert (folder / "target").read_text() == "kept"


def test_a_power_cut_ends_the_client_and_a_restored_node_mounts_again(
    mounted: FaultySandbox, folder: Path
) -> None:
    node = mounted.plan.nodes[1]
    client = processes.recorded(mounted.root)[mounts.client(node)]
    mounted.kill_node(node.name, with_jobs=True)
    assert not client.alive()
    assert not mounted.status().healthy
    bring_back(mounted)
    assert mounted.status().healthy
    (folder / "after").write_text("the cut")
    assert on(mounted, 1, READ, folder / "after") == "the cut"
    assert mounted.command("srun", "-w", node.name, "cat", str(folder / "after")) == "the cut"


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    (folder / "older").write_text("than the sandbox")
    (folder / "inside/link").symlink_to("../older")
    return folder


@pytest.mark.parametrize("shared", KINDS)
def test_an_interrupted_start_leaves_the_folder_as_it_was(
    shared: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(daemons, "start_all", interrupt)
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as root:
        made = FaultySandbox("i", root=Path(root) / "s", nodes=1, shared=shared, shared_folder=own_folder)
        with pytest.raises(KeyboardInterrupt):
            made.up()
        assert processes.members(made.root) == set()
        assert not made.root.exists()
    assert_plain(own_folder)


@pytest.mark.slow
def test_the_next_start_removes_the_mount_of_a_sandbox_whose_processes_were_killed(own_folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as root:
        made = FaultySandbox(
            f"k{os.getpid()}", root=Path(root) / "s", nodes=1, shared="glusterfs", shared_folder=own_folder
        )
        made.up()
        (own_folder / "inside/new").write_text("on the volume")
        processes.kill_all(lambda: processes.members(made.root))
        assert made.up()
        assert (own_folder / "inside/new").read_text() == "on the volume"
        made.down()
    assert_plain(own_folder)
    assert (own_folder / "inside/new").read_text() == "on the volume"


@pytest.mark.slow
def test_a_folder_of_another_volume_is_refused_and_left_alone(own_folder: Path) -> None:
    (own_folder / ".glusterfs").mkdir()
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as root:
        made = FaultySandbox(
            "v", root=Path(root) / "s", nodes=1, shared="glusterfs", shared_folder=own_folder
        )
        with pytest.raises(ConfigError, match="belongs to a volume"):
            made.up()
    assert (own_folder / ".glusterfs").exists()


def test_a_state_folder_with_a_mount_in_it_is_not_deleted(own_folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as root:
        made = FaultySandbox(f"d{os.getpid()}", root=Path(root) / "s", nodes=1)
        made.up()
        inside = made.root / "by hand"
        inside.mkdir()
        subprocess.run(["mount", "--bind", own_folder, inside], check=True)
        with pytest.raises(SlurmError, match="still mounted"):
            made.down()
        subprocess.run(["umount", inside], check=True)
        assert made.down()
    assert_plain(own_folder)
