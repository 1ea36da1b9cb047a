"""The agent forks ranks, watches them, and records how they ended; ranks here need no torch."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slurmddp.environments.scrub import scrub
from slurmddp.launchers.agent import preload
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.read import read_failure
from slurmddp.runs.folder.layout import RunFolder
from support import TESTS
from support.runs.agent_runs import (
    SAVING,
    agent_command,
    events,
    make_run,
    runs,
    start_agent,
    wait_for_lines,
    wait_until,
)

ENV = "import json, os, sys\nrank = int(os.environ['RANK'])\n"


def run_agent(folder: RunFolder, **environ: Any) -> int:
    with start_agent(folder, **environ) as process:
        return process.wait(timeout=120)


def run_agents(folder: RunFolder, nodes: int = 2, **environ: Any) -> list[int]:
    agents = [start_agent(folder, nodes=nodes, node_rank=node, **environ) for node in range(nodes)]
    return codes_of(agents)


def codes_of(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [agent.wait(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def test_ranks_get_their_place_the_run_folder_and_the_project(tmp_path: Path) -> None:
    program = ENV + (
        "def main(run_dir):\n"
        "    names = 'RANK LOCAL_RANK WORLD_SIZE NODE_RANK SLURM_PROCID SLURMDDP_IMPORTS_S'.split()\n"
        "    found = {name: os.environ[name] for name in names}\n"
        "    print(json.dumps([run_dir, os.getcwd(), sys.path[0], found]))\n"
        "    return 0\n"
    )
    folder = make_run(tmp_path, program, nodes=2)
    assert run_agents(folder) == [0, 0]
    run_dir, cwd, first_path, found = json.loads(folder.rank_log(0, 3).read_text())
    assert run_dir == str(folder.path)
    assert cwd == first_path == str(tmp_path / "project")
    took, ready = map(float, found.pop("SLURMDDP_IMPORTS_S").split())
    assert took >= 0, "the agent's imports, measured once for its ranks"
    assert ready <= time.monotonic(), "from when on the ranks count themselves"
    assert found == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "1", "SLURM_PROCID": "3"}
    assert (folder.log_dir(0) / "exit-node-1").read_text() == "0\n"


def test_d11_agents_and_their_ranks_find_their_place_by_an_environment_of_ones_own(tmp_path: Path) -> None:
    program = (
        "import os\nfrom slurmddp.environments.detect import detect\n"
        "def main(run_dir):\n"
        "    info = detect(os.environ, 'support.own.environment.kubernetes')\n"
        "    print(info.rank, info.local_rank, info.node_rank, info.world_size, info.nodes)\n"
        "    return 0\n"
    )
    folder = make_run(tmp_path, program, nodes=2)
    folder.log_dir(0).mkdir(parents=True)
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "JOB_NAME": str(tmp_path),
        "PYTHONPATH": str(TESTS),
    }
    common |= {"SLURMDDP_RUN_DIR": str(folder.path), "SLURMDDP_ATTEMPT": "0", "SLURMDDP_SECRET": "s"}
    common |= {"SLURMDDP_ENVIRONMENT": "support.own.environment.kubernetes"}
    agents = [
        subprocess.Popen(
            [*agent_command(tmp_path), str(folder.path)],
            env={**scrub(os.environ), **common, "JOB_COMPLETION_INDEX": str(node)},
            start_new_session=True,
        )
        for node in range(2)
    ]
    assert codes_of(agents) == [0, 0]
    for rank in range(4):
        place = folder.rank_log(0, rank).read_text()
        assert place == f"{rank} {rank % 2} {rank // 2} 4 2\n"


def test_the_snapshot_is_imported_instead_of_the_project(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "raise RuntimeError('the project as it is now')")
    folder.code_dir.mkdir()
    (folder.code_dir / "rank_program.py").write_text("def main(run_dir): print('as submitted'); return 0")
    assert run_agent(folder) == 0
    assert folder.rank_log(0, 1).read_text() == "as submitted\n"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0, 0), 0),
        ((0, 75, 0), 75),
        ((75, 75, 75), 75),
        ((0, 3, 0), 1),
        ((75, 1, 75), 1),
        ((0, 78, 0), 78),
        ((79, 0, 0), 79),
        ((0, None, None), 0),
    ],
)
def test_exit_codes_of_ranks_become_one(tmp_path: Path, codes: tuple[int | None, ...], expected: int) -> None:
    program = ENV + f"def main(run_dir): return {codes!r}[rank]"
    folder = make_run(tmp_path, program, ranks_per_node=3)
    assert run_agent(folder) == expected
    assert (folder.log_dir(0) / "exit-node-0").read_text() == f"{expected}\n"
    assert folder.failure_file(0).exists() == (expected not in (0, 75))


def test_a_rank_that_stops_alone_stops_the_others(tmp_path: Path) -> None:
    """Before the training begins there is no agreement: the agent passes on a stop that one rank got."""
    program = ENV + "import time\ndef main(run_dir):\n    time.sleep(600 * rank)\n    return 75 * (1 - rank)"
    folder = make_run(tmp_path, program)
    with start_agent(folder) as process:
        assert process.wait(timeout=120) == 75


def test_an_exception_names_rank_host_and_last_lines(tmp_path: Path) -> None:
    program = SAVING.replace(
        "    print(", "    if rank == 1:\n        raise ValueError('it is broken')\n    print(", 1
    )
    folder = make_run(tmp_path, program)
    assert run_agent(folder) == 1
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.rank, found.local_rank, found.node_rank, found.exit_code) == (1, 1, 0, 1)
    assert found.host == os.uname().nodename
    assert found.last_lines[-1] == "ValueError: it is broken"
    (event,) = events(folder, "rank_failed")
    assert (event["attempt"], event["rank"], event["exit_code"], event["signal"]) == (0, 1, 1, None)


@pytest.mark.parametrize(
    ("end", "code", "lines", "reason"),
    [
        ("from slurmddp.errors import ConfigError; raise ConfigError('lr is 7 km.', hint='Give a number.')",
         78, ("Error: lr is 7 km.", "Give a number."), "lr is 7 km"),
        ("sys.exit('no')", 1, ("SystemExit: no",), "no"),
    ],
)  # fmt: skip
def test_a_refusal_is_printed_and_ends_the_rank_with_its_code(
    tmp_path: Path, end: str, code: int, lines: tuple[str, ...], reason: str
) -> None:
    folder = make_run(tmp_path, f"import sys\ndef main(run_dir):\n    {end}", ranks_per_node=1)
    assert run_agent(folder) == code
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.exit_code, found.last_lines, found.reason) == (code, lines, reason)


@pytest.mark.parametrize(
    ("sent", "passed_on"), [("SIGTERM", "SIGTERM"), ("SIGUSR2", "SIGUSR2"), ("SIGINT", "SIGTERM")]
)
def test_a_stop_signal_reaches_every_rank(tmp_path: Path, sent: str, passed_on: str) -> None:
    folder = make_run(tmp_path, SAVING)
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        agent.send_signal(signal.Signals[sent])
        assert agent.wait(timeout=120) == 75
    for rank in range(2):
        assert folder.rank_log(0, rank).read_text().endswith(f"saved after {passed_on}\n")
    assert not folder.failure_file(0).exists()


def test_sigusr1_is_left_to_the_ranks(tmp_path: Path) -> None:
    """`scancel --signal=USR1` signals agents too; the death of an agent would be a lost node."""
    begin = "def main(run_dir):\n"
    own = f"{begin}    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL\n"
    folder = make_run(tmp_path, SAVING.replace(begin, own))
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        agent.send_signal(signal.SIGUSR1)  # Without a handler it ends the agent at once.
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(timeout=120) == 75
    assert not folder.failure_file(0).exists()


DEAF = """
import ctypes, signal
def main(run_dir):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(1000)  # no other thread of the rank runs meanwhile
"""


@pytest.mark.parametrize("is_script", [False, True], ids=["function", "script"])
def test_ranks_that_do_not_leave_are_ended_before_slurm_kills_them(tmp_path: Path, is_script: bool) -> None:
    """The agent promises a checkpoint to a function of slurmddp alone, not to a person's script."""
    folder = make_run(tmp_path, DEAF)
    if is_script:
        config = yaml.safe_load(folder.config_file.read_text())
        config.setdefault("program", {})["script"] = "deaf.py"
        folder.config_file.write_text(yaml.safe_dump(config))
        (tmp_path / "project/deaf.py").write_text(f"{DEAF}\nmain('')\n")
    with start_agent(folder, SLURMDDP_KILL_WAIT_S="2") as agent:
        wait_for_lines(folder, "ready", 2)
        agent.terminate()
        assert agent.wait(timeout=120) == 75
    log = (folder.log_dir(0) / "node-0.log").read_text()
    assert "SLURM is about to kill the job: the agent ends the ranks of this node" in log
    assert ("the run resumes from its last checkpoint" in log) is not is_script
    assert ("which save and exit" in log) is not is_script
    assert (folder.log_dir(0) / "exit-node-0").read_text() == "75\n"
    assert not folder.failure_file(0).exists()


