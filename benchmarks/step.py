"""Measure the cost of a training step beside hand-written DDP, Fabric and Accelerate in the same processes.

    python benchmarks/step.py [--rounds N] [--seconds S] [--sizes small large] [--output FILE]

Two gloo ranks, one thread each, on the CPU; a pair of processes for each size. Each way trains a model of its
own, with equal weights, data and AdamW, in the usual loop: a batch of its loader, forward, backward, step,
`zero_grad`. slurmddp also calls `should_stop` in each step and writes heartbeats for an agent. The ways take
turns in blocks of steps, in another order in each round, so that the load of the machine meets all of them.
`again` is the hand-written way once more: its ratio shows the noise.

A figure is the median over the rounds of the seconds of a step in a block. A ratio divides the two blocks of
one round, and is the median over the rounds; its quartiles stand beside it.

Other programs on the machine disturb the wall time more than a way differs from another. So the CPU time of
the main thread is measured in the same blocks. It counts Python and torch, but no wait for the other rank.
`CPU` is the CPU time of a way beyond the hand-written one, in microseconds per step, and as a ratio: 1 + that
time over the wall time of the hand-written step.

Promised: a step of slurmddp takes at most 1.01 of the hand-written one, for each size: by the CPU ratio, and
by the lower quartile of the wall ratio. A missed limit is named, and the exit code is then 1.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from record import keep, parser, ratio
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from slurmddp import Distributon
from slurmddp.host.heartbeat_page import HeartbeatPage

LIMIT = 1.01
RANKS = 2
WIDTHS = {"small": (64, 2), "large": (512, 4)}
"""Width and number of the hidden layers: 0.01 and 1.1 million parameters."""
BY_HAND, AGAIN = "by hand", "again"
WARM_UP_STEPS = 20
Steps = Iterator[None]
"""A training that takes one step each time it is advanced."""
Taken = tuple[float, float]
"""Seconds of a step: wall time, and CPU time of the main thread."""


def model_of(size: str) -> nn.Module:
    width, layers = WIDTHS[size]
    torch.manual_seed(0)
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), *hidden, nn.Linear(width, 8))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loader_of(sampler: DistributedSampler[Any] | None = None) -> DataLoader[Any]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8192, 32), torch.randint(8, (8192,)))
    return DataLoader(data, batch_size=16, shuffle=sampler is None, sampler=sampler, drop_last=True)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    finish: Callable[[], object] = lambda: None,
    begin_epoch: Callable[[int], object] = lambda epoch: None,
) -> Steps:
    """Train without end; `finish` ends each step."""
    for epoch in itertools.count():
        begin_epoch(epoch)
        for inputs, targets in loader:
            backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            finish()
            yield


def by_hand(d: Distributon, size: str) -> Steps:
    model = DistributedDataParallel(model_of(size))
    sampler: DistributedSampler[Any] = DistributedSampler(loader_of().dataset, drop_last=True)
    return loop(model, optimizer_of(model), loader_of(sampler), begin_epoch=sampler.set_epoch)


def slurmddp(d: Distributon, size: str) -> Steps:
    model = d.setup_model(model_of(size))
    optimizer = d.setup_optimizer(optimizer_of(model))
    return loop(model, optimizer, d.setup_dataloader(loader_of()), d.backward, d.should_stop)


def fabric(d: Distributon, size: str) -> Steps:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    f = Fabric(accelerator="cpu", strategy=strategy, devices=RANKS, plugins=[TorchElasticEnvironment()])
    f.launch()
    model, optimizer = f.setup(raw := model_of(size), optimizer_of(raw))
    return loop(model, optimizer, f.setup_dataloaders(loader_of()), f.backward)


def accelerate(d: Distributon, size: str) -> Steps:
    from accelerate import Accelerator

    a = Accelerator(cpu=True)
    model, optimizer, loader = a.prepare(raw := model_of(size), optimizer_of(raw), loader_of())
    return loop(model, optimizer, loader, a.backward)


WAYS: dict[str, Callable[[Distributon, str], Steps]] = {
    BY_HAND: by_hand,
    "slurmddp": slurmddp,
    "Fabric": fabric,
    "Accelerate": accelerate,
    AGAIN: by_hand,
}


def measure(d: Distributon, size: str, rounds: int, seconds: float) -> dict[str, list[Taken]]:
    """Return the times of a step by way, one for each round; all ranks run it."""
    torch.set_num_threads(1)
    d._session.heartbeat._page = HeartbeatPage.create()  # As under an agent, which reads it.
    ways = {name: build(d, size) for name, build in WAYS.items()}
    warm = {name: seconds_of(d, steps, WARM_UP_STEPS) for name, steps in ways.items()}
    count = d.broadcast(max(5, round(seconds / warm[BY_HAND][0])))
    found: dict[str, list[Taken]] = {name: [] for name in ways}
    for number in range(-1, rounds):  # The first round fills caches.
        for name in random.Random(number).sample(list(ways), len(ways)):
            taken = seconds_of(d, ways[name], count)
            if number >= 0:
                found[name].append(taken)
    return found


def seconds_of(d: Distributon, steps: Steps, count: int) -> Taken:
    """Return the mean times of the next `count` steps."""
    d.barrier()
    started, cpu_started = time.perf_counter(), time.thread_time()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - started) / count, (time.thread_time() - cpu_started) / count


def column(times: dict[str, list[Taken]], index: int) -> dict[str, list[float]]:
    """Return the wall times (0) or the CPU times (1)."""
    return {name: [one[index] for one in taken] for name, taken in times.items()}


def ratios(times: dict[str, list[Taken]]) -> dict[str, dict[str, float]]:
    """Return each way's ratios to the hand-written one: the medians, and quartiles over the rounds."""
    wall, cpu = column(times, 0), column(times, 1)
    step_s = statistics.median(wall[BY_HAND])
    found = {}
    for name in [name for name in times if name != BY_HAND]:
        each = [one / other for one, other in zip(wall[name], wall[BY_HAND], strict=True)]
        low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
        median = ratio(wall[name], wall[BY_HAND])
        more_s = statistics.median(one - other for one, other in zip(cpu[name], cpu[BY_HAND], strict=True))
        found[name] = {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}
        found[name] |= {"cpu": round(1 + more_s / step_s, 4), "cpu_us": round(1e6 * more_s, 1)}
    return found


