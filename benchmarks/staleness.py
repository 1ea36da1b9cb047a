"""Measure how much the staleness of a parameter server gains where ranks are slow.

    python benchmarks/staleness.py [--rounds N] [--steps N] [--output FILE]

Three ranks train a small model under strategy `parameter_server`, on the same weights and batches. A step
takes 5 ms of sleep in the place of computation, and a delay:

- `one rank`: rank 2 is 20 ms late in each step.
- `any rank`: each rank is 60 ms late in a third of its steps, at random moments with a seed.

A round measures staleness 0, 1 and 4 one after the other, with equal numbers of steps. Rank 0, which is fast
under `one rank`, gives the steps per second and the losses. `equal_time` is the held-out loss at the moment
when the fastest of the three bounds has taken all of its steps. `equal_steps` is the loss after all steps.
Figures are medians of the rounds; ratios are medians of the ratios of the rounds.
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

RANKS = 3
STEP_S = 0.005
BOUNDS = (0, 1, 4)
PATTERNS = ("one rank", "any rank")
INPUTS = 16
WIDTH = 64
BATCH = 32
RATE = 0.005


class Course(NamedTuple):
    """The end of each step of rank 0 in seconds since the start, and the held-out losses after the steps."""

    seconds: list[float]
    losses: list[float]

    def loss_at(self, second: float) -> float:
        """Return the loss after the last step that has ended by then."""
        return [loss for end, loss in zip(self.seconds, self.losses, strict=True) if end <= second][-1]


def delays(pattern: str, rank: int, steps: int) -> list[float]:
    """Return the delay of each step of a rank, in seconds."""
    if pattern == "one rank":
        delay = 0.02 if rank == RANKS - 1 else 0.0
        return [delay] * steps
    random_numbers = random.Random(rank)
    return [0.06 if random_numbers.random() < 1 / 3 else 0.0 for _ in range(steps)]


def network(seed: int, scale: float = 1.0) -> nn.Module:
    """Return a network with random weights, multiplied by `scale`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def held_out_losses(
    model: nn.Module, teacher: nn.Module, weights_of_steps: list[list[torch.Tensor]]
) -> list[float]:
    """Return the loss of the model with the weights of each step, on samples that no rank trains on."""
    inputs = torch.randn(4096, INPUTS, generator=torch.Generator().manual_seed(RANKS))
    losses = []
    with torch.no_grad():
        for weights in weights_of_steps:
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)
            losses.append(nn.functional.mse_loss(model(inputs), teacher(inputs)).item())
    return losses


def train(d: Distributon, pattern: str, steps: int) -> Course:
    """Train towards the outputs of another network; return the course of this rank."""
    torch.set_num_threads(1)
    teacher = network(1, scale=2.0)
    model = d.setup_model(network(2))
    optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    generator = torch.Generator().manual_seed(d.rank)

    seconds = []
    weights_of_steps = []
    d.barrier()
    started = time.perf_counter()
    for delay in delays(pattern, d.rank, steps):
        inputs = torch.randn(BATCH, INPUTS, generator=generator)
        optimizer.zero_grad()
        d.backward(nn.functional.mse_loss(model(inputs), teacher(inputs).detach()))
        time.sleep(STEP_S + delay)
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        weights_of_steps.append([parameter.detach().clone() for parameter in model.parameters()])

    d.barrier()  # No rank leaves the server while another rank takes steps.
    return Course(seconds, held_out_losses(model, teacher, weights_of_steps))


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
    """Measure both patterns and print the medians for each bound."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--steps", type=int, default=150, help="steps of each rank (150)")
    arguments = options.parse_args()

    results = []
    for pattern in PATTERNS:
        rounds = [measure(pattern, arguments.steps) for _ in range(arguments.rounds)]
        for bound, rows in zip(BOUNDS, zip(*rounds, strict=True), strict=True):
            medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
            results.append({"slow": pattern, "staleness": bound, **medians, "rounds": rows})
            figures = ", ".join(f"{name} {value:.4g}" for name, value in medians.items())
            print(f"{pattern}, staleness {bound}: {figures}", flush=True)
    keep(arguments.output, {"ranks": RANKS, "steps": arguments.steps, "found": results})


if __name__ == "__main__":
    main()
