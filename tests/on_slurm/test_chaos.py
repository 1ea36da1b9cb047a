"""A short run of `make chaos`: faults of several kinds, survived with the undisturbed weights."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from chaos import disk
from slurmddp.sandbox import processes
from slurmddp.sandbox.plan import SHARED
from support import TESTS
from support.slurm.faulty_sandbox import FaultySandbox

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1000)]

KINDS = "kill-rank,sigterm-rank,preempt-start,submit-at-once,restart-controller,flip-bit,kill-during-save"


ENVIRON = {**os.environ, "PYTHONPATH": str(TESTS)}


def chaos(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chaos", *words],
        cwd=folder,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_faults_of_seven_kinds_end_with_the_undisturbed_weights(tmp_path: Path) -> None:
    words = ["--faults=7", f"--kinds={KINDS}", "--steps=300", "--output=result.json"]
    done = chaos(*words, folder=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert result["complete"]
    assert result["equal"]
    kinds = set(KINDS.split(","))
    assert {fault["kind"] for fault in result["faults"]} == kinds
    came_back = {fault["kind"] for fault in result["faults"] if fault["outcome"] == "came back"}
    assert came_back >= kinds - {"restart-controller"}
    lost = {kind: found["lost_steps_most"] for kind, found in result["by_kind"].items()}
    assert [lost[kind] for kind in ("sigterm-rank", "preempt-start", "submit-at-once")] == [0, 0, 0]
    assert lost["flip-bit"] > 0
    assert "7 of 7 faults survived" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED)
def test_faults_of_a_shared_file_system_end_with_the_undisturbed_weights(tmp_path: Path, shared: str) -> None:
    kinds = "stop-server,hang-client,remove-files,kill-rank"
    words = [f"--shared={shared}", "--faults=4", f"--kinds={kinds}", "--steps=400", "--output=result.json"]
    done = chaos(*words, folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"]
    assert result["equal"]
    assert {fault["kind"] for fault in result["faults"]} == set(kinds.split(","))


def test_nothing_is_left_of_an_experiment_that_is_told_to_end() -> None:
    # The paths of a sandbox's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        started = subprocess.Popen(
            [sys.executable, "-m", "chaos", "--kinds=fill-disk"],
            env={**ENVIRON, "TMPDIR": folder},
            stderr=subprocess.PIPE,
            text=True,
        )
        with started:
            assert started.stderr is not None
            first = started.stderr.readline()
            mounts = Path("/proc/mounts").read_text()
            started.terminate()
            started.communicate(timeout=240)
        assert "sandbox is up" in first
        assert folder in mounts
        assert started.returncode == 130
        assert folder not in Path("/proc/mounts").read_text()
        assert folder not in Path("/etc/hosts").read_text()
        assert list(Path(folder).iterdir()) == []


def test_the_controller_can_be_restarted(sandbox: FaultySandbox) -> None:
    before = processes.recorded(sandbox.root)["slurmctld"]
    job = sandbox.command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()
    sandbox.restart_controller()
    after = processes.recorded(sandbox.root)["slurmctld"]
    assert (before.alive(), after.alive()) == (False, True)
    assert job in sandbox.jobs()


def test_a_full_disk_is_full_and_then_free_again(tmp_path: Path) -> None:
    with disk.mounted(tmp_path / "small", 2) as small:
        with disk.full(small), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (small / "file").write_bytes(bytes(4096))
        (small / "file").write_bytes(bytes(4096))
    assert not (tmp_path / "small" / "file").exists()