def in_ms(times: dict[str, list[Taken]]) -> dict[str, object]:
    """Return medians and all times, in milliseconds: `record.as_json` rounds to a tenth of one."""
    found: dict[str, object] = {}
    for kind, values in (("", column(times, 0)), ("cpu_", column(times, 1))):
        each = {name: [round(1e3 * value, 4) for value in taken] for name, taken in values.items()}
        found[f"{kind}medians_ms"] = {name: statistics.median(taken) for name, taken in each.items()}
        found[f"{kind}times_ms"] = each
    return found


def missed(of: dict[str, float]) -> list[str]:
    """Return a sentence part for each ratio of slurmddp above the limit."""
    by = {"by CPU time": of["cpu"], "by the lower quartile of wall time": of["low"]}
    return [f"{value} of the hand-written one {name}" for name, value in by.items() if value > LIMIT]


def main() -> int:
    options = parser(__doc__, rounds=40)
    options.add_argument("--seconds", type=float, default=0.5, help="seconds of a block of steps (0.5)")
    options.add_argument("--sizes", nargs="+", choices=WIDTHS, default=list(WIDTHS), help="models to train")
    asked = options.parse_args()
    times = {
        size: Distributon(RANKS, backend="gloo", seed=0).launch(measure, size, asked.rounds, asked.seconds)
        for size in asked.sizes
    }
    found = {size: {"ratios": ratios(one), **in_ms(one)} for size, one in times.items()}
    for size, one in times.items():
        print(f"\n{size}: a step by hand takes {1e3 * statistics.median(column(one, 0)[BY_HAND]):.3f} ms")
        for name, each in ratios(one).items():
            wall = f"{each['median']:.3f} x  ({each['low']:.3f} to {each['high']:.3f})"
            print(f"  {name:12} {wall}   CPU {each['cpu']:.3f} x  ({each['cpu_us']:+.0f} us)")
    keep(asked.output, {"ranks": RANKS, "rounds": asked.rounds, "sizes": found})
    over = [(size, each) for size, one in times.items() for each in missed(ratios(one)["slurmddp"])]
    for size, text in over:
        print(f"missed: a step of slurmddp takes {text} ({size}), limit {LIMIT}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
