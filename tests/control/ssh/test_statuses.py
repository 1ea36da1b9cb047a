"""Runs over ssh in a view that stays open: paced queries in the background, UNKNOWN for silence."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from slurmddp.cli.commands import list as command
from slurmddp.cli.list_watch import ListView
from slurmddp.control.ssh import statuses
from slurmddp.control.ssh.statuses import PacedHosts
from slurmddp.runs import index, ssh_runs
from slurmddp.runs.status.run_status import RunStatus
from slurmddp.runs.text_format import rich_table
from slurmddp.slurm.paced_client import PacedClient

pytestmark = pytest.mark.usefixtures("elsewhere")


class Hosts:
    """Hosts that answer when the test lets them; `asked` counts the queries of each."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.answers: dict[str, list[RunStatus] | str] = {}
        self.now, self.open = 0.0, threading.Event()
        self.open.set()
        self.paced = PacedHosts(now=lambda: self.now)

    def ask(self, runs, *, silent):
        host = runs[-1].host
        assert silent, "a question of ssh would end up in the view"
        self.asked[host] = self.asked.get(host, 0) + 1
        assert self.open.wait(240)
        return self.answers[host]

    def states(self, now: float) -> dict[str, str]:
        """Return the states at `now`, after the answers to queries that have begun."""
        self.now = now
        self.paced.statuses()
        for thread in self.paced._queries.values():
            thread.join(60)
        return {one.name: one.state for one in self.paced.statuses()}


def remember(name: str, host: str) -> None:
    ssh_runs.remember(ssh_runs.SshRun(name=name, host=host, folder="/project"))


@pytest.fixture
def hosts(monkeypatch):
    made = Hosts()
    monkeypatch.setattr(statuses, "_ask", made.ask)
    for name, host in (("gpt-00000001", "one"), ("mlp-00000002", "two")):
        remember(name, host)
        found = RunStatus(name=name, path=Path(f"{host}:/project/runs/{name}"), state="finished", detail="")
        made.answers[host] = [found]
    yield made
    made.open.set()


def test_each_host_is_asked_once_in_30_seconds_and_less_often_while_it_is_silent(hosts):
    hosts.answers["two"] = "refused"
    times = []
    for now in range(0, 600, 5):
        before = hosts.asked.get("two", 0)
        assert hosts.states(now) == {"gpt-00000001": "finished", "mlp-00000002": "unknown"}
        times += [now] * (hosts.asked["two"] - before)
    assert hosts.asked["one"] == 20
    assert times == [0, 30, 90, 210, 450]
    hosts.answers["two"] = "refused"
    hosts.answers["one"] = "no route"
    assert hosts.states(600)["gpt-00000001"] == "unknown", "an old answer says nothing about now"


def test_a_host_that_does_not_answer_yet_does_not_hold_up_the_table(hosts, make_run):
    make_run("here-00000003")
    hosts.open.clear()

    def shown() -> str:
        def table(found):
            return rich_table(command.HEADERS, command._rows(found, time.time())[0])

        console = Console(width=240, color_system=None)
        view = ListView(lambda: index.run_paths(), 20, table, PacedClient(), hosts.paced.statuses)
        with console.capture() as captured:
            console.print(view.render(20))
        return " ".join(captured.get().split())

    text = shown()
    assert "here-00000003 preparing" in text and "gpt-00000001 unknown" in text
    assert "3 runs" in text and "one has not answered yet" in text
    hosts.open.set()
    hosts.states(1.0)
    remember("new-00000004", "one")
    text = shown()
    assert "gpt-00000001 finished" in text and "new-00000004 unknown" in text
