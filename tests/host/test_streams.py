"""Agents and ranks continue if they can't print: on a full disk, or without an output."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmddp.checkpoint.memory import shared_buffer, writer_process
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.environments.emit import emulated_step
from slurmddp.environments.scrub import scrub
from slurmddp.host import streams
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import agent_command, make_run
from support.runs.checkpoint_services import fill, request

CLOSED = {"stdin": 0, "stdout": 1, "stderr": 2}


def run_agent(folder: RunFolder, *, closed: tuple[str, ...] = (), **streams: Any) -> int:
    folder.log_dir(0).mkdir(parents=True, exist_ok=True)
    command = [*agent_command(folder.path.parent), str(folder.path)]
    shut = " ".join(f"{CLOSED[name]}<&-" for name in closed)
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {shut}', "bash", *command],
        env=scrub(os.environ) | emulated_step(1, 0, "local-1", folder.path, 0),
        timeout=120,
        **streams,
    ).returncode


def exit_codes(folder: RunFolder) -> list[int]:
    return [json.loads(file.read_text())["exit_code"] for file in sorted(folder.path.rglob("exit-rank-*"))]


@pytest.mark.parametrize(("config", "code", "exits"), [("", 0, [0, 0]), ("nodes: two\n", 1, [])])
def test_an_agent_whose_log_is_on_a_full_disk_does_its_work_and_leaves_its_code(
    tmp_path: Path, config: str, code: int, exits: list[int]
) -> None:
    folder = make_run(tmp_path, "def main(run_dir): return 0")
    folder.config_file.write_text(config or folder.config_file.read_text())
    with open("/dev/full", "wb") as full:
        assert run_agent(folder, stdout=full, stderr=full) == code
    assert exit_codes(folder) == exits
    assert (folder.log_dir(0) / "exit-node-0").read_text() == f"{code}\n"
    assert folder.failure_file(0).exists() is bool(code)


@pytest.mark.parametrize("closed", [("stdin",), ("stderr",), ("stdout", "stderr"), tuple(CLOSED)])
def test_an_agent_with_closed_streams_does_its_work(tmp_path: Path, closed: tuple[str, ...]) -> None:
    folder = make_run(tmp_path, "def main(run_dir): print('here', flush=True)")
    assert run_agent(folder, closed=closed) == 0
    assert exit_codes(folder) == [0, 0]
    assert folder.rank_log(0, 1).read_text() == "here\n"


def test_a_rank_whose_log_is_on_a_full_disk_continues_and_keeps_its_code(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from slurmddp.errors import ConfigError\n"
        "def main(run_dir):\n"
        "    full = os.open('/dev/full', os.O_WRONLY)\n"
        "    for own in (1, 2):\n"
        "        os.dup2(full, own)\n"
        "    print('line', flush=True)\n"
        "    raise ConfigError('lr is 7 km.')\n"
    )
    folder = make_run(tmp_path, program, ranks_per_node=1)
    assert run_agent(folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 78


def test_a_writer_whose_log_is_on_a_full_disk_reports_its_error(tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    agent_end, theirs = WriterChannel.pair()
    with open("/dev/full", "wb") as full:
        command = writer_process.command(theirs)
        writer = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=full, stderr=full)
    theirs.close()
    descriptor = shared_buffer.create()
    fill(descriptor, 7)
    agent_end.send({"kind": "memory", "slot": 0}, [descriptor])
    agent_end.send(request(tmp_path / "no folder", 0, 7))
    try:
        answer = agent_end.receive(60)
        assert answer is not None
        assert "step 7 could not be written" in str(answer[0]["error"])
    finally:
        agent_end.close()
        os.close(descriptor)
        assert writer.wait(240) == 0


def test_lines_arrive_at_once_and_whole(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        stream = streams.lines_to(file.fileno())
        stream.write("\u00e9\udc80 one\n")
        assert (tmp_path / "log").read_bytes() == b"\xc3\xa9\\udc80 one\n"
        stream.write("x" * 100_000)
        stream.close()
        os.fstat(file.fileno())
    assert (tmp_path / "log").read_bytes() == b"\xc3\xa9\\udc80 one\n" + b"x" * 100_000
