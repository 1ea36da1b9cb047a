"""`slurmddp cluster check --files`: this machine and two nodes measure the file system of the run folders."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.control.check import CheckedClusters, check_clusters
from slurmddp.control.json_encoding import from_json
from slurmddp.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_SLURM, SlurmError
from slurmddp.launchers.submit.file_step import measure_on_nodes
from slurmddp.runs.folder.file_system import shortfalls
from slurmddp.slurm.client import SlurmClient
from support.runs.agent_runs import wait_until
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import own_sandbox
from support.slurm.slurm_jobs import make_job
from support.slurm.train_project import SMALL, Command, make_project

pytestmark = pytest.mark.slurm

CACHED = "dcache_timeout=36000,entry_timeout=36000,attr_timeout=36000,negative_timeout=36000"
"""Options of a mount that shows no change by itself within the time of a test."""

SHORT = "dir_cache=no,entry_timeout=3,attr_timeout=3,negative_timeout=30"
"""Options of a mount that shows changes within the times of NFS."""


@pytest.fixture
def command(sandbox: FaultySandbox, tmp_path: Path) -> Command:
    """The command in a project whose cluster file `mine` describes the sandbox."""
    write_cluster(tmp_path)
    return Command(tmp_path, sandbox.environment())


def write_cluster(project: Path, *lines: str) -> None:
    path = project / "conf/cluster/mine.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["name: mine", "partition: low", "ranks_per_node: 1", *lines, ""]))


def test_all_hosts_measure_and_nothing_is_left(command: Command, sandbox: FaultySandbox) -> None:
    # Neither these lines nor their output reaches the connection of the hosts.
    write_cluster(command.project, "setup: [echo a banner, cat]")
    shown = command("cluster", "check", "mine", "--files")
    assert "mine: fits this site\n" in shown
    assert f"2 nodes and this machine measure {command.project} by a step of srun" in shown
    assert f"{command.project}, seconds until a change of another host is seen:\n" in shown
    assert "a new file, by listing" in shown and " lines lost, 0 broken\n" in shown
    assert "locks (flock; fcntl)       keep other hosts out; keep other hosts out\n" in shown
    assert {path.name for path in command.project.iterdir()} == {"conf"}
    wait_until(lambda: sandbox.jobs() == {}, "end of the step")


def test_json_has_the_same_for_a_cluster_of_one_node(command: Command) -> None:
    write_cluster(command.project, "max_nodes: 1")
    shown = subprocess.run(
        [sys.executable, "-m", "slurmddp", "cluster", "check", "--files", "--json"],
        cwd=command.project,
        env=command.environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    files = from_json(CheckedClusters, json.loads(shown.stdout)).files["mine"]
    assert len(files.hosts) == 2 and files.folder == command.project
    for view in files.hosts:
        assert None not in view.seen_s.values() and "name" in view.seen_s
    assert shortfalls(files) == files.shortfalls == ()


def test_a_step_that_does_not_start_in_time_is_cancelled_with_its_reason(
    command: Command, sandbox: FaultySandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    occupier = occupy_all(command)
    with pytest.raises(SlurmError) as caught:
        check_clusters(command.project, ["mine"], files=True, start_s=1.0)
    assert "The step that measures the files has not started within 1 s: " in caught.value.message
    assert caught.value.message.endswith("It is cancelled.") and caught.value.exit_code == EXIT_SLURM
    wait_until(lambda: [*sandbox.jobs()] == [occupier], "end of the step")
    assert {path.name for path in command.project.iterdir()} == {"conf"}


def test_ctrl_c_cancels_the_step_that_waits(command: Command, sandbox: FaultySandbox) -> None:
    occupier = occupy_all(command)
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmddp", "cluster", "check", "mine", "--files"],
        cwd=command.project,
        env=command.environment,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(sandbox.jobs()) == 2, "second job")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == EXIT_INTERRUPTED
    wait_until(lambda: [*sandbox.jobs()] == [occupier], "end of the step")


def occupy_all(command: Command) -> str:
    """Submit a job that keeps every node; return its id when it runs."""
    submission = ["sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive"]
    job_id = command.slurm(*submission, "--output=/dev/null", "--wrap=sleep 3600")
    wait_until(lambda: command.slurm("squeue", "-h", "-j", job_id, "-o", "%T") == "RUNNING", "running job")
    return job_id


def test_a_node_without_the_python_is_named_by_srun(command: Command, sandbox: FaultySandbox) -> None:
    write_cluster(command.project, "python: /nowhere/python")
    shown = command("cluster", "check", "mine", "--files", code=EXIT_SLURM)
    assert "srun failed: " in shown and "/nowhere/python" in shown and "(`python:`, `setup:`)" in shown
    wait_until(lambda: sandbox.jobs() == {}, "end of the step")


def test_a_partition_that_does_not_exist_is_found_before_a_step_is_queued(command: Command) -> None:
    write_cluster(command.project, "max_nodes: 9")
    shown = command("cluster", "check", "mine", "--files", code=EXIT_CONFIG)
    assert "max_nodes=9" in shown and "step of srun" not in shown


def test_caches_and_locks_of_the_nodes_mounts_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = {"shared": "sshfs", "shared_folder": tmp_path, "mount_options": CACHED}
    with own_sandbox("z", nodes=2, **mount) as sandbox:
        for name, value in sandbox.environment().items():
            monkeypatch.setenv(name, value)
        job = make_job(partition="low", project_dir=tmp_path, python=sys.executable)
        files = measure_on_nodes(job, tmp_path, 2, SlurmClient(), limit_s=1.0)
        login, *nodes = files.hosts
        assert [view.kind for view in nodes] == ["fuse.sshfs"] * 2
        assert None not in login.seen_s.values(), "this machine works on the folder itself"
        for view in nodes:
            assert view.seen_s["name"] is None and view.seen_s["listing"] is None
            assert view.unseen == ()
        assert (files.flock, files.broken_reads, files.lost_lines) == ("one host", 0, 0)
        assert [*tmp_path.iterdir()] == []


def test_a_folder_that_the_nodes_do_not_have_is_named(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_cluster(project)
    with own_sandbox("z", nodes=2, shared="nfs", shared_folder=tmp_path) as sandbox:
        command = Command(project, sandbox.environment())
        for node in sandbox.nodes:
            hide = ["mount", "-t", "tmpfs", "none", tmp_path]
            subprocess.run([*sandbox.on_node(node), *hide], check=True)
        shown = command("cluster", "check", "mine", "--files", code=EXIT_CONFIG)
        assert f"n1: [Errno 2] No such file or directory: '{project}'" in shown
        assert "It must have the same path on the nodes and on the login node" in shown
        assert {path.name for path in project.iterdir()} == {"conf"}


def test_the_preflight_of_a_run_warns_of_locks_that_hold_on_one_host(tmp_path: Path) -> None:
    mount = {"shared": "sshfs", "shared_folder": tmp_path, "mount_options": SHORT}
    with own_sandbox("z", nodes=2, **mount) as sandbox:
        command = Command(make_project(tmp_path / "project"), sandbox.environment())
        run = command.submit(
            "checked", "nodes=2", "ranks_per_node=1", "train.steps=2", "preflight=on", *SMALL
        )
        run.wait("end", lambda: run.events("ended"))
        assert run.events("ended")[0]["outcome"] == "finished", run.story()
        (event,) = run.events("preflight")
        assert event["failed"] == [] and event["files"]["flock"] == "one host"
        for view in event["files"]["hosts"]:
            assert view["kind"] == "fuse.sshfs" and None not in view["seen_s"].values()
        texts = [warned["text"] for warned in run.events("warned")]
        assert any("A lock (flock) of one host does not keep other hosts out." in text for text in texts)
