"""Several ends of the line between agents in one process, with a clock that tests set."""

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
"""Patience with a busy machine; no test waits for it to pass."""
NUMBERS = itertools.count()


@dataclass
class Hand:
    """A clock that stands still until it is moved."""

    now: float = 1000.0

    def clock(self):
        return lambda: self.now


def ports_of(launch_id):
    return candidate_ports(f"control of {launch_id}")


def a_launch():
    """Return the id of a launch that is nobody else's, and on whose first ports nobody listens."""
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
    """The links of one launch, driven by one loop; `came` is all that they have heard (at, from, message)."""

    def __init__(self, nodes, launch_id=None, secret=SECRET, hands=None, **options):
        self.options = options
        self.nodes = nodes
        self.launch_id = launch_id or a_launch()
        self.secret = secret
        self.hands = hands or {}
        self.links = {}
        self.came = []

    def open(self, *nodes, secret=None):
        for node in nodes or range(self.nodes):
            hand = self.hands.get(node)
            self.links[node] = open_link(
                place(node, self.nodes, self.launch_id),
                secret or self.secret,
                clock=hand.clock() if hand else time.monotonic,
                **self.options,
            )
        return self

    def turn(self, *without):
        """Let every end but those `without` look once."""
        for node, link in self.links.items():
            if node not in without:
                self.came += [(node, *heard) for heard in link.handle()]

    def until(self, condition, *without):
        """Look again and again, as an agent would, until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        awake = [link for node, link in self.links.items() if node not in without]
        while not condition():
            assert time.monotonic() < deadline, self.came
            now = time.monotonic()
            # By a clock that is set by hand the next look is at no real time.
            wait_s = 0.01 if self.hands else max(0.0, min(link.next_look() for link in awake) - now)
            select.select([fd for link in awake for fd in link.descriptors()], [], [], min(wait_s, 1.0))
            self.turn(*without)

    def settle(self, *without):
        """Let all that is on its way arrive, by the round trip of a message to and from each member."""
        for node in list(self.links):
            if node and node not in without:
                self.say(node, 0, *without)
                self.say(0, node, *without)

    def say(self, sender, to, *without):
        """Send one message and wait until it has come."""
        mark = {"kind": "mark", "number": next(NUMBERS)}
        self.links[sender].send(to, mark)
        self.until(lambda: (to, sender, mark) in self.came, *without)
        self.came.remove((to, sender, mark))

    def met(self, *nodes):
        """Return whether these members and the hub have met."""
        met = {at for at, sender in self.arrivals if (sender, at) in self.arrivals}
        return met >= set(nodes or range(1, self.nodes))

    @property
    def arrivals(self):
        return {(at, sender) for at, sender, message in self.came if message["kind"] == "arrived"}

    @property
    def losses(self):
        return [
            (at, sender, message["why"]) for at, sender, message in self.came if message["kind"] == "lost"
        ]

    @property
    def together(self):
        return [
            (at, sender, message.get("together"))
            for at, sender, message in self.came
            if message["kind"] == "lost"
        ]

    def words(self, at):
        """Return what came at `at`, less what the link says itself."""
        return [
            (sender, message) for to, sender, message in self.came if to == at and message["kind"] == "word"
        ]

    def close(self):
        for link in self.links.values():
            link.close(farewell=False)


def word(text):
    return {"kind": "word", "text": text}


def running(nodes, **options):
    """Return a star whose nodes have all met."""
    star = Star(nodes, **options).open()
    star.until(star.met)
    return star


def by_hand(nodes):
    """Return a star whose nodes have all met, by clocks that stand still until `pass_s` moves them."""
    return running(nodes, hands={node: Hand() for node in range(nodes)})


def pass_s(star, seconds, *without):
    """Let time pass in steps of half a second; the nodes `without` do not look meanwhile."""
    for _ in range(round(2 * seconds)):
        for hand in star.hands.values():
            hand.now += 0.5
        star.turn(*without)
        star.turn(*without)
