"""Measure how long a save pauses the training, when it is durable, and the cost of steps meanwhile.

    python benchmarks/checkpoint_stall.py [--sizes 100 600 2000] [--rounds N] [--dir FOLDER] [--output FILE]

States of an Adam-like mix of tensors are saved by these methods in turn:

- torch.save, and torch.save with fsync;
- torch.distributed.checkpoint (DCP): save, and async_save;
- `slurmddp`: `Distributon.save(wait=False)` with the agent's service in another process;
- `slurmddp, no agent`: the same with a writer that the rank starts;
- `dd`: it writes the same bytes past the kernel's cache and does nothing else, so it shows how much the disk
  alone delays steps.

Beside each save a small training on the CPU takes steps. All methods take turns in one run, so that the load
of the machine meets all of them. Figures are medians over the rounds, and ratios are taken within a round.
async_save has a training process of its own: the time of its copy depends on whether malloc still has
memory, and so on all that was done in its process before.

stall     seconds of the call; `of a copy` divides by one copy of the tensors into warm memory
durable   seconds from the call until the files are flushed (torch.save alone does not flush)
steps     mean time of a step while the save continues, divided by the mean of steps before and after
cost      seconds of training that the save costs: the stall, and the delay of the steps beside it

Limits of the agent's saves: stall <= 1.5 copies and <= 0.3 of async_save's; durable no later than torch.save
with fsync; steps at most 10 % slower, and less than async_save's; copies into memory, as often as the
trainer makes them, take less than 1 % of the steps' time. A missed limit is named, and the exit code is then
1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import keep, parser, ratio
from savers import ASYNC, Peers, Savers, State, Steps

from slurmddp.checkpoint.memory.service import CheckpointService
from slurmddp.environments.names import CHANNEL_VARIABLE
from slurmddp.host import process as linux
from slurmddp.training.distributon import Distributon

NORMAL_S = 0.5
METHODS = ("torch.save", "torch.save+fsync", "DCP save", ASYNC, "dd", "slurmddp", "slurmddp, no agent")
LIMITS = {
    "stall of copies": 1.5,
    "stall of async_save": 0.3,
    "durable of torch.save+fsync": 1.0,
    "steps beside it": 1.1,
}
Row = dict[str, float]


def copy_s(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """Return the seconds of one copy of all tensors into memory that is already allocated."""
    started = time.perf_counter()
    for tensor, target in zip(tensors, targets, strict=True):
        target.copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(method: str, savers: Peers, steps: Steps, copy: float) -> Row:
    """Save once by a method and return its figures; `copy` is the time of a copy, in seconds."""
    before = steps.for_a_while(NORMAL_S)

    started = time.perf_counter()
    is_durable = savers.begin(method)
    stall = time.perf_counter() - started
    beside: list[float] = []
    while not is_durable():
        beside.append(steps.take())
    durable = time.perf_counter() - started

    time.sleep(0.1)  # Older checkpoints are deleted.
    normal = (before + steps.for_a_while(NORMAL_S)) / 2
    row = {
        "stall_s": stall,
        "durable_s": durable,
        "copy_s": copy,
        "step_s": normal,
        "of_a_copy": stall / copy,
        "cost_s": stall + sum(beside) - normal * len(beside),
    }
    if beside:
        row["steps"] = statistics.mean(beside) / normal
    return row


@contextmanager
def separate_process(
    method: str, root: Path, megabytes: int, device: str
) -> Iterator[Callable[[float], Row]]:
    """Start a training process for one method.

    Yields:
        A function that takes the time of a copy and measures the method in that process.
    """
    context = multiprocessing.get_context("spawn")
    pipe, end_of_process = context.Pipe()
    process = context.Process(
        target=serve_measurements, args=(end_of_process, method, root, megabytes, device), daemon=True
    )
    process.start()
    end_of_process.close()

    def measure_there(copy: float) -> Row:
        pipe.send(copy)
        row: Row = pipe.recv()
        return row

    try:
        yield measure_there
    finally:
        pipe.close()
        process.join(10)
        process.kill()


def serve_measurements(pipe: Any, method: str, root: Path, megabytes: int, device: str) -> None:
    """Measure the method for each time of a copy that arrives, until the pipe is closed."""
    torch.set_num_threads(1)
    root.mkdir()
    begin_group(root)
    savers = Peers(State(megabytes, device), root)
    steps = Steps()
    while True:
        try:
            copy = pipe.recv()
        except EOFError:
            return
        savers.tidy()
        pipe.send(measure(method, savers, steps, copy))


def begin_group(folder: Path) -> None:
    """Start a process group of one rank, without which DCP saves nothing."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)


def memory_share(d: Distributon, state: State, root: Path, steps: Steps) -> Row:
    """Return the share of the steps' time that copies into memory take, as often as the trainer copies."""
    pace = d._checkpointer.pace
    copies = 0
    total_s = 0.0
    while copies < 4:
        seconds = steps.take()
        total_s += seconds
        pace.step(seconds)
        if d.memory_save_is_due():
            d.memory_save(copies, root=root, model=state, optimizer=state.optimizer)
            copies += 1

    _, _, spent_s, trained_s = pace.figures
    return {"share": spent_s / trained_s, "seconds": total_s, "copies": copies}