def test_a_stop_before_the_worker_is_ready_is_no_failure(tmp_path: Path) -> None:
    program = ENV + "import time\ndef main(run_dir):\n    print('ready', flush=True)\n    time.sleep(60)"
    folder = make_run(tmp_path, program)
    with start_agent(folder) as agent:
        wait_for_lines(folder, "ready", 2)
        agent.terminate()
        assert agent.wait(timeout=120) == 75
    assert not folder.failure_file(0).exists()


ONE_FAILS = """
import os, signal, time
rank = int(os.environ["RANK"])
def main(run_dir):
    signal.signal(signal.SIGTERM, lambda number, frame: print("asked", flush=True))
    print("ready", flush=True)
    while rank or not os.path.exists(run_dir + "/fail"):
        time.sleep(0.01)
    return {code}
"""


@pytest.mark.parametrize("code", [3, 78])
def test_a_failure_on_one_node_ends_the_others_which_end_like_it(tmp_path: Path, code: int) -> None:
    folder = make_run(tmp_path, ONE_FAILS.format(code=code), nodes=2)
    agents = [start_agent(folder, nodes=2, node_rank=node) for node in range(2)]
    wait_for_lines(folder, "ready", 4)
    agents[1].terminate()
    wait_until(lambda: "asked" in folder.rank_log(0, 2).read_text(), "the stop reaches the ranks of its node")
    (folder.path / "fail").touch()
    expected = 78 if code == 78 else 1
    assert codes_of(agents) == [expected, expected], (
        "ranks that are told to save don't wait for one that failed"
    )
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.rank, found.exit_code) == (0, code)
    assert len(events(folder, "rank_failed")) == 1
    assert (
        "the attempt has failed, but no rank of this node has"
        in (folder.log_dir(0) / "node-1.log").read_text()
    )


