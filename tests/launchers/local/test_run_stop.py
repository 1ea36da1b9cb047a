"""A person ends a run on this machine: by a stop, Ctrl-C, a cancel, or the end of the terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.errors import RankFailure
from slurmddp.host import process
from slurmddp.host.signals import SignalInbox
from slurmddp.launchers.local.run import LocalRun
from slurmddp.settings.schema import PolicySettings
from support.runs.agent_runs import (
    SAVING,
    all_gone,
    children_of,
    events,
    runs,
    wait_for_lines,
    wait_until,
)
from support.runs.local_runs import local_run, terminal, terminal_again


def cancel(run: LocalRun) -> None:
    run.folder.cancelled_file.touch()
    run.nodes.stop()


def press_ctrl_c(run: LocalRun) -> None:
    """As before the first look at signals; the press must not be lost."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("ask", "outcome"),
    [(lambda run: run.nodes.stop(), "stopped"), (cancel, "cancelled"), (press_ctrl_c, "stopped")],
    ids=["stop", "cancel", "Ctrl-C"],
)
def test_a_stop_saves_on_every_node(tmp_path: Path, ask: Callable[[LocalRun], None], outcome: str) -> None:
    run = local_run(tmp_path, SAVING, nodes=2)
    run.start()
    wait_for_lines(run.folder, "ready", 4)
    ask(run)
    assert run.wait() == 75
    assert all("saved after SIGTERM" in run.folder.rank_log(0, rank).read_text() for rank in range(4))
    assert [(event["outcome"], event["next"]) for event in events(run.folder, "ended")] == [(outcome, "none")]


def test_a_node_that_stops_alone_stops_the_others(tmp_path: Path) -> None:
    program = (
        "import os, time\ndef main(run_dir):\n    rank = int(os.environ['RANK'])\n"
        "    time.sleep(600 * rank)\n    return 75 * (1 - rank)\n"
    )
    run = local_run(tmp_path, program, nodes=2, ranks_per_node=1)
    run.start()
    assert run.wait() == 75
    assert [event["outcome"] for event in events(run.folder, "ended")] == ["stopped"]


def test_a_rank_that_fails_after_a_stop_is_not_started_again(tmp_path: Path) -> None:
    begin = """def main(run_dir):
    if os.environ["SLURMDDP_ATTEMPT"] == "1":
        return 3
    os.mkdir(f"{run_dir}/checkpoints")
"""
    save = """open(f"{run_dir}/checkpoints/latest", "w").write("step-1")
    return 3"""
    program = SAVING.replace("def main(run_dir):\n", begin).replace("return 75", save)
    run = local_run(tmp_path, program, ranks_per_node=1)
    run.start()
    wait_for_lines(run.folder, "ready", 1)
    run.nodes.stop()
    with pytest.raises(RankFailure):
        run.wait()
    assert [event["next"] for event in events(run.folder, "ended")] == ["none"]


def test_a_stop_before_an_agent_listens_is_no_failure(tmp_path: Path) -> None:
    run = local_run(tmp_path, agent="import time; time.sleep(600)")
    run.start()
    run.nodes.stop()
    assert run.wait() == 75
    assert not run.folder.failure_file(0).exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_at_a_checkpoint(tmp_path: Path, sent: signal.Signals) -> None:
    with terminal(tmp_path) as (person, _):
        wait_until(lambda: len(children_of(person.pid)) == 3, "an agent and two ranks run")
        left = children_of(person.pid)
        person.send_signal(sent)
        assert person.wait(timeout=120) == 75
        assert person.stderr is not None
        assert b"Ctrl-C once more kills" in person.stderr.read()
    wait_until(lambda: all_gone(left), "agent and ranks end")


