"""Measure how much the staleness of a parameter server gains where ranks are slow.

    python benchmarks/staleness.py [--rounds N] [--steps N] [--output FILE]

Three ranks train a small model under strategy `parameter_server`, on the same weights and batches. A step
takes 5 ms of sleep in the place of computation, and a delay:

- `one rank`: rank 2 is 20 ms late in each step.
- `any rank`: each rank is 60 ms late in a third of its steps, at random moments with a seed.

A round measures staleness 0, 1 and 4 one after the other, with the same steps for each. Steps per second are
those of rank 0, which is fast under `one rank`. `equal time` is the held-out loss after the seconds in which
the fastest of the three bounds took all of its steps; `equal steps` is the loss after all steps. Figures are
medians of the rounds; ratios are medians of the ratios of the rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import NamedTuple

import torch
from record import keep, parser
from torch import nn

from slurmddp import Distributon
from slurmddp.strategies.parameter_server import ParameterServer

RANKS, STEP_S = 3, 0.005
BOUNDS = (0, 1, 4)
PATTERNS = ("one rank", "any rank")
INPUTS, WIDTH, BATCH, RATE = 16, 64, 32, 0.005


class Course(NamedTuple):
    """The seconds since the start at the end of each step of rank 0, and the held-out loss then."""

    seconds: list[float]
    losses: list[float]

    def loss_at(self, second: float) -> float:
        return [loss for at, loss in zip(self.seconds, self.losses, strict=True) if at <= second][-1]


def delays(pattern: str, rank: int, steps: int) -> list[float]:
    """Return the delay of each step of a rank, in seconds."""
    if pattern == "one rank":
        return [0.02 if rank == RANKS - 1 else 0.0] * steps
    draw = random.Random(rank)
    return [0.06 if draw.random() < 1 / 3 else 0.0 for _ in range(steps)]


def network(seed: int, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    with torch.no_grad():
        for one in made.parameters():
            one.mul_(scale)
    return made


def train(d: Distributon, pattern: str, steps: int) -> Course:
    """Train towards the outputs of another network; return the course of this rank."""
    torch.set_num_threads(1)
    teacher, model = network(1, scale=2.0), network(2)
    model = d.setup_model(model)
    optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    draw = torch.Generator().manual_seed(d.rank)
    seconds, weights = [], []
    d.barrier()
    began = time.perf_counter()
    for delay in delays(pattern, d.rank, steps):
        x = torch.randn(BATCH, INPUTS, generator=draw)
        optimizer.zero_grad()
        d.backward(nn.functional.mse_loss(model(x), teacher(x).detach()))
        time.sleep(STEP_S + delay)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        weights.append([one.detach().clone() for one in model.parameters()])
    d.barrier()  # No rank leaves the server while another one takes steps.
    x = torch.randn(4096, INPUTS, generator=torch.Generator().manual_seed(RANKS))
    losses = []
    with torch.no_grad():
        for step in weights:
            for own, value in zip(model.parameters(), step, strict=True):
                own.copy_(value)
            losses.append(nn.functional.mse_loss(model(x), teacher(x)).item())
    return Course(seconds, losses)


def measure(pattern: str, steps: int) -> list[dict[str, float]]:
    """Return the figures of one round for each bound."""
    courses = [
        Course(*Distributon(RANKS, strategy=ParameterServer(staleness=bound)).launch(train, pattern, steps))
        for bound in BOUNDS
    ]
    fastest = min(course.seconds[-1] for course in courses)
    return [
        {
            "steps_per_s": steps / course.seconds[-1],
            "gain": courses[0].seconds[-1] / course.seconds[-1],
            "equal_time": course.loss_at(fastest),
            "equal_steps": course.losses[-1],
        }
        for course in courses
    ]


def main() -> None:
    made = parser(__doc__, rounds=5)
    made.add_argument("--steps", type=int, default=150, help="steps of each rank (150)")
    options = made.parse_args()
    found = []
    for pattern in PATTERNS:
        rounds = [measure(pattern, options.steps) for _ in range(options.rounds)]
        for bound, rows in zip(BOUNDS, zip(*rounds, strict=True), strict=True):
            medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            found.append({"slow": pattern, "staleness": bound, **medians, "rounds": rows})
            shown = ", ".join(f"{name} {value:.4g}" for name, value in medians.items())
            print(f"{pattern}, staleness {bound}: {shown}", flush=True)
    keep(options.output, {"ranks": RANKS, "steps": options.steps, "found": found})


if __name__ == "__main__":
    main()