def test_the_agent_stops_when_its_parent_dies(tmp_path: Path) -> None:
    folder = make_run(tmp_path, SAVING)
    starter = tmp_path / "starter.py"
    starter.write_text(
        f"import sys, time\nsys.path.insert(0, {str(TESTS)!r})\n"
        "from support.runs.agent_runs import RunFolder, start_agent\n"
        f"print(start_agent(RunFolder({str(folder.path)!r})).pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, str(starter)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        agent = psutil.Process(int(parent.stdout.readline()))
        wait_for_lines(folder, "ready", 2)
        parent.kill()
        wait_until(lambda: not runs(agent), "the agent ends after its parent")
    assert folder.rank_log(0, 0).read_text().endswith("saved after SIGTERM\n")


@pytest.mark.parametrize("code", [0, 75, 3])
def test_a_forked_rank_ends_as_a_program_does(tmp_path: Path, code: int) -> None:
    program = f"""
import atexit, csv, gzip, threading, zipfile

def train(writer):
    writer.writerow(["row"])

def main(run_dir):
    global rows, packed
    rows, packed = open(run_dir + "/rows.csv", "w"), gzip.open(run_dir + "/rows.gz", "wt")
    for file in (rows, packed):
        train(csv.writer(file))
    global archive
    archive = zipfile.ZipFile(run_dir + "/rows.zip", "w")
    archive.writestr("member", "row")
    atexit.register(print, "closed")
    threading.Timer(0.3, print, ["written"]).start()
    return {code}
"""
    folder = make_run(tmp_path, program, ranks_per_node=1)
    run_agent(folder)
    assert folder.rank_log(0, 0).read_text() == "written\nclosed\n"
    packed = gzip.decompress((folder.path / "rows.gz").read_bytes())
    assert (folder.path / "rows.csv").read_bytes() == packed == b"row\r\n"
    with zipfile.ZipFile(folder.path / "rows.zip") as archive:
        assert archive.read("member") == b"row"


@pytest.mark.parametrize(
    ("config", "environ", "code", "said"),
    [
        ("nodes: 3\n", {"nodes": 2}, 78, "nodes=3"),  # It does not wait for the other one.
        ("ranks_per_node: 2\n", {"SLURM_NTASKS": "5"}, 78, "SLURM_NTASKS=5"),
        ("ranks_per_node: many\n", {}, 1, "ValueError"),
    ],
)
def test_an_agent_that_can_not_begin_is_recorded_with_its_last_lines(
    tmp_path: Path, config: str, environ: dict[str, Any], code: int, said: str
) -> None:
    folder = make_run(tmp_path, "def main(run_dir): return 0")
    folder.config_file.write_text(config)
    assert run_agent(folder, **environ) == code
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.rank, found.node_rank, found.exit_code) == (None, 0, code)
    assert said in "".join(found.last_lines)
    assert (folder.log_dir(0) / "exit-node-0").read_text() == f"{code}\n"


