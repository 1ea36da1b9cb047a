"""A node that the preflight finds unfit has a spare take its place, with the real agents. No torch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from support.runs.agent_runs import events, wait_until
from support.runs.restarting_runs import agents_of, begun, codes, lines_of, node_log, pid_of, run_folder

LOOKING = """
import json, os, time
from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.host.heartbeat_page import HeartbeatPage

rank, restart_count = int(os.environ["RANK"]), int(os.environ["SLURMDDP_RESTART_COUNT"])

def main(run_dir):
    print(json.dumps([restart_count, os.getpid(), os.environ["SLURMDDP_PREFLIGHT"]]), flush=True)
    verdict, unhealthy = f"{run_dir}/verdict-{restart_count}", f"{run_dir}/unhealthy-{restart_count}"
    if os.path.exists(unhealthy):
        nodes = {open(unhealthy).read(): "it is hot."}
        WriterChannel.attach(os.environ).send({"kind": "unhealthy", "nodes": nodes})
        if rank == 0:
            open(verdict, "w").close()
        while not os.path.exists(verdict):
            time.sleep(0.01)
        return 76
    page = HeartbeatPage.attach(os.environ)
    page.completed(10 * restart_count + 5, 0.1, 0.0)
    while not os.path.exists(f"{run_dir}/finish"):
        time.sleep(0.01)
    return 0
"""
"""Ranks that leave as after a preflight where a file tells them the place that is unfit."""


def looks(folder: RunFolder, rank: int) -> list[list[object]]:
    return [[one[0], one[2]] for one in lines_of(folder, rank)]


def test_the_ranks_begin_again_on_the_spare_and_look_until_they_have_made_a_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=2, program=LOOKING)
    (folder.path / "unhealthy-0").write_text("1")
    (folder.path / "unhealthy-1").write_text("1")
    with agents_of(folder, 4) as agents:
        wait_until(lambda: begun(folder, 2, 4), "the third start of the ranks")
        os.kill(pid_of(folder, 3), signal.SIGKILL)
        wait_until(lambda: begun(folder, 3, 4), "the fourth start of the ranks")
        (folder.path / "finish").touch()
        assert codes(agents) == [0, 0, 0, 0]
    assert looks(folder, 0) == [[0, "1"], [1, "1"], [2, "1"], [3, "0"]]
    first, second, third = events(folder, "restarted")
    assert (first["node"], first["rank"], first["spare"]) == (1, None, [2])
    assert (second["node"], second["rank"], second["spare"]) == (2, None, [3])
    assert (third["rank"], "spare" in third) == (3, False)
    told = json.loads((folder.log_dir(0) / "failure-g0.json").read_text())
    assert (told["node_rank"], told["kind"]) == (1, "unfit_node")
    assert told["reason"] == "failed the preflight: it is hot"
    assert not folder.failure_file(0).exists()
    assert "node 1 (localhost) did not pass the preflight: it is hot." in node_log(folder)
    assert "this node did not pass the preflight" in node_log(folder, 1)
    assert "this node waits" not in node_log(folder, 1)
    assert "this node waits" in node_log(folder, 3)
    assert events(folder, "continued") == [], "its agent is there to the end"


def test_without_a_spare_the_attempt_ends_with_76(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nodes=2, spare_nodes=1, program=LOOKING)
    (folder.path / "unhealthy-0").write_text("1")
    (folder.path / "unhealthy-1").write_text("1")
    with agents_of(folder, 3) as agents:
        assert codes(agents) == [76, 76, 76]
    found = capture.read(folder, 0)
    assert found is not None
    assert (found.exit_code, found.restart_count) == (76, 1)
    assert len(events(folder, "restarted")) == 1
