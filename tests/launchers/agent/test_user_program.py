"""A user's script as a rank: its exit code, its process group, and the threads of its ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.environments.scrub import scrub
from slurmddp.launchers.agent.user_program import become
from slurmddp.runs.folder.layout import RunFolder
from support.distributed.doc_programs import WITH, WITHOUT, loop_with_a_stop
from support.distributed.ranks import Program, run_programs

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

RANK = """
import os, runpy, sys
from slurmddp.environments.names import HEARTBEAT_VARIABLE
from slurmddp.host.heartbeat_page import HeartbeatPage
from support.distributed.ranks import as_program

page = HeartbeatPage.create()
if (pid := os.fork()) == 0:
    os.environ[HEARTBEAT_VARIABLE] = str(page.descriptor)
    os._exit(as_program(lambda: runpy.run_path("script.py", run_name="__main__")))
sys.exit(page.explained(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""
COMPUTE = "d.backward(model(torch.ones(1, 1)).sum())"


def run_as_rank(folder: Path, script: str) -> int:
    (folder / "script.py").write_text(script)
    (folder / "rank.py").write_text(RANK)
    environment = {**scrub(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ((code, _),) = run_programs([Program([str(folder / "rank.py")], environment, folder)])
    return code


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (loop_with_a_stop(WITH, "break"), 75),
        (loop_with_a_stop(WITHOUT, "break"), 75),
        (loop_with_a_stop(WITHOUT, "sys.exit()"), 75),
        (loop_with_a_stop(WITH, "sys.exit(75)"), 75),
        (loop_with_a_stop(WITHOUT, "continue", COMPUTE), 0),
        (loop_with_a_stop(WITHOUT, "break", signal_after=0), 0),
        (loop_with_a_stop(WITHOUT, "break", "raise ValueError('after the loop')"), 1),
        (loop_with_a_stop(WITH, "sys.exit(3)"), 3),
    ],
)
def test_a_script_that_is_left_at_a_stop_has_not_finished(tmp_path: Path, script: str, code: int) -> None:
    """A script that computes on, has no stop, or fails, ends with its own code."""
    assert run_as_rank(tmp_path, script) == code


ADOPTS = """
import os, signal, sys, time, torch, torch.distributed as dist
from slurmddp import Distributon
from slurmddp.errors import StoppedAtCheckpoint

dist.init_process_group("gloo")
for attempt in (1, 2):
    try:
        with Distributon(seed=0) as d:
            d.launch()
            model = d.setup_model(torch.nn.Linear(1, 1, bias=False))
            d.backward(model(torch.full((1, 1), 1.0 + d.rank)).sum())
            assert not d.should_stop()
            if d.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while not d.should_stop():
                time.sleep(0.01)
            d.save(attempt, model=model)
            gradient = model.module.weight.grad.item()
            d.stop()
    except StoppedAtCheckpoint as stopped:
        assert "SIGTERM on rank 1" in str(stopped)
with Distributon() as d:
    d.launch()
total = torch.ones(1)
dist.all_reduce(total)
open(f"found-{dist.get_rank()}", "w").write(f"{total.item():g} {gradient:g} {torch.get_num_threads()}")
dist.destroy_process_group()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_agents: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def train(project: Path, text: str) -> None:
    (project / "script.py").write_text(text)
    assert main(["train", "program.script=script.py", "name=script"]) == 0


def test_launch_uses_the_process_group_of_the_program_and_the_threads_of_the_person(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    train(project, ADOPTS)
    assert [(project / f"found-{rank}").read_text() for rank in range(2)] == ["2 1.5 2", "2 1.5 2"]


def test_ranks_of_a_script_share_the_cores(project: Path) -> None:
    text = "import os, torch\nopen('threads-' + os.environ['RANK'], 'w').write(str(torch.get_num_threads()))"
    train(project, text)
    most = max(1, len(os.sched_getaffinity(0)) // 2)
    assert all(int((project / f"threads-{rank}").read_text()) <= most for rank in range(2))


LOGS = """
import logging, os
from slurmddp import Distributon

rank = os.environ["RANK"]
logging.basicConfig(filename=f"own-{rank}.log", level=logging.DEBUG, format="own: %(message)s")
logging.getLogger("mine").debug("a line of the script")
Distributon().launch()
logging.getLogger("slurmddp.later").info("after the launch")
"""


def test_a_script_configures_logging_as_under_plain_python(project: Path) -> None:
    train(project, LOGS)
    (run,) = (project / "runs").glob("script-*")
    for rank in range(2):
        assert (project / f"own-{rank}.log").read_text().splitlines()[0] == "own: a line of the script"
        own = (run / "logs" / "attempt-0" / f"rank-{rank}.log").read_text()
        assert "a line of the script" not in own
        assert own.count("slurmddp.training.process_group.setup: rank") == 1
        assert own.count("slurmddp.later: after the launch") == 1


@pytest.mark.parametrize(
    ("script", "copy"),
    [
        ("part/train.py", "part/train.py"),
        ("./part/../part/train.py", "part/train.py"),
        ("{project}/part/train.py", "part/train.py"),
        ("{link}/part/train.py", "part/train.py"),
        ("link.py", "link.py"),
        ("{project}/link.py", "link.py"),
        ("{project}/ignored.py", None),
        ("../other.py", None),
    ],
)
def test_a_script_of_the_project_runs_from_the_snapshot_however_its_path_is_written(
    script: str, copy: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, link, folder = tmp_path / "project", tmp_path / "link", RunFolder(tmp_path / "run")
    for place in (project, folder.code_dir):
        (place / "part").mkdir(parents=True)
        (place / "part" / "train.py").touch()
        (place / "link.py").symlink_to("part/train.py")
    (project / "ignored.py").touch()
    (tmp_path / "other.py").touch()
    link.symlink_to(project)
    given = script.format(project=project, link=link)
    folder.config_file.write_text(json.dumps({"program": {"script": given, "args": []}}))

    def stop(path: str, words: list[str], environ: dict[str, str]) -> None:
        raise SystemExit(words[-1])

    monkeypatch.chdir(project)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "execve", stop)
    monkeypatch.setattr("slurmddp.launchers.agent.user_program._reset_signals", lambda: None)
    with pytest.raises(SystemExit) as left:
        become(str(folder.path))
    assert left.value.code == (given if copy is None else str(folder.code_dir / copy))
