"""The sandbox is a real SLURM, comes up whole or not at all, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.sandbox import processes
from support.runs.agent_runs import wait_until
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import bring_back

pytestmark = pytest.mark.slurm

BROKEN_SLURMD = """#!/bin/sh
if [ "$1" = -V ]; then echo slurm 22.05.8; exit; fi
echo "fatal: the disk is on fire" >&2
exit 1
"""
DETACHED = "setsid sh -c 'echo $$ >> {pids}; exec sleep 600' </dev/null >/dev/null 2>&1 &"


def cli(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurmddp", "sandbox", *words],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def submit(sandbox: FaultySandbox, *words: str) -> str:
    return sandbox.command("sbatch", "--parsable", "--output=/dev/null", *words).strip()


def job(sandbox: FaultySandbox, job_id: str) -> dict[str, str]:
    """Return what SLURM knows of a job, as `scontrol` prints it."""
    text = sandbox.command("scontrol", "--oneliner", "show", "job", job_id)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def links(sandbox: FaultySandbox) -> Set[tuple[str, str]]:
    """Return name and number of the network interfaces of a sandbox that is up."""
    names = (sandbox.plan.bridge, *(node.link for node in sandbox.plan.nodes))
    found = (Path("/sys/class/net", name, "ifindex") for name in names if name.startswith("sddp"))
    return {(path.parent.name, path.read_text()) for path in found if path.exists()}


def assert_no_trace(sandbox: FaultySandbox, had: Set[tuple[str, str]] = frozenset()) -> None:
    """Fail when this machine still shows anything of a sandbox that `had` these interfaces."""
    assert processes.members(sandbox.root) == set()
    assert not sandbox.root.exists()
    assert str(sandbox.root) not in Path("/etc/hosts").read_text()
    assert str(sandbox.root) not in Path("/proc/mounts").read_text()
    # By number as well: another sandbox may have taken the name since.
    numbers = {(path.parent.name, path.read_text()) for path in Path("/sys/class/net").glob("sddp*/ifindex")}
    assert not numbers & had


@pytest.fixture
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FaultySandbox]]:
    """Make sandboxes beside the session's, and take them down whatever happens."""
    made: list[FaultySandbox] = []

    def make(**sizes: object) -> FaultySandbox:
        folder = tmp_path_factory.mktemp("sb")
        made.append(FaultySandbox(f"o{os.getpid()}x{len(made)}", root=folder / "s", **sizes))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.down()


def test_all_nodes_are_idle_and_all_daemons_run(sandbox: FaultySandbox) -> None:
    sandbox.command("scontrol", "reconfigure")
    bring_back(sandbox)  # SLURM 24.11 reads its nodes again, which are "unknown" for a moment.
    status = sandbox.status()
    assert status.healthy
    assert status.nodes == dict.fromkeys(sandbox.nodes, "idle")
    assert len(status.nodes) == 3
    assert {"munged", "slurmctld", *sandbox.nodes} <= status.daemons.keys()


def test_a_step_runs_on_hosts_with_names_and_addresses_of_their_own(sandbox: FaultySandbox) -> None:
    script = 'echo "$SLURMD_NODENAME $(hostname) $(hostname -I)"'
    rows = sandbox.command("srun", "-N2", "sh", "-c", script).splitlines()
    words = (f"{row} -".split() for row in rows)
    seen = {name: (host, address) for name, host, address, *_ in words}
    if sandbox.plan.namespaces:
        expected = {node.name: (node.name, node.address) for node in sandbox.plan.nodes[:2]}
        assert seen == expected
    else:
        assert {host for host, _ in seen.values()} == {sandbox.plan.machine.host}


def test_nodes_reach_each_other_by_name(sandbox: FaultySandbox) -> None:
    other = sandbox.plan.nodes[1]
    host = other.name if sandbox.plan.namespaces else other.address
    script = f"exec 3<>/dev/tcp/{host}/{other.port} && echo reached"
    assert sandbox.command("srun", "-w", sandbox.nodes[0], "bash", "-c", script).strip() == "reached"


