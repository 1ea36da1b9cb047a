"""Ranks of an agent that can't be forked: they start as programs of their own and are ranks all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmddp.errors import GOOD_CODES
from slurmddp.launchers.agent import preload
from slurmddp.launchers.agent.worker import RankSpec
from support.runs.agent_runs import runs, wait_until

AGENT = """
import json, os, signal, sys, time, types
from pathlib import Path
from slurmddp.environments.names import CHANNEL_VARIABLE, HEARTBEAT_VARIABLE
from slurmddp.launchers.agent import preload
from slurmddp.launchers.agent.worker_group import start_process
from slurmddp.launchers.agent.worker import RankSpec
from slurmddp.host.signals import SignalInbox
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.host.heartbeat_page import HeartbeatPage

if sys.argv[1] == "cuda":
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].cuda = types.SimpleNamespace(is_initialized=lambda: True)
folder = Path(sys.argv[2])
sys.path[0] = str(folder)
page, (ours, theirs) = HeartbeatPage.create(), WriterChannel.pair()
environ = {"RANK": "3", HEARTBEAT_VARIABLE: str(page.descriptor), CHANNEL_VARIABLE: str(theirs.fileno())}
with SignalInbox((signal.SIGTERM, signal.SIGCHLD)) as inbox:
    log = folder / "rank.log"
    rank = RankSpec(local_rank=1, environ=environ, log=log, entry="program:main", run_dir="there")
    pid = start_process(rank, [inbox.close_in_child], forks=preload.why_no_fork() is None)
    theirs.close()
    (folder / "pid").write_text(str(pid))
    if sys.argv[3:]:
        os.kill(pid, signal.Signals[sys.argv[3]])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
message = ours.receive(60.0)[0] if code == 0 else {}
print(json.dumps([code, page.read().step, message]))
"""
PROGRAM = """
import os, sys
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.host.heartbeat_page import HeartbeatPage

def main(run_dir):
    HeartbeatPage.attach(os.environ).completed(7, 0.1, 0.0)
    seen = [run_dir, os.environ["RANK"], sys.path[0], "torch" in sys.modules, os.getpgid(0) == os.getpid()]
    with open("/proc/self/cmdline", "rb") as command:
        seen.append(b"RANK" in command.read())
    seen.append("slurmddp.launchers.agent.worker_group" in sys.modules)
    WriterChannel.attach(os.environ).send({"seen": seen})
    print("said by a rank")
    return 0
"""
HANGING = """
import time
def main(run_dir):
    print("here", flush=True)
    time.sleep(600)
"""


def start_agent(folder: Path, how: str, program: str, *more: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(program)
    script = folder / "agent.py"
    script.write_text(AGENT)
    command = [sys.executable, str(script), how, str(folder), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("how", "forked"), [("cuda", False), ("nothing", True)])
def test_a_rank_is_the_same_forked_or_not(tmp_path: Path, how: str, forked: bool) -> None:
    with start_agent(tmp_path, how, PROGRAM) as agent:
        said = agent.communicate(timeout=120)[0]
    code, step, message = json.loads(said)
    assert (code, step) == (0, 7)
    assert message["seen"] == ["there", "3", str(tmp_path), False, True, False, forked]
    assert (tmp_path / "rank.log").read_text() == "said by a rank\n"


def test_a_stop_that_comes_before_a_spawned_rank_has_begun_is_a_stop(tmp_path: Path) -> None:
    with start_agent(tmp_path, "cuda", HANGING, "SIGTERM") as agent:
        said = agent.communicate(timeout=120)[0]
    assert json.loads(said)[0] in GOOD_CODES, "the signal waits until the rank can take it"


def test_a_spawned_rank_ends_with_its_agent(tmp_path: Path) -> None:
    with start_agent(tmp_path, "cuda", HANGING) as agent:
        log = tmp_path / "rank.log"
        wait_until(lambda: log.exists() and "here" in log.read_text(), "the rank runs")
        agent.kill()
    rank = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(rank), "the rank is gone")


def test_descriptors_are_those_that_the_variables_name() -> None:
    environ = {"SLURMDDP_HEARTBEAT_FD": "3", "SLURMDDP_MEMORY_FDS": "5,6", "SLURMDDP_CHANNEL_FD": ""}
    start = RankSpec(local_rank=0, environ=environ, log=Path("log"), entry="a:b", run_dir="there")
    assert start.descriptors == (3, 5, 6)


def test_what_a_fork_does_not_survive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    before = preload.why_no_fork()
    cuda.is_initialized = lambda: True
    assert preload.why_no_fork() == "has initialised CUDA"
    cuda.is_initialized = lambda: False
    assert preload.why_no_fork() == before
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait, name="monitor")
    thread.start()
    try:
        assert "has started a thread" in (preload.why_no_fork() or "")
    finally:
        waits.set()
        thread.join()


THREADS = """
import threading
stays = threading.Event()
threading.Thread(target=stays.wait, name="monitor", daemon=True).start()
"""


def test_the_import_that_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "with_monitor.py").write_text(THREADS)
    code = (
        "from slurmddp.launchers.agent import preload as node\n"
        "print(node.import_for_all(['json', 'with_monitor', 'csv']), node.import_for_all(['json']))"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("importing with_monitor has started a thread (monitor) "), done.stderr
