"""Scripts that are asked to stop: the meaning of their exit codes, and how often their ranks get a signal."""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import psutil
import pytest

from slurmddp.environments.time_limits import TimeLimits
from slurmddp.host.process import REAPER_NAME
from slurmddp.launchers.agent.stop_requests import StopRequests
from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import make_run, start_agent, wait_for_lines, wait_until
from support.runs.restarting_runs import agents_of

SCRIPT = """
import os, signal, sys, time
from slurmddp.host.heartbeat_page import HeartbeatPage

got, rank = [], int(os.environ["RANK"])


def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    got.append(number)


def main(run_dir):
    run_dir = os.environ["SLURMDDP_RUN_DIR"]
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    for number in @handled@:
        signal.signal(number, note)
    print("ready", flush=True)
    while not got and not os.path.exists(f"{run_dir}/end"):
        time.sleep(0.01)
    while os.path.exists(f"{run_dir}/wait"):
        time.sleep(0.01)
@end@


if __name__ == "__main__":
    sys.exit(main(""))
"""
BOTH = "(signal.SIGTERM, signal.SIGUSR2)"
OUTLIVES = """
import os, signal, sys, time

run_dir = os.environ["SLURMDDP_RUN_DIR"]


def save(number, frame):
    time.sleep(3)  # Longer than ranks of the built-in trainer have.
    open(f"{run_dir}/saved", "w").write("all")
    sys.exit()


if os.environ["RANK"] == "1":
    @rank_1_begins@
print("ready", flush=True)
while not os.path.exists(f"{run_dir}/end"):
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    sys.exit(3)
file = open(f"{run_dir}/saved", "w")
file.write("all")
@rank_1_ends@
"""
PEER_LOST = (
    "raise RuntimeError('[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer')"
)


def run_of(
    tmp_path: Path, end: str, *, handled: str = BOTH, is_script: bool = True, **options: Any
) -> RunFolder:
    text = SCRIPT.replace("@handled@", handled).replace("@end@", f"    {end}")
    program = {"program": {"script": "rank_program.py"}} if is_script else {}
    return make_run(tmp_path, text, **program, **options)


@pytest.mark.parametrize(
    ("end", "asked", "is_script", "code"),
    [
        ("return 0", True, True, 75),
        ("sys.exit()", True, True, 75),
        ("sys.exit(143)", True, True, 75),
        ("sys.exit(130)", True, True, 75),
        ("signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)", True, True, 75),
        (f"{PEER_LOST} if rank else sys.exit()", True, True, 75),
        ("raise ValueError('it is broken')", True, True, 1),
        ("sys.exit(78)", True, True, 78),
        ("return 0", False, True, 0),
        ("HeartbeatPage.attach(os.environ).finish(); return 0", True, True, 0),
        ("return 0", True, False, 0),
    ],
    ids=[
        *("0", "SystemExit without a code", "143", "130", "a signal", "a lost peer", "an error", "a refusal"),
        *("not asked", "a training that has finished", "not a script"),
    ],
)
def test_a_script_that_was_asked_to_stop_has_stopped_whatever_its_code(
    tmp_path: Path, end: str, asked: bool, is_script: bool, code: int
) -> None:
    folder = run_of(tmp_path, end.replace("; return", "\n    return"), is_script=is_script)
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        if asked:
            agent.terminate()
        else:
            (folder.path / "end").touch()
        assert agent.wait(timeout=120) == code
    assert folder.exit_code_of(0, 0) == code
    failure = capture.read(folder, 0)
    assert (failure is not None) is (code in (1, 78))
    assert failure is None or failure.asked_to_stop


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_save_to_their_end_after_another_rank_has_failed_at_the_stop(
    tmp_path: Path, nodes: int
) -> None:
    """As under torchrun: one that has nothing to save may leave with an error at once."""
    end = f"""if rank == {2 * nodes - 1}:
        sys.exit(3)
    while not os.path.exists(f"{{run_dir}}/logs/attempt-0/exit-rank-{2 * nodes - 1}"):
        time.sleep(0.01)
    time.sleep(3)  # Longer than ranks have that are to end.
    open(f"{{run_dir}}/saved-{{rank}}", "w").close()
"""
    folder = run_of(tmp_path, end, nodes=nodes)
    with agents_of(folder, nodes) as agents:
        wait_for_lines(folder, "ready", 2 * nodes)
        for agent in agents:
            agent.terminate()
        assert [agent.wait(timeout=120) for agent in agents] == [1] * nodes
    assert len([*folder.path.glob("saved-*")]) == 2 * nodes - 1
    failure = capture.read(folder, 0)
    assert failure is not None and (failure.rank, failure.exit_code) == (2 * nodes - 1, 3)


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ("signal.signal(signal.SIGTERM, save)", "time.sleep(600)"),
        ("pass", "time.sleep(0.1)\nraise ValueError('the error of both')"),
    ],
    ids=["saves at SIGTERM", "fails a moment later"],
)
def test_ranks_of_a_script_end_by_themselves_after_a_failure(tmp_path: Path, begins: str, ends: str) -> None:
    """As under torchrun: it looks for ended ranks every 0.1 s, and gives the others 30 s after SIGTERM."""
    text = OUTLIVES.replace("@rank_1_begins@", begins).replace("@rank_1_ends@", ends)
    folder = make_run(tmp_path, text, program={"script": "rank_program.py"})
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        (folder.path / "end").touch()
        assert agent.wait(timeout=120) == 1
    failure = capture.read(folder, 0)
    assert failure is not None and (failure.rank, failure.exit_code) == (0, 3)
    assert (folder.path / "saved").read_text() == "all"