def test_fake_gpus_are_handed_out(sandbox: FaultySandbox) -> None:
    script = 'echo "[$CUDA_VISIBLE_DEVICES]"'
    assert sandbox.command("srun", "--gpus-per-node=2", "sh", "-c", script).strip() == "[0,1]"
    assert sandbox.command("srun", "sh", "-c", script).strip() == "[]"
    with pytest.raises(SlurmError, match="node configuration is not available"):
        sandbox.command("srun", "--gpus-per-node=3", "true")


def test_a_high_job_preempts_a_low_one_which_comes_back(
    own: Callable[..., FaultySandbox], tmp_path: Path
) -> None:
    mine = own(nodes=1, grace_s=0)
    mine.up()
    starts = tmp_path / "starts"
    low = submit(mine, "--exclusive", f"--wrap=echo again=$SLURM_RESTART_COUNT >> {starts}; sleep 300")
    wait_until(starts.exists, "the low job")
    high = submit(mine, "-p", "high", "--exclusive", "--wrap=sleep 1")
    wait_until(lambda: job(mine, high)["JobState"] == "COMPLETED", "the high job to run")
    wait_until(lambda: len(starts.read_text().splitlines()) == 2, "the low job to come back")
    assert starts.read_text().splitlines() == ["again=", "again=1"]
    assert job(mine, low)["Restarts"] == "1"


def test_a_preempted_step_is_told_at_once_and_keeps_its_grace(
    own: Callable[..., FaultySandbox], tmp_path: Path
) -> None:
    mine = own(nodes=1, grace_s=300)
    mine.up()
    started, told = tmp_path / "started", tmp_path / "told"
    step = f"trap 'touch {told}; trap - TERM' TERM; touch {started}; while :; do sleep 0.1; done"
    low = submit(mine, "--exclusive", f'--wrap=srun -n1 bash -c "{step}"')
    wait_until(started.exists, "the step")
    submit(mine, "-p", "high", "--exclusive", "--wrap=sleep 1")
    wait_until(told.exists, "SIGTERM")
    found = job(mine, low)
    assert found["JobState"] in {"RUNNING", "SIGNALING"}
    assert "PreemptTime" in found


def test_cancel_kills_also_processes_that_detached_themselves(sandbox: FaultySandbox, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    detach = DETACHED.format(pids=pids)
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/bash\n{detach}\nsrun -N2 bash -c "{detach} sleep 600"\n')
    submit(sandbox, "-N2", str(script))
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 3, "three detached processes")
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(processes.start_time(pid) for pid in started)
    assert sandbox.cancel_jobs()
    wait_until(lambda: not any(processes.start_time(pid) for pid in started), "the processes to end")


def test_a_cut_link_isolates_a_node_until_it_is_restored(sandbox: FaultySandbox) -> None:
    first, second = sandbox.plan.nodes[:2]
    if not sandbox.plan.namespaces:
        return  # On plain loopback nodes have no links.
    script = f"exec 3<>/dev/tcp/{second.name}/{second.port}"

    def reached(patience_s: int) -> bool:
        knock = [*sandbox.on_node(first.name), "timeout", str(patience_s), "bash", "-c", script]
        return subprocess.run(knock, capture_output=True).returncode == 0

    assert reached(60)
    sandbox.cut_link(second.name)
    assert not reached(2)
    sandbox.restore_link(second.name)
    assert reached(60)


def test_env_makes_it_the_slurm_of_a_shell_and_undoes_that(sandbox: FaultySandbox) -> None:
    which = f"--name {sandbox.request.name} --dir {sandbox.root}"
    slurmddp = f"{sys.executable} -m slurmddp sandbox env {which}"
    script = f'''eval "$({slurmddp})" && sinfo -h -o %D -p low
        eval "$({slurmddp} --unset)"; echo "conf=[$SLURM_CONF]"'''
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == ["3", "conf=[]"], done.stderr


