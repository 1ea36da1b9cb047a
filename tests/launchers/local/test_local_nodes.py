"""Emulated nodes without ranks of torch: nodes that are lost, leave early, write late or can't be started."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.errors import RankFailure
from slurmddp.host import process as linux
from slurmddp.launchers.local import local_nodes
from support.runs.agent_runs import SAVING, children_of, events, runs, wait_for_lines, wait_until
from support.runs.local_runs import local_run

TOLERANT = [{"spare_nodes": 1, "nodes": 2}, {"elastic": True, "nodes": 3}]

STAND_INS = """
import os, pathlib, signal, sys, time
folder, node = pathlib.Path(sys.argv[1]), int(os.environ["SLURM_NODEID"])
(folder / f"here-{node}").write_text(str(os.getpid()))
while len(list(folder.glob("here-*"))) < 3:
    time.sleep(0.01)
if node == LOST:
    os.kill(os.getpid(), signal.SIGKILL)
lost = folder / "here-LOST"
while os.path.exists(f"/proc/{lost.read_text()}"):
    time.sleep(0.01)
time.sleep(0.3)  # Whoever ends the others because of it does so now.
(folder / f"went-on-{node}").touch()
"""


@pytest.mark.parametrize("job", TOLERANT, ids=str)
@pytest.mark.parametrize("lost", [0, 1])
def test_who_goes_on_when_a_pretended_node_is_lost_is_for_the_first_agent_to_say(
    tmp_path: Path, job: dict[str, int], lost: int
) -> None:
    run = local_run(tmp_path, agent=STAND_INS.replace("LOST", str(lost)), ranks_per_node=1, **job)
    run.start()
    if lost == 0:
        with pytest.raises(RankFailure, match="SIGKILL"):
            run.wait()
    else:
        assert run.wait() == 0
        assert {path.name for path in run.folder.path.glob("went-on-*")} == {"went-on-0", "went-on-2"}


LEAVES_EARLY = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
left = pathlib.Path(sys.argv[1], "left")
if os.environ["SLURM_NODEID"] == "2":
    left.with_name("leaving").write_text(str(os.getpid()))
    left.with_name("leaving").rename(left)
    sys.exit(75)
while not left.exists() or os.path.exists(f"/proc/{left.read_text()}"):
    time.sleep(0.01)
until = time.monotonic() + 0.5  # The launcher, which polls more often, would pass the stop on.
while time.monotonic() < until and not told:
    time.sleep(0.01)
sys.exit(75 if told else 0)
"""


@pytest.mark.parametrize("job", TOLERANT, ids=str)
def test_a_node_that_is_given_up_and_leaves_does_not_stop_the_run(
    tmp_path: Path, job: dict[str, int]
) -> None:
    run = local_run(tmp_path, agent=LEAVES_EARLY, ranks_per_node=1, **job)
    run.start()
    assert run.wait() == 0
    assert [event["outcome"] for event in events(run.folder, "ended")] == ["finished"]


WRITING = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["SLURM_NODEID"] == "0":
    (folder / "ready").touch()
while not (folder / ("ready" if os.environ["SLURM_NODEID"] == "1" else "written")).exists():
    time.sleep(0.01)
sys.exit(1)
"""


@pytest.mark.parametrize(("passed_s", "killed"), [(25, False), (35, True)])
def test_an_agent_has_as_long_as_under_slurm_to_write_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_s: int, killed: bool
) -> None:
    run = local_run(tmp_path, agent=WRITING, nodes=2, ranks_per_node=1)
    folder, poll = run.folder, run.nodes.poll
    run.start()
    try:
        with monkeypatch.context() as patched:
            now = [time.monotonic()]
            patched.setattr(local_nodes, "time", SimpleNamespace(monotonic=lambda: now[0]))
            wait_until(lambda: poll() is None and folder.failure_file(0).exists(), "node 1 has failed")
            now[0] += passed_s
            assert poll() is None
            if not killed:
                (folder.path / "written").touch()
            wait_until(lambda: poll() == 1, "all have ended")
        assert [agent.returncode for agent in run.nodes.agents] == [-9 if killed else 1, 1]
    finally:
        run.nodes.kill()
        run.wait()


def test_agents_of_the_next_attempt_have_their_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = "import os, time; time.sleep(600 * int(os.environ['SLURMDDP_ATTEMPT'])); raise SystemExit(1)"
    run = local_run(tmp_path, agent=agent)
    run.start()
    wait_until(lambda: run.nodes.poll() == 1, "the first attempt has failed")
    run.start()
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 35)
    assert run.nodes.poll() is None
    monkeypatch.undo()
    run.nodes.stop()
    assert run.wait() == 75


def test_a_killed_agent_ends_the_other_node(tmp_path: Path) -> None:
    run = local_run(tmp_path, SAVING, nodes=2)
    others = children_of(os.getpid())
    run.start()
    wait_for_lines(run.folder, "ready", 4)
    left = [process for process in children_of(os.getpid()) if process not in others]
    agents = [process for process in left if process.ppid() == os.getpid()]
    os.kill(agents[1].pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"agent of node 1 on .* was killed by SIGKILL|Node 1 .* was lost"):
        run.wait()
    wait_until(lambda: not any(runs(one) for one in left), "all processes of both nodes end")


def test_a_node_that_can_not_be_started_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start_bound(*args, **options))
        return started[0]

    started: list[subprocess.Popen[bytes]] = []
    start_bound = linux.start_bound
    monkeypatch.setattr(linux, "start_bound", start)
    run = local_run(tmp_path, SAVING, nodes=2)
    try:
        with pytest.raises(OSError, match="temporarily unavailable"):
            run.start()
        assert started[0].returncode == -signal.SIGKILL
    finally:
        started[0].kill()
        started[0].wait()
