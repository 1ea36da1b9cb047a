"""The first failure of an attempt, if agents were killed, could not start, or ended their ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.failures.kinds import PHRASES
from slurmddp.runs.failures.read import rank_exits, read_failure
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import make_run, start_agent, wait_for_lines

WRONG_PYTHON = PHRASES["wrong_python"]
DEAF = """
import os, signal, time
def main(run_dir):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while not os.path.exists(f"{run_dir}/fail-{os.environ['RANK']}"):
        time.sleep(0.01)
    return 3
"""
CANCELLED = "slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-22T02:21:40 ***\n"
TRACEBACK = """Traceback (most recent call last):
  File "/site-packages/slurmddp/runs/durable.py", line 16, in <module>
    import xxhash
{}
"""
NO_SLURMDDP = (
    "/usr/bin/python3: Error while finding module specification for 'slurmddp.launchers.agent' "
    "(ModuleNotFoundError: No module named 'slurmddp')\n"
)
NO_PYTHON = "slurmstepd-n2: error: execve(): /no/python: No such file or directory\n"


def test_a_rank_that_is_ended_because_node_0_is_lost_is_not_the_failure(tmp_path: Path) -> None:
    folder = make_run(tmp_path, DEAF, nodes=2, ranks_per_node=1)
    folder.config_file.write_text(folder.config_file.read_text() + "elastic: true\n")
    agents = [start_agent(folder, nodes=2, node_rank=node) for node in (0, 1)]
    wait_for_lines(folder, "ready", 2)
    agents[0].kill()
    assert agents[1].wait(timeout=120) == 1
    agents[0].wait()
    (end,) = rank_exits(folder, 0)
    assert (end.rank, end.signal) == (1, "SIGKILL")
    assert read_failure(folder, 0) is None


def test_a_rank_that_failed_by_itself_is_though_its_agent_could_not_say_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path, DEAF, ranks_per_node=2)
    agent = start_agent(folder, nodes=1, node_rank=0)
    wait_for_lines(folder, "ready", 2)
    (folder.path / "fail-1").touch()
    assert agent.wait(timeout=120) == 1
    folder.failure_file(0).unlink()
    failure = read_failure(folder, 0)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, 3)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.log_dir(0).mkdir(parents=True)
    run.add_event("ended", attempt=0, lost={0: "n1", 1: "n2"})
    return run


@pytest.mark.parametrize(
    ("line", "reason", "code"),
    [
        (TRACEBACK.format("ModuleNotFoundError: No module named 'xxhash'"), "No module named 'xxhash'", 1),
        (TRACEBACK.format("ImportError: libmpi.so: cannot open shared object file"), "libmpi.so", 1),
        ("/usr/bin/python3: No module named slurmddp\n", f"{WRONG_PYTHON}: No module named slurmddp", 1),
        (NO_SLURMDDP, f"{WRONG_PYTHON}: No module named 'slurmddp'", 1),
        (NO_PYTHON, f"{WRONG_PYTHON}: execve(): /no/python: No such file or directory", 2),
    ],
)
def test_why_an_agent_could_not_start_is_shown(folder: RunFolder, line: str, reason: str, code: int) -> None:
    (folder.log_dir(0) / "node-0.log").write_text(CANCELLED)
    (folder.log_dir(0) / "node-1.log").write_text(line)
    failure = read_failure(folder, 0)
    assert failure is not None
    assert failure.sentence.startswith(f"the agent of node 1 on n2 ended with exit code {code}: ")
    assert reason in failure.reason and not failure.reason.endswith("')")
    assert failure.last_lines == tuple(line.splitlines())


@pytest.mark.parametrize(
    ("batch", "line", "expected"),
    [
        ("n2: task 1: Exited with exit code 127", "/bin/box: 2: exec: apptainer: not found\n" + CANCELLED,
         "127: /bin/box: 2: exec: apptainer: not found"),
        ("n[1-2]: tasks 0-1: Exited with exit code 255", "FATAL: no image\n", "255: FATAL: no image"),
        ("n2: task 1: Exited with exit code 66", "Error: RUN is not a run folder.\nslurmddp agent: ended\n",
         "66: RUN is not a run folder."),
        ("n2: task 1: Exited with exit code 9", "", "9"),
    ],
    ids=["no runtime", "several tasks", "no folder", "silent"],
)  # fmt: skip
def test_the_last_line_of_an_agent_that_srun_saw_exit_is_shown(
    folder: RunFolder, batch: str, line: str, expected: str
) -> None:
    """The runtime of a container, or its image, is missing on the node."""
    (folder.log_dir(0) / "batch.log").write_text(f"srun: error: {batch}\nsrun ended with code 1.\n")
    for node in (0, 1):
        (folder.log_dir(0) / f"node-{node}.log").write_text(line)
    failure = read_failure(folder, 0)
    assert failure is not None
    node = 0 if "[" in batch else 1
    assert failure.sentence == f"the agent of node {node} on n{node + 1} ended with exit code {expected}"


@pytest.mark.parametrize("line", ["", CANCELLED, "a warning of some library\n", NO_PYTHON])
def test_agents_that_were_killed_leave_no_word(folder: RunFolder, line: str) -> None:
    killed = "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 137\n"
    (folder.log_dir(0) / "batch.log").write_text(killed)
    (folder.log_dir(0) / "node-1.log").write_text(line)
    folder.begun_file(0, 1).touch()
    failure = read_failure(folder, 0)
    assert failure is not None
    assert failure.sentence == "the agent on n1, n2 recorded no exit code: it was killed, or its host failed"
