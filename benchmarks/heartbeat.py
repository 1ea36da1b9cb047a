"""Measures what a step costs that is shown to the agent: everything of it, without the step.

    python benchmarks/heartbeat.py [--rounds N] [--output FILE]

Prints microseconds of CPU time, as the median over the rounds: of a step (`should_stop`, a batch, `backward`,
the optimizer's), and of a sign of life in work of one's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from record import keep, parser

from slurmddp.host.heartbeat_page import HeartbeatPage
from slurmddp.training.heartbeat import Heartbeat
from slurmddp.training.startup_timer import StartupTimer

STEPS = 100_000


def steps() -> None:
    progress = Heartbeat(HeartbeatPage.create(), StartupTimer({}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    progress.follow(optimizer)
    (complete,) = optimizer._optimizer_step_post_hooks.values()
    for _ in progress.batches(iter(range(STEPS)), torch.device("cpu")):
        progress.step_begins()
        progress.backward_begins()
        complete(optimizer, (), {})


def signs() -> None:
    progress = Heartbeat(HeartbeatPage.create(), StartupTimer({}))
    for _ in range(STEPS):
        progress.alive("evaluating")


def microseconds(run: Callable[[], None], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        started = time.process_time()
        run()
        found.append(1e6 * (time.process_time() - started) / STEPS)
    return statistics.median(found)


def main() -> None:
    options = parser(__doc__, rounds=5)
    asked = options.parse_args()
    found = {
        "step_us": microseconds(steps, asked.rounds),
        "sign_of_life_us": microseconds(signs, asked.rounds),
    }
    print(f"a step: {found['step_us']:.2f} us")
    print(f"a sign of life: {found['sign_of_life_us']:.2f} us")
    keep(asked.output, found)


if __name__ == "__main__":
    main()