def test_a_signal_to_a_child_that_is_being_born_is_not_taken_for_one_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A terminal's Ctrl-C goes to the child too until it has a session of its own; one must not be two."""
    monkeypatch.setattr(process, "die_with_parent", lambda sent, parent: os.kill(os.getpid(), signal.SIGINT))
    shown = tmp_path / "mask"
    program = f"import signal; print(signal.pthread_sigmask(0, ()), file=open({str(shown)!r}, 'w'))"
    with SignalInbox((signal.SIGINT,)) as inbox:
        assert process.start_bound([sys.executable, "-c", program], signal.SIGTERM).wait() == 0
        assert inbox.read() == []
    assert shown.read_text() == "set()\n"


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    deaf = SAVING.replace("while not stop:", "while True:")
    with terminal(tmp_path, deaf) as (person, folder):
        left = children_of(person.pid)
        assert person.stderr is not None
        person.send_signal(signal.SIGINT)
        assert b"Ctrl-C once more kills" in person.stderr.readline()
        person.send_signal(signal.SIGINT)
        assert person.wait(timeout=120) == 130
    wait_until(lambda: all_gone(left), "agent and ranks end")
    assert not folder.failure_file(0).exists()
    (ended,) = [event for event in folder.events() if event["event"] == "ended"]
    assert (ended["outcome"], ended["next"]) == ("cancelled", "none")


def test_ranks_that_are_deaf_to_a_stop_are_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = SAVING.replace("while not stop:", "while True:")
    said: list[str] = []
    run = local_run(tmp_path, deaf, policy=PolicySettings(grace_s=1), say=said.append)
    run.start()
    wait_for_lines(run.folder, "ready", 2)
    press_ctrl_c(run)
    assert run.wait() == 75
    assert ["still run after 1 s are killed" in text for text in said] == [True]
    assert [event["outcome"] for event in events(run.folder, "ended")] == ["stopped"]


def test_a_hangup_that_nohup_has_turned_off_stays_off(tmp_path: Path) -> None:
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with terminal(tmp_path, first=ignore) as (person, _folder):
        lines = Path(f"/proc/{person.pid}/status").read_text().splitlines()
        ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
        person.send_signal(signal.SIGTERM)
        assert person.wait(timeout=120) == 75
    assert ignored & 1 << signal.SIGHUP - 1


def test_the_ranks_save_when_the_person_s_process_is_killed(tmp_path: Path) -> None:
    with terminal(tmp_path) as (person, folder):
        left = children_of(person.pid)
        person.kill()
    wait_for_lines(folder, "saved after SIGTERM", 2)
    wait_until(lambda: not any(runs(one) for one in left), "all end")


def test_ranks_that_save_after_their_launcher_was_killed_are_waited_for(tmp_path: Path) -> None:
    program = SAVING.replace('    print("saved', "    wait_for(run_dir + '/go')\n    print(\"saved").replace(
        "def main(run_dir):\n",
        "def main(run_dir):\n    if os.environ['SLURMDDP_ATTEMPT'] == '1':\n        return 0\n",
    )
    program += "\ndef wait_for(path):\n    while not os.path.exists(path):\n        time.sleep(0.01)\n"
    with terminal(tmp_path, program) as (person, folder):
        person.kill()
    with terminal_again(tmp_path) as again:
        assert again.stderr is not None
        assert b"is still ending after its launcher was killed" in again.stderr.readline()
        assert folder.attempts() == [0]
        (folder.path / "go").touch()
        assert again.wait(timeout=120) == 0
    assert all("saved after SIGTERM" in folder.rank_log(0, rank).read_text() for rank in range(2))
    assert folder.attempts() == [0, 1]


def test_ranks_that_do_not_end_after_their_launcher_was_killed_are_ended(tmp_path: Path) -> None:
    deaf = SAVING.replace("while not stop:", "while True:")
    short = "from slurmddp.launchers.local import local_nodes\nlocal_nodes.LEFT_BEHIND_S = 0.1"
    with terminal(tmp_path, deaf, first=short) as (person, _folder):
        left = children_of(person.pid)
        person.kill()
    try:
        wait_until(lambda: not any(runs(one) for one in left), "agent and ranks end")
    finally:
        for one in filter(runs, left):
            one.kill()
