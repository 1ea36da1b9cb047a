"""The links of several agents in one process, with clocks that tests set."""

from __future__ import annotations

import itertools
import select
import time
from dataclasses import dataclass, replace

from slurmddp.environments.rank_info import RankInfo
from slurmddp.host.ports import candidate_ports
from slurmddp.launchers.link.link import open_link
from support.runs import launch_ports

SECRET = "5e" * 32
LIMIT_S = 120.0
"""Limit of a wait in seconds, for a busy machine; a test that passes does not wait so long."""
NUMBERS = itertools.count()


@dataclass
class ManualClock:
    """A clock that stands still until it is moved."""

    now: float = 1000.0

    def read(self):
        return self.now


def ports_of(launch_id):
    return candidate_ports(f"control of {launch_id}")


def a_launch():
    """Return a launch id that no other process uses, and on whose first ports no program listens."""
    return launch_ports.a_launch(ports_of)


def place(node, nodes, launch_id, **changes):
    info = RankInfo(
        environment="slurm",
        rank=node,
        node_rank=node,
        world_size=nodes,
        nodes=nodes,
        hosts=tuple(f"n{number}" for number in range(nodes)),
        launch_id=launch_id,
        emulated=True,
    )
    return replace(info, **changes)


class Star:
    """The links of one launch in one loop; `received` lists (receiver, sender, message)."""

    def __init__(self, nodes, launch_id=None, secret=SECRET, clocks=None, **options):
        self.options = options
        self.nodes = nodes
        self.launch_id = launch_id or a_launch()
        self.secret = secret
        self.clocks = clocks or {}
        self.links = {}
        self.received = []

    def open(self, *nodes, secret=None):
        for node in nodes or range(self.nodes):
            clock = self.clocks.get(node)
            self.links[node] = open_link(
                place(node, self.nodes, self.launch_id),
                secret or self.secret,
                clock=clock.read if clock else time.monotonic,
                **self.options,
            )

        return self

    def turn(self, *without):
        """Let the links of all nodes, except the nodes `without`, handle their events once."""
        for node, link in self.links.items():
            if node not in without:
                self.received += [(node, *heard) for heard in link.handle()]

    def until(self, condition, *without):
        """Handle events, as the agents would, until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        awake = [link for node, link in self.links.items() if node not in without]
        while not condition():
            assert time.monotonic() < deadline, self.received
            now = time.monotonic()
            # The deadlines of a manual clock are no times of the real clock.
            wait_s = 0.01 if self.clocks else max(0.0, min(link.next_deadline() for link in awake) - now)
            select.select([fd for link in awake for fd in link.descriptors()], [], [], min(wait_s, 1.0))
            self.turn(*without)

    def drain(self, *without):
        """Wait until all earlier messages have arrived, by a round trip of a message to each member."""
        for node in list(self.links):
            if node and node not in without:
                self.say(node, 0, *without)
                self.say(0, node, *without)

    def say(self, sender, to, *without):
        """Send a message and wait until it has arrived."""
        mark = {"kind": "mark", "number": next(NUMBERS)}
        self.links[sender].send(to, mark)
        self.until(lambda: (to, sender, mark) in self.received, *without)
        self.received.remove((to, sender, mark))

    def met(self, *nodes):
        """Return whether each of these members has met the hub."""
        met = {at for at, sender in self.arrivals if (sender, at) in self.arrivals}
        return met >= set(nodes or range(1, self.nodes))

    @property
    def arrivals(self):
        return {(at, sender) for at, sender, message in self.received if message["kind"] == "Joined"}

    @property
    def losses(self):
        return [
            (at, sender, message["why"]) for at, sender, message in self.received if message["kind"] == "Lost"
        ]

    @property
    def together(self):
        return [
            (at, sender, message.get("together"))
            for at, sender, message in self.received
            if message["kind"] == "Lost"
        ]

    def texts(self, at):
        """Return the texts that node `at` has received, with their senders."""
        return [
            (sender, message)
            for to, sender, message in self.received
            if to == at and message["kind"] == "text"
        ]

    def close(self):
        for link in self.links.values():
            link.close(farewell=False)


def text_message(text):
    return {"kind": "text", "text": text}


def running(nodes, **options):
    """Return a star whose nodes have all met."""
    star = Star(nodes, **options).open()
    star.until(star.met)
    return star


def by_manual_clocks(nodes):
    """Return a star whose nodes have all met, with clocks that only `pass_s` advances."""
    return running(nodes, clocks={node: ManualClock() for node in range(nodes)})


def pass_s(star, seconds, *without):
    """Advance all clocks in steps of half a second; the nodes `without` handle no events during this time."""
    for _ in range(round(2 * seconds)):
        for clock in star.clocks.values():
            clock.now += 0.5
        star.turn(*without)
        star.turn(*without)
