"""Measure the cost of telling the agent that a rank is alive: in a training step, and in other work.

    python benchmarks/heartbeat.py [--rounds N] [--output FILE]

Printed are microseconds of CPU time, as medians over the rounds: all that slurmddp adds to a step, which
reports `should_stop`, the batch, `backward` and the optimizer, and one report of other work.
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


def report_steps() -> None:
    """Report the phases of many steps, without training."""
    heartbeat = Heartbeat(HeartbeatPage.create(), StartupTimer({}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    heartbeat.follow(optimizer)
    (complete,) = optimizer._optimizer_step_post_hooks.values()
    for _ in heartbeat.batches(iter(range(STEPS)), torch.device("cpu")):
        heartbeat.step_begins()
        heartbeat.backward_begins()
        complete(optimizer, (), {})


def report_other_work() -> None:
    """Report other work many times."""
    heartbeat = Heartbeat(HeartbeatPage.create(), StartupTimer({}))
    for _ in range(STEPS):
        heartbeat.alive("evaluating")


def microseconds(report: Callable[[], None], rounds: int) -> float:
    """Return the CPU time of one report."""
    times = []
    for _ in range(rounds):
        started = time.process_time()
        report()
        times.append(1e6 * (time.process_time() - started) / STEPS)
    return statistics.median(times)


def main() -> None:
    """Measure and print both costs."""
    arguments = parser(__doc__, rounds=5).parse_args()
    step_us = microseconds(report_steps, arguments.rounds)
    other_work_us = microseconds(report_other_work, arguments.rounds)

    print(f"a step: {step_us:.2f} us")
    print(f"a report of other work: {other_work_us:.2f} us")
    keep(arguments.output, {"step_us": step_us, "other_work_us": other_work_us})


if __name__ == "__main__":
    main()