def test_up_twice_then_down_twice_and_no_trace_remains(
    own: Callable[..., FaultySandbox], sandbox: FaultySandbox, tmp_path: Path
) -> None:
    mine = own()
    which = ("--name", mine.request.name, "--dir", str(mine.root))
    first = cli("up", *which, "--nodes", "1")
    assert first.returncode == 0, first.stderr
    assert f'eval "$(slurmddp sandbox env --name {mine.request.name}' in first.stdout
    assert "was up already: 1 node of 4 CPUs" in cli("up", *which).stdout
    assert cli("up", *which, "--nodes", "2").returncode == ConfigError.exit_code
    assert cli("status", *which).returncode == 0

    pids, had = tmp_path / "pids", links(mine)
    assert len(had) == (2 if mine.plan.namespaces else 0)
    submit(mine, f"--wrap={DETACHED.format(pids=pids)} trap '' TERM; sleep 600 & wait; wait")
    wait_until(lambda: pids.exists() and pids.read_text(), "the job")
    assert "was stopped and removed" in cli("down", *which).stdout
    assert_no_trace(mine, had)
    assert processes.start_time(int(pids.read_text())) is None
    assert "no sandbox" in cli("down", *which).stdout
    missing = cli("status", *which)
    assert missing.returncode == SlurmError.exit_code
    assert "slurmddp sandbox up" in missing.stderr
    assert sandbox.status().healthy, "the other sandbox must not notice"


def test_accounting_answers_through_sacct(own: Callable[..., FaultySandbox]) -> None:
    mine = own(nodes=1, accounting=True)
    mine.up()
    mine.command("srun", "--job-name=counted", "true")
    ask = ("sacct", "-X", "--noheader", "--parsable2", "--format=JobName,State,NodeList")
    wait_until(lambda: "COMPLETED" in mine.command(*ask), "the job in the database")
    assert mine.command(*ask).split() == [f"counted|COMPLETED|{mine.nodes[0]}"]
    mine.down()
    assert_no_trace(mine)


def test_loopback_mode_works_and_a_killed_node_comes_back(own: Callable[..., FaultySandbox]) -> None:
    mine = own(namespaces=False)
    mine.up()
    assert mine.environment()["SLURMDDP_MASTER_ADDR"] == "127.0.0.1"
    assert mine.command("srun", "-N2", "hostname").split() == [mine.plan.machine.host] * 2

    # A slurmd that dies while a job is completing leaves it so until SLURM asks again, a minute later.
    wait_until(lambda: not mine.jobs(), "the step's end")
    mine.kill_node(mine.nodes[1])
    assert mine.status().daemons[mine.nodes[1]] is False
    assert not mine.status().healthy
    mine.restore_node(mine.nodes[1])
    wait_until(lambda: mine.status().healthy, "the node to come back")
    assert mine.command("srun", "-w", mine.nodes[1], "echo", "back").strip() == "back"
    mine.down()
    assert_no_trace(mine)


def test_a_power_cut_on_a_node_takes_its_processes_only(
    own: Callable[..., FaultySandbox], tmp_path: Path
) -> None:
    mine = own()
    mine.up()
    script = f"echo $$ > {tmp_path}/$SLURMD_NODENAME; exec sleep 600"
    submit(mine, "-N2", f"--wrap=srun sh -c '{script}'")
    files = [tmp_path / node for node in mine.nodes]
    wait_until(
        lambda: all(file.exists() and file.read_text().strip() for file in files), "a process on each node"
    )
    mine.kill_node(mine.nodes[1], with_jobs=True)
    alive = [processes.start_time(int(file.read_text())) is not None for file in files]
    assert alive == [True, False]


def test_what_a_reboot_leaves_is_cleared_by_the_next_up(own: Callable[..., FaultySandbox]) -> None:
    mine = own(nodes=1)
    mine.up()
    processes.kill_all(lambda: processes.members(mine.root))
    assert not mine.status().healthy
    assert mine.up()
    assert mine.status().healthy
    had = links(mine)
    mine.down()
    assert_no_trace(mine, had)


def test_a_failed_start_tells_the_log_and_takes_everything_down(
    own: Callable[..., FaultySandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "slurmd"
    broken.write_text(BROKEN_SLURMD)
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    mine = own()
    with pytest.raises(SlurmError, match="the disk is on fire") as caught:
        mine.up()
    assert re.search(rf"{mine.request.name}-n\d", caught.value.message)
    assert "were removed again" in caught.value.hint
    assert_no_trace(mine)
