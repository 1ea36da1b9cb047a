"""Ranks of test_agreement: they train several rounds and are asked to stop in each.

Each round trains with uneven step times and an all-reduce per step that checks that all ranks are in the
same step. The round's number seeds who is signalled, when and how.
"""

import os
import random
import signal
import threading
import time
from contextlib import closing

import torch
import torch.distributed as dist

from slurmddp.training.distributon import Distributon
from slurmddp.training.stopping.agreement import StopAgreement
from slurmddp.training.stopping.signals import StopSignals
from support.runs.agent_runs import wait_until

STEPS = 100_000
KINDS = ("one", "before", "two", "twice", "evaluation", "usr2", "request", "finished")


def disturb(kind, chance, rank, world_size, agreement):
    """Ask this rank to stop if it was chosen.

    All ranks draw the same random numbers, so they choose alike.
    """
    chosen = chance.sample(range(world_size), 2 if kind == "two" else 1)
    delays = [chance.uniform(0, 0.2), 0.0] if kind == "twice" else [chance.uniform(0, 0.3)]
    if kind == "finished" or rank not in chosen:
        return []

    if kind == "request":
        timers = [threading.Timer(delay, agreement.request, ["the test"]) for delay in delays]
    else:
        number = signal.SIGUSR2 if kind == "usr2" else signal.SIGTERM
        timers = [threading.Timer(delay, os.kill, [os.getpid(), number]) for delay in delays]

    for timer in timers:
        timer.start()
    return timers


def train(agreement, kind, rank, number):
    """Return after how many steps this rank stopped, and whether an evaluation was left early."""
    pace = random.Random(number * 100 + rank)
    left_early = False
    limit = 20 if kind == "finished" else STEPS

    for step in range(limit):
        if agreement.should_stop():
            return step, left_early

        time.sleep(pace.uniform(0, 0.004))
        token = torch.tensor([step])
        dist.all_reduce(token)
        assert token.item() == step * dist.get_world_size(), f"another rank than {rank} was not in {step}"
        if kind == "evaluation" and step == 5 and rank == number % dist.get_world_size():
            wait_until(lambda: agreement.requested, "this rank is asked to stop")
            left_early = True

    return limit, left_early


def one_round(number, store, rank, world_size):
    kind = KINDS[number % len(KINDS)]
    chance = random.Random(number)
    dist.barrier()

    with StopSignals() as signals:
        if kind == "before" and rank == number % world_size:
            os.kill(os.getpid(), signal.SIGTERM)
        with closing(StopAgreement(store, rank, world_size, signals=signals)) as agreement:
            others = [] if kind == "before" else disturb(kind, chance, rank, world_size, agreement)
            stopped, left_early = train(agreement, kind, rank, number)
            for timer in others:
                timer.join()
            again = agreement.should_stop() if kind != "finished" else True
            reason = agreement.reason.text if agreement.reason else None
            facts = {"kind": kind, "stopped": stopped, "reason": reason}
            return {**facts, "left_early": left_early, "again": again}


def train_rounds(rounds):
    """Return the facts of each round on this rank."""
    with Distributon() as d:
        store = d.launch()._session.context.store
        return [one_round(number, store, d.rank, d.world_size) for number in range(rounds)]
