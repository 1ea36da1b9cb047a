"""Measure the cost of a training step beside hand-written DDP, Fabric and Accelerate in the same processes.

    python benchmarks/step.py [--rounds N] [--seconds S] [--sizes small large] [--output FILE]

Two gloo ranks train on the CPU with one thread each; each size has a pair of processes of its own. Each way
trains a model of its own, with equal weights, data and AdamW, in the usual loop: a batch of its loader,
forward, backward, step, `zero_grad`. slurmddp also calls `should_stop` in each step and writes heartbeats for
an agent. The ways take turns in blocks of steps, in another order in each round, so that the load of the
machine meets all of them. `again` is the hand-written way once more: its ratio shows the noise.

A figure is the median over the rounds of the seconds of a step in a block. A ratio divides the two blocks of
one round, and is the median over the rounds; its quartiles stand beside it.

Other programs on the machine disturb the wall time more than one way differs from another. So the CPU time
of the main thread is measured in the same blocks. It counts Python and torch, but no wait for the other
rank. `CPU` is the CPU time of a way beyond the hand-written way's, in microseconds per step, and as a ratio:
1 + that time over the wall time of the hand-written step.

A step of slurmddp may take at most 1.01 of the hand-written step, for each size: by the CPU ratio, and by the
lower quartile of the wall ratio. A missed limit is named, and the exit code is then 1.
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
BY_HAND = "by hand"
AGAIN = "again"
WARM_UP_STEPS = 20
Steps = Iterator[None]
"""A training that takes one step each time it is advanced."""
StepTimes = tuple[float, float]
"""Seconds of a step: wall time, and CPU time of the main thread."""


def model_of(size: str) -> nn.Module:
    """Return a model of a size, with the same weights at each call."""
    width, layers = WIDTHS[size]
    torch.manual_seed(0)
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), *hidden, nn.Linear(width, 8))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all ways use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loader_of(sampler: DistributedSampler[Any] | None = None) -> DataLoader[Any]:
    """Return a loader of the same samples at each call; it shuffles unless a sampler orders them."""
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
    """Train without end.

    Args:
        model: the wrapped model.
        optimizer: its optimizer.
        loader: the batches of an epoch.
        backward: called with the loss.
        finish: called at the end of each step.
        begin_epoch: called with the number of the epoch.
    """
    for epoch in itertools.count():
        begin_epoch(epoch)
        for inputs, targets in loader:
            backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            finish()
            yield


def by_hand(d: Distributon, size: str) -> Steps:
    """Return a training by torch alone."""
    model = DistributedDataParallel(model_of(size))
    sampler: DistributedSampler[Any] = DistributedSampler(loader_of().dataset, drop_last=True)
    return loop(model, optimizer_of(model), loader_of(sampler), begin_epoch=sampler.set_epoch)


def slurmddp(d: Distributon, size: str) -> Steps:
    """Return a training by slurmddp."""
    model = d.setup_model(model_of(size))
    optimizer = d.setup_optimizer(optimizer_of(model))
    return loop(model, optimizer, d.setup_dataloader(loader_of()), d.backward, d.should_stop)


def fabric(d: Distributon, size: str) -> Steps:
    """Return a training by Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    f = Fabric(accelerator="cpu", strategy=strategy, devices=RANKS, plugins=[TorchElasticEnvironment()])
    f.launch()
    bare_model = model_of(size)
    model, optimizer = f.setup(bare_model, optimizer_of(bare_model))
    return loop(model, optimizer, f.setup_dataloaders(loader_of()), f.backward)


def accelerate(d: Distributon, size: str) -> Steps:
    """Return a training by Accelerate."""
    from accelerate import Accelerator

    a = Accelerator(cpu=True)
    bare_model = model_of(size)
    model, optimizer, loader = a.prepare(bare_model, optimizer_of(bare_model), loader_of())
    return loop(model, optimizer, loader, a.backward)


WAYS: dict[str, Callable[[Distributon, str], Steps]] = {
    BY_HAND: by_hand,
    "slurmddp": slurmddp,
    "Fabric": fabric,
    "Accelerate": accelerate,
    AGAIN: by_hand,
}


def measure(d: Distributon, size: str, rounds: int, seconds: float) -> dict[str, list[StepTimes]]:
    """Return the times of a step by way, one for each round; all ranks run it.

    Args:
        d: the Distributon of this rank.
        size: the model, by its name in `WIDTHS`.
        rounds: the number of rounds that count.
        seconds: the length of a block of steps.
    """
    torch.set_num_threads(1)
    # Under an agent there is such a page, which the agent reads.
    d._session.heartbeat._page = HeartbeatPage.create()
    trainings = {name: build(d, size) for name, build in WAYS.items()}
    warm_up = {name: times_of_step(d, steps, WARM_UP_STEPS) for name, steps in trainings.items()}
    wall_s, _ = warm_up[BY_HAND]
    count = d.broadcast(max(5, round(seconds / wall_s)))

    times: dict[str, list[StepTimes]] = {name: [] for name in trainings}
    for number in range(-1, rounds):  # The first round fills caches.
        for name in random.Random(number).sample(list(trainings), len(trainings)):
            step_times = times_of_step(d, trainings[name], count)
            if number >= 0:
                times[name].append(step_times)
    return times