def measure_size(
    megabytes: int, rounds: int, folder: Path, device: str, agent: Distributon, alone: Distributon
) -> dict[str, Any]:
    """Measure all methods with a state of one size, and print each figure as it comes."""
    state = State(megabytes, device)
    steps = Steps()
    root = folder / f"{device}-{megabytes}"
    root.mkdir()
    tensors = state.tensors()
    targets = [torch.zeros_like(tensor, device="cpu", pin_memory=device == "cuda") for tensor in tensors]
    savers = Savers(state, root, agent, alone)

    rows: dict[str, list[Row]] = {method: [] for method in METHODS}
    with separate_process(ASYNC, root / "apart", megabytes, device) as measure_async:
        # Rounds -1 and 0 warm up: memory is allocated, and DCP fills its caches.
        for number in range(-1, rounds + 1):
            # The bytes of one method may keep the disk busy beside the next method, so the order changes.
            for method in random.Random(number).sample(METHODS, len(METHODS)):
                savers.tidy()
                copy = statistics.median(copy_s(tensors, targets) for _ in range(3))
                if method == ASYNC:
                    row = measure_async(copy)
                else:
                    row = measure(method, savers, steps, copy)
                if number > 0:
                    rows[method].append(row)
                    figures = {name: round(value, 3) for name, value in row.items()}
                    print(megabytes, device, number, method, figures, flush=True)

    share = memory_share(agent, state, root / "agent", steps)
    shutil.rmtree(root)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"bytes": size, "memory": share, "rows": rows}


def median(rows: list[Row], name: str) -> float | None:
    """Return the median of one figure; None if no row has it."""
    values = [row[name] for row in rows if name in row]
    if not values:
        return None
    return round(statistics.median(values), 4)


def paired(rows: dict[str, list[Row]], method: str, other: str, name: str) -> float:
    """Return the median over the rounds of one figure divided by another method's in the same round."""
    numerators = [row[name] for row in rows[method]]
    denominators = [row[name] for row in rows[other]]
    return round(ratio(numerators, denominators), 3)


def summary(size: dict[str, Any]) -> dict[str, Any]:
    """Return the medians by method, and the ratios that have limits."""
    names = ("stall_s", "durable_s", "copy_s", "step_s", "of_a_copy", "cost_s", "steps")
    rows = size["rows"]
    ratios = {
        method: {
            "stall of copies": median(rows[method], "of_a_copy"),
            "stall of async_save": paired(rows, method, ASYNC, "stall_s"),
            "durable of torch.save+fsync": paired(rows, method, "torch.save+fsync", "durable_s"),
            "steps beside it": median(rows[method], "steps"),
            "steps beside async_save": median(rows[ASYNC], "steps"),
        }
        for method in METHODS
        if method.startswith("slurmddp")
    }
    table = {
        method: {name: median(rows_of_method, name) for name in names}
        for method, rows_of_method in rows.items()
    }
    return {"bytes": size["bytes"], "memory": size["memory"], "table": table, "ratios": ratios}


def missed(size: dict[str, Any]) -> list[str]:
    """Return the limits that a size exceeds, as texts."""
    ratios = size["ratios"]["slurmddp"]
    limits = {**LIMITS, "steps beside it": min(LIMITS["steps beside it"], ratios["steps beside async_save"])}
    texts = [
        f"{name}: {ratios[name]}, limit {limit}" for name, limit in limits.items() if ratios[name] > limit
    ]

    share = size["memory"]["share"]
    if share >= 0.01:
        texts.append(f"copies into memory: {share:.2%}, limit 1 %")
    return texts


def train(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all sizes as the training process; its environment names the agent's channel."""
    torch.set_num_threads(1)
    agent = Distributon().launch()
    agent._checkpointer  # noqa: B018 - takes the channel, which the second Distributon must not find.
    del os.environ[CHANNEL_VARIABLE]
    alone = Distributon().launch()
    begin_group(folder)

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    results: dict[str, Any] = {}
    for device in devices:
        for megabytes in arguments.sizes:
            size = measure_size(megabytes, arguments.rounds, folder, device, agent, alone)
            results[f"{megabytes} MB on {device}"] = summary(size)
    return results


def serve_as_agent(pid: int, service: CheckpointService) -> int:
    """Run the agent's checkpoint service until the training process ends; return its exit code."""
    while True:
        select.select(service.descriptors(), [], [], 0.05)
        service.handle()
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            service.finish(60)
            service.close()
            return os.waitstatus_to_exitcode(status)


def lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the final table, with the limits that are exceeded."""
    for name, size in results.items():
        share = size["memory"]["share"]
        yield f"\n{name}, {size['bytes'] / 1e6:.0f} MB; copies into memory take {share:.2%}"
        for method, row in size["table"].items():
            cells = [f"{figure} {value:.3f}" for figure, value in row.items() if value is not None]
            yield f"  {method:20} {'  '.join(cells)}"
        for method, ratios in size["ratios"].items():
            yield f"  {method}: {', '.join(f'{figure} {value:g}' for figure, value in ratios.items())}"
        for text in missed(size):
            yield f"  missed: {text}"


def measure_all(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Measure in a forked training process beside the agent's service; return None if it fails."""
    # A writer outlives the process that started it until all is written. However this benchmark ends, it
    # becomes the parent of such writers and ends them.
    linux.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="slurmddp-stall-", dir=arguments.dir))
    service = CheckpointService()
    os.environ[CHANNEL_VARIABLE] = str(service.channel_for(0))

    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (folder / "results.json").write_text(json.dumps(train(arguments, folder)))
        os._exit(0)

    try:
        if serve_as_agent(pid, service):
            return None
        results: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return results
    finally:
        linux.end_children(10)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure, print the table, and return 1 if a limit is exceeded."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--sizes", type=int, nargs="+", default=[100, 600, 2000], help="megabytes")
    options.add_argument("--dir", default=None, help="a folder on the disk to measure")
    arguments = options.parse_args()

    results = measure_all(arguments)
    if results is None:
        return 1
    print("\n".join(lines(results)))
    keep(arguments.output, {"rounds": arguments.rounds, "sizes": results})
    return 1 if any(missed(size) for size in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