def send_to_all(agent: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    """Signal every process of an agent's step, as SLURM does without control groups: the deepest first."""
    below = psutil.Process(agent.pid).children(recursive=True)
    assert REAPER_NAME in {one.name() for one in below}
    for one in reversed(below):
        one.send_signal(sent)
    agent.send_signal(sent)


def send_to_agent(agent: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    """Signal an agent alone, as SLURM does with control groups."""
    agent.send_signal(sent)


def counts(folder: RunFolder, ranks: int) -> list[list[str]]:
    """Return the signals that each rank has got."""
    logs = [folder.rank_log(0, rank).read_text().splitlines() for rank in range(ranks)]
    return [[line.removeprefix("got ") for line in log if line.startswith("got ")] for log in logs]


def end_of(
    folder: RunFolder, agents: Sequence[subprocess.Popen[bytes]], names: Sequence[str]
) -> list[list[str]]:
    """Let the ranks leave once each has got the signals; return what they have got in the end."""
    ranks = 2 * len(agents)
    wait_until(lambda: all(set(names) <= set(got) for got in counts(folder, ranks)), f"{names} at all ranks")
    (folder.path / "wait").unlink()
    assert [agent.wait(timeout=120) for agent in agents] == [75] * len(agents)
    return counts(folder, ranks)


@pytest.mark.parametrize(
    ("send", "sent", "handled", "expected"),
    [
        (send_to_agent, ("SIGTERM",), BOTH, ["SIGTERM"]),
        (send_to_agent, ("SIGTERM", "SIGTERM"), BOTH, ["SIGTERM"]),
        (send_to_agent, ("SIGUSR2",), BOTH, ["SIGUSR2"]),
        (send_to_agent, ("SIGUSR2", "SIGTERM"), BOTH, ["SIGUSR2", "SIGTERM"]),
        (send_to_agent, ("SIGUSR2", "SIGTERM"), "(signal.SIGTERM,)", ["SIGTERM"]),
        (send_to_all, ("SIGTERM",), BOTH, ["SIGTERM"]),
        (send_to_all, ("SIGUSR2",), BOTH, ["SIGUSR2"]),
        (send_to_all, ("SIGUSR2", "SIGTERM"), BOTH, ["SIGUSR2", "SIGTERM"]),
    ],
)
def test_each_rank_gets_each_signal_once(
    tmp_path: Path,
    send: Callable[[subprocess.Popen[bytes], signal.Signals], None],
    sent: Sequence[str],
    handled: str,
    expected: list[str],
) -> None:
    """Most sites let SLURM signal the agent alone, others every process of the step."""
    folder = run_of(tmp_path, "return 0", handled=handled)
    (folder.path / "wait").touch()
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        for name in sent:
            send(agent, signal.Signals[name])
            wait_until(lambda: all(counts(folder, 2)), "a signal at each rank")
        assert end_of(folder, [agent], expected) == [expected] * 2


@pytest.mark.parametrize("is_late", [False, True], ids=["slurm signals both", "slurm signals one"])
def test_ranks_of_another_node_get_the_signal_once_from_slurm_or_from_their_agent(
    tmp_path: Path, is_late: bool
) -> None:
    folder = run_of(tmp_path, "return 0", nodes=2)
    (folder.path / "wait").touch()
    with agents_of(folder, 2) as agents:
        wait_for_lines(folder, "ready", 4)
        send_to_all(agents[0], signal.SIGTERM)
        log = folder.log_dir(0) / "node-1.log"
        wait_until(lambda: "another node was asked to stop" in log.read_text(), "the request on node 1")
        if not is_late:
            send_to_all(agents[1], signal.SIGTERM)
        assert end_of(folder, agents, ["SIGTERM"]) == [["SIGTERM"]] * 4


@pytest.mark.parametrize("is_late", [False, True], ids=["slurm signals both", "slurm signals one"])
def test_the_log_says_that_a_signal_was_passed_on_once_that_is_so(is_late: bool) -> None:
    workers = MagicMock(failed=[], restart_count=0)
    recorder = MagicMock()
    story = MagicMock()
    story.attach_mock(workers.ask_to_stop, "signal")
    story.attach_mock(recorder.log, "log")
    requests = StopRequests(workers, MagicMock(), recorder, TimeLimits(), MagicMock())
    requests.forward(signal.SIGTERM, by_slurm=True)
    assert story.mock_calls == [call.log("another node was asked to stop the run")]
    if is_late:
        requests.poll(math.inf)
    else:
        requests.receive(signal.SIGTERM)
    assert story.mock_calls[1:] == [
        call.signal(signal.SIGTERM),
        call.log("SIGTERM is passed on to the ranks"),
    ]