def times_of_step(d: Distributon, steps: Steps, count: int) -> StepTimes:
    """Return the mean times of the next `count` steps."""
    d.barrier()
    started = time.perf_counter()
    cpu_started = time.thread_time()
    for _ in range(count):
        next(steps)
    wall_s = time.perf_counter() - started
    return wall_s / count, (time.thread_time() - cpu_started) / count


def wall_times(times: dict[str, list[StepTimes]]) -> dict[str, list[float]]:
    """Return the wall times of a step by way."""
    return {name: [wall_s for wall_s, _ in rounds] for name, rounds in times.items()}


def cpu_times(times: dict[str, list[StepTimes]]) -> dict[str, list[float]]:
    """Return the CPU times of a step by way."""
    return {name: [cpu_s for _, cpu_s in rounds] for name, rounds in times.items()}


def ratios(times: dict[str, list[StepTimes]]) -> dict[str, dict[str, float]]:
    """Return each way's ratios to the hand-written way: the medians, and quartiles over the rounds."""
    wall = wall_times(times)
    cpu = cpu_times(times)
    step_s = statistics.median(wall[BY_HAND])

    ratios_by_way = {}
    for name in times:
        if name == BY_HAND:
            continue
        quotients = [seconds / hand_s for seconds, hand_s in zip(wall[name], wall[BY_HAND], strict=True)]
        if len(quotients) > 1:
            low, _, high = statistics.quantiles(quotients, n=4)
        else:
            low = high = quotients[0]
        differences = [seconds - hand_s for seconds, hand_s in zip(cpu[name], cpu[BY_HAND], strict=True)]
        more_cpu_s = statistics.median(differences)
        ratios_by_way[name] = {
            "median": round(ratio(wall[name], wall[BY_HAND]), 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "cpu": round(1 + more_cpu_s / step_s, 4),
            "cpu_us": round(1e6 * more_cpu_s, 1),
        }
    return ratios_by_way


def in_ms(times: dict[str, list[StepTimes]]) -> dict[str, object]:
    """Return medians and all times, in milliseconds: `record.as_json` rounds to tenths of a millisecond."""
    results: dict[str, object] = {}
    for prefix, seconds in (("", wall_times(times)), ("cpu_", cpu_times(times))):
        in_rounds = {name: [round(1e3 * value, 4) for value in values] for name, values in seconds.items()}
        results[f"{prefix}medians_ms"] = {
            name: statistics.median(values) for name, values in in_rounds.items()
        }
        results[f"{prefix}times_ms"] = in_rounds
    return results


def missed(ratios_of_way: dict[str, float]) -> list[str]:
    """Return the end of a sentence for each ratio of slurmddp above the limit."""
    measures = {
        "by CPU time": ratios_of_way["cpu"],
        "by the lower quartile of wall time": ratios_of_way["low"],
    }
    return [
        f"{value} of the hand-written step {measure}" for measure, value in measures.items() if value > LIMIT
    ]


def show(size: str, times: dict[str, list[StepTimes]]) -> None:
    """Print the ratios of each way for one size."""
    step_ms = 1e3 * statistics.median(wall_times(times)[BY_HAND])
    print(f"\n{size}: a step by hand takes {step_ms:.3f} ms")
    for name, values in ratios(times).items():
        wall = f"{values['median']:.3f} x  ({values['low']:.3f} to {values['high']:.3f})"
        print(f"  {name:12} {wall}   CPU {values['cpu']:.3f} x  ({values['cpu_us']:+.0f} us)")


def main() -> int:
    """Measure all sizes, print the ratios, and return 1 if a limit is exceeded."""
    options = parser(__doc__, rounds=40)
    options.add_argument("--seconds", type=float, default=0.5, help="seconds of a block of steps (0.5)")
    options.add_argument("--sizes", nargs="+", choices=WIDTHS, default=list(WIDTHS), help="models to train")
    arguments = options.parse_args()

    results = {}
    texts = []
    for size in arguments.sizes:
        d = Distributon(RANKS, backend="gloo", seed=0)
        times = d.launch(measure, size, arguments.rounds, arguments.seconds)
        show(size, times)
        ratios_by_way = ratios(times)
        results[size] = {"ratios": ratios_by_way, **in_ms(times)}
        texts += [f"{text} ({size})" for text in missed(ratios_by_way["slurmddp"])]

    keep(arguments.output, {"ranks": RANKS, "rounds": arguments.rounds, "sizes": results})
    for text in texts:
        print(f"missed: a step of slurmddp takes {text}, limit {LIMIT}")
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