def test_a_missing_project_folder_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "")
    (tmp_path / "project").rename(tmp_path / "elsewhere")
    assert run_agent(folder) == 78
    assert "can't be entered" in (folder.log_dir(0) / "node-0.log").read_text()


def test_without_an_attempt_the_agent_says_who_claims_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "")
    folder.claim_attempt()
    done = subprocess.run(
        [sys.executable, "-m", "slurmddp.launchers.agent", str(folder.path)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 78
    assert "SLURMDDP_ATTEMPT is ''" in done.stderr
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.node_rank, found.exit_code) == (None, 78)
    assert "SLURMDDP_ATTEMPT is ''" in found.reason and "--cleanenv" in found.remedy


def test_an_agent_that_was_killed_had_begun_whatever_its_log_says(tmp_path: Path) -> None:
    folder = make_run(tmp_path, SAVING)
    agent = start_agent(folder)
    wait_for_lines(folder, "ready", 2)
    agent.kill()
    agent.wait()
    with folder.node_log(0, 0).open("a") as log:
        log.write("ValueError: of some other program\n")
    folder.add_event("ended", attempt=0, lost={0: "n1"})
    found = read_failure(folder, 0)
    assert found is not None
    assert found.sentence == "the agent on n1 recorded no exit code: it was killed, or its host failed"


def test_a_module_of_the_project_does_not_stand_in_for_one_of_python(tmp_path: Path) -> None:
    """A project may keep its keys in secrets.py; its programs decide themselves what they import."""
    for name in ("secrets", "random", "shlex", "socket", "subprocess"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the project')")
    command = [sys.executable, "-m", "slurmddp.launchers.agent"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.stderr, done.returncode) == ("usage: python -m slurmddp.launchers.agent RUN_DIR\n", 2)


def test_a_missing_module_names_the_interpreter() -> None:
    with pytest.raises(Exception, match="surely_not_there can't be imported by"):
        preload.import_all(["surely_not_there"])


def test_a_part_that_only_some_versions_have_is_left_out() -> None:
    preload.import_all(["json.surely_not_there", "json.decoder"])
    assert "json.decoder" in sys.modules


def test_imports_leave_the_collector_on_and_their_objects_out_of_it(tmp_path: Path) -> None:
    code = (
        "import gc\nfrom slurmddp.launchers.agent import preload as node\n"
        "node.import_for_all(['json'])\nprint(gc.isenabled(), gc.get_freeze_count() > 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True True\n"


def test_all_modules_of_a_package_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many_modules" / "room").mkdir(parents=True)
    for name in ("__init__", "one", "two", "room/__init__", "room/three"):
        (tmp_path / "many_modules" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    preload.import_all(["many_modules.*"])
    assert {"many_modules.one", "many_modules.two", "many_modules.room.three"} <= set(sys.modules)


def test_a_rank_writes_its_log_behind_no_link(tmp_path: Path) -> None:
    """A link that another account has put there would lead to any file of this account."""
    mine, log = tmp_path / "mine.txt", tmp_path / "rank-0.log"
    mine.write_text("whole")
    log.symlink_to(mine)
    program = f"from slurmddp.launchers.agent import worker; worker._write_to({str(log)!r}); print('rank')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "Too many levels of symbolic links" in done.stderr
    assert mine.read_text() == "whole"
