"""A program whose ranks never connect to each other does all of its work once per rank; the run says so."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from slurmddp.cli.main import main
from slurmddp.launchers.agent import meeting_watch
from slurmddp.launchers.agent.meeting_watch import MeetingWatch

LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(flush=True)
sys.stdin.read()
"""


def watch_of(port: int) -> MeetingWatch:
    watch = MeetingWatch()
    watch.begin(port, 0.0)
    return watch


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_connection_that_has_ended_counts() -> None:
    port = free_port()
    watch = watch_of(port)
    watch.look()
    assert not watch.have_met

    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()
    watch.look()
    assert watch.have_met


def test_a_rank_that_listens_on_any_port_may_have_met_others() -> None:
    rank = subprocess.Popen([sys.executable, "-c", LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdout.readline()
    watch = watch_of(free_port())
    watch.look([os.getpid()])
    assert not watch.have_met
    watch.look([rank.pid])
    assert watch.have_met
    rank.communicate()


def test_what_the_agent_has_open_itself_is_no_sign_of_its_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        watch = watch_of(free_port())
        watch.look([os.getpid()])
        assert not watch.have_met


def test_a_kernel_without_the_table_gives_no_reason_for_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError("/proc/net/tcp")

    monkeypatch.setattr(meeting_watch, "tcp_sockets", refuse)
    watch = watch_of(1)
    watch.look()
    assert watch.have_met


def test_looks_become_rarer_but_a_minute_never_passes_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    now = 0.0
    watch = watch_of(1)
    monkeypatch.setattr(watch, "look", lambda pids: looks.append(now))
    while now < 3600:
        now += 1
        watch.poll(now, ())
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert looks[0] == 1
    assert max(pauses) < 60
    assert len(looks) < 150
    watch.have_met = True
    watch.poll(math.inf, ())
    assert looks[-1] <= 3600


MEETS = """
import os, socket, sys, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    server = socket.create_server(address)
    # The kernel may forget a connection that both ends close at the same moment, so close after rank 1.
    server.accept()[0].recv(1)
else:
    while True:
        try:
            socket.create_connection(address).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""
PROGRAMS = {
    "meets": (["meets.py"], False),
    "its processes meet": (["parent.py"], False),
    "does not meet": (["plain.py"], True),
    "a module": (["-m", "plain"], True),
    "a command": (["--", "true"], True),
    "one rank": (["-n", "1", "plain.py"], False),
    "fails": (["fails.py"], False),
}


@pytest.mark.distributed
@pytest.mark.usefixtures("forked_agents")
@pytest.mark.parametrize(("words", "is_noted"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_of_independent_ranks_is_noted_at_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    is_noted: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("meets.py").write_text(MEETS)
    Path("plain.py").write_text("print('alone')\n")
    Path("parent.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'meets.py'], check=True)\n"
    )
    Path("fails.py").write_text("raise SystemExit(3)\n")
    code = main(["run", "name=apart", "policy.max_restarts=0", *words])
    program = " ".join(words[-2:]) if "-m" in words else words[-1]
    note = (
        f"note: no connection was seen between the 2 ranks of {program}. Unless they divide the work by "
        "RANK, each did all of it and wrote the same files. To run it once, add -n 1."
    )
    assert code == (1 if words == ["fails.py"] else 0)
    assert (note in capsys.readouterr().out.splitlines()) == is_noted
    (events,) = Path("runs").glob("apart-*/attempts.jsonl")
    noted = [
        record["text"]
        for line in events.read_text().splitlines()
        if (record := json.loads(line))["event"] == "warned"
    ]
    assert noted == [note] * is_noted
    assert main(["status"]) == 0
    assert ("no connection was seen" in capsys.readouterr().out) == is_noted
