"""Child program of test_agreement: one gloo rank that trains several rounds and is asked to stop in each.

    python stop_ranks.py RANK WORLD_SIZE PORT_FILE ROUNDS

Each round trains with uneven step times and an all-reduce per step that checks that all ranks are in the
same step. The round's number seeds who is signalled, when and how. Prints one JSON line per round.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from slurmddp.training.stopping.agreement import StopAgreement
from slurmddp.training.stopping.signals import StopSignals

STEPS = 100_000
KINDS = ("one", "before", "two", "twice", "evaluation", "usr2", "request", "finished")


def store_of(rank, port_file):
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False, wait_for_workers=False)


def disturb(kind, chance, rank, world_size, agreement):
    """Ask this rank to stop if it is one of the chosen; all ranks draw the same numbers."""
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
    pace, left_early = random.Random(number * 100 + rank), False
    limit = 20 if kind == "finished" else STEPS
    for step in range(limit):
        if agreement.should_stop():
            return step, left_early
        time.sleep(pace.uniform(0, 0.004))
        token = torch.tensor([step])
        dist.all_reduce(token)
        if token.item() != step * dist.get_world_size():
            raise SystemExit(f"rank {rank} was in step {step} and another was not")
        if kind == "evaluation" and step == 5 and rank == number % dist.get_world_size():
            deadline = time.monotonic() + 60
            while not agreement.requested and time.monotonic() < deadline:
                time.sleep(0.005)
            left_early = time.monotonic() < deadline
    return limit, left_early


def one_round(number, store, rank, world_size):
    kind = KINDS[number % len(KINDS)]
    chance = random.Random(number)
    dist.barrier()
    with StopSignals() as signals:
        if kind == "before" and rank == number % world_size:
            os.kill(os.getpid(), signal.SIGTERM)
        with StopAgreement(store, rank, world_size, signals=signals) as agreement:
            others = [] if kind == "before" else disturb(kind, chance, rank, world_size, agreement)
            stopped, left_early = train(agreement, kind, rank, number)
            for timer in others:
                timer.join()
            again = agreement.should_stop() if kind != "finished" else True
            facts = {
                "round": number,
                "kind": kind,
                "rank": rank,
                "stopped": stopped,
                "reason": agreement.reason,
            }
            print(json.dumps({**facts, "left_early": left_early, "again": again}), flush=True)


def main():
    rank, world_size, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    torch.set_num_threads(1)
    store = store_of(rank, Path(sys.argv[3]))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    for number in range(rounds):
        one_round(number, store, rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
