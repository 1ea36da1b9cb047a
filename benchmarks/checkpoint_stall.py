"""Measure how long a save pauses the training, when it is durable, and the cost of steps meanwhile.

    python benchmarks/checkpoint_stall.py [--sizes 100 600 2000] [--rounds N] [--dir FOLDER] [--output FILE]

States of an Adam-like mix of tensors are saved in turn by torch.save, torch.save and fsync,
torch.distributed.checkpoint (DCP) save and async_save, and by `Distributon.save(wait=False)` with the agent's
service in another process (`slurmddp`) and with a writer that the rank starts (`slurmddp, no agent`). Beside
each save a small training on the CPU takes steps. `dd` writes the same bytes past the kernel's cache, and
nothing else: so much do steps suffer from the disk, whoever writes. All take turns in one run, so that the
load of the machine meets all of them; figures are medians over the rounds, and ratios are taken within a
round. async_save has a training process of its own, since the time of its copy depends on whether malloc
still has memory, and so on all that was done in its process before.

stall     seconds that the call takes; `of a copy` divides by one copy of the tensors into warm memory
durable   seconds from the call until the files are flushed (torch.save alone does not flush)
steps     mean time of a step while the save goes on beside it, divided by that of steps before and after
cost      seconds of training that the save costs: the stall, and what the steps beside it took longer

Promised, of the agent's saves: stall <= 1.5 copies and <= 0.3 of async_save's; durable no later than
torch.save with fsync; steps at most 10 % slower, and less than async_save's; copies into memory, as often as
the trainer makes them, take less than 1 % of the steps' time. A missed limit is named, and the exit code
is then 1.
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


def copy_s(tensors: list[torch.Tensor], warm: list[torch.Tensor]) -> float:
    """Return the time of one copy of all tensors into memory that is there already."""
    started = time.perf_counter()
    for tensor, target in zip(tensors, warm, strict=True):
        target.copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(method: str, savers: Peers, steps: Steps, copy: float) -> Row:
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
def measured_apart(method: str, root: Path, megabytes: int, device: str) -> Iterator[Callable[[float], Row]]:
    """Give a training process of its own to a method; the function measures it, told the time of a copy."""
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    process = context.Process(target=be_apart, args=(theirs, method, root, megabytes, device), daemon=True)
    process.start()
    theirs.close()

    def ask(copy: float) -> Row:
        own.send(copy)
        row: Row = own.recv()
        return row

    try:
        yield ask
    finally:
        own.close()
        process.join(10)
        process.kill()


def be_apart(line: Any, method: str, root: Path, megabytes: int, device: str) -> None:
    """Be that process."""
    torch.set_num_threads(1)
    root.mkdir()
    begin_group(root)
    savers, steps = Peers(State(megabytes, device), root), Steps()
    while True:
        try:
            copy = line.recv()
        except EOFError:
            return
        savers.tidy()
        line.send(measure(method, savers, steps, copy))


def begin_group(folder: Path) -> None:
    """DCP wants a process group; one rank is enough."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)


def memory_share(d: Distributon, state: State, root: Path, steps: Steps) -> Row:
    """Return what copies into memory take of the steps' time, as often as the trainer makes them."""
    pace, copied, all_s = d._checkpointer.pace, 0, 0.0
    while copied < 4:
        seconds = steps.take()
        all_s += seconds
        pace.step(seconds)
        if d.memory_save_is_due():
            d.memory_save(copied, root=root, model=state, optimizer=state.optimizer)
            copied += 1
    _, _, spent_s, trained_s = pace.figures
    return {"share": spent_s / trained_s, "seconds": all_s, "copies": copied}


def measure_size(
    megabytes: int, rounds: int, folder: Path, device: str, agent: Distributon, alone: Distributon
) -> dict[str, Any]:
    state, steps = State(megabytes, device), Steps()
    root = folder / f"{device}-{megabytes}"
    root.mkdir()
    tensors = state.tensors()
    warm = [torch.zeros_like(t, device="cpu", pin_memory=device == "cuda") for t in tensors]
    savers = Savers(state, root, agent, alone)
    rows: dict[str, list[Row]] = {method: [] for method in METHODS}
    with measured_apart(ASYNC, root / "apart", megabytes, device) as measure_async:
        for number in range(-1, rounds + 1):  # Two warm up: memory is taken, caches of DCP are filled.
            # What one has written may keep the disk busy beside the next one: each round has its own order.
            for method in random.Random(number).sample(METHODS, len(METHODS)):
                savers.tidy()
                copy = statistics.median(copy_s(tensors, warm) for _ in range(3))
                row = measure_async(copy) if method == ASYNC else measure(method, savers, steps, copy)
                if number > 0:
                    rows[method].append(row)
                    told = {name: round(value, 3) for name, value in row.items()}
                    print(megabytes, device, number, method, told, flush=True)
    share = memory_share(agent, state, root / "agent", steps)
    shutil.rmtree(root)
    return {"bytes": sum(t.numel() * t.element_size() for t in tensors), "memory": share, "rows": rows}


def median(rows: list[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return round(statistics.median(values), 4) if values else None


def paired(found: dict[str, Any], method: str, other: str, name: str) -> float:
    """Return the median over the rounds of one figure divided by another method's in the same round."""
    rows = found["rows"]
    return round(ratio(*([row[name] for row in rows[one]] for one in (method, other))), 3)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians by method, and the ratios that are promised."""
    names = ("stall_s", "durable_s", "copy_s", "step_s", "of_a_copy", "cost_s", "steps")
    ratios = {
        method: {
            "stall of copies": median(found["rows"][method], "of_a_copy"),
            "stall of async_save": paired(found, method, ASYNC, "stall_s"),
            "durable of torch.save+fsync": paired(found, method, "torch.save+fsync", "durable_s"),
            "steps beside it": median(found["rows"][method], "steps"),
            "steps beside async_save": median(found["rows"][ASYNC], "steps"),
        }
        for method in METHODS
        if method.startswith("slurmddp")
    }
    table = {m: {name: median(rows, name) for name in names} for m, rows in found["rows"].items()}
    return {"bytes": found["bytes"], "memory": found["memory"], "table": table, "ratios": ratios}


def missed(found: dict[str, Any]) -> list[str]:
    """Say which promises a size does not hold."""
    ratios = found["ratios"]["slurmddp"]
    limits = {**LIMITS, "steps beside it": min(LIMITS["steps beside it"], ratios["steps beside async_save"])}
    over = [
        f"{name}: {ratios[name]}, limit {limit}" for name, limit in limits.items() if ratios[name] > limit
    ]
    share = found["memory"]["share"]
    return [*over, *([f"copies into memory: {share:.2%}, limit 1 %"] if share >= 0.01 else [])]


def train(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Be the training process: the agent's line is in the environment."""
    torch.set_num_threads(1)
    agent = Distributon().launch()
    agent._checkpointer  # noqa: B018 - takes the line; the other one must not find it.
    del os.environ[CHANNEL_VARIABLE]
    alone = Distributon().launch()
    begin_group(folder)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    results: dict[str, Any] = {}
    for device in devices:
        for megabytes in arguments.sizes:
            found = measure_size(megabytes, arguments.rounds, folder, device, agent, alone)
            results[f"{megabytes} MB on {device}"] = summary(found)
    return results


def be_agent(pid: int, service: CheckpointService) -> int:
    """Do an agent's part for one rank until it ends; return its status."""
    while True:
        select.select(service.descriptors(), [], [], 0.05)
        service.handle()
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            service.finish(60)
            service.close()
            return os.waitstatus_to_exitcode(status)


def main() -> int:
    options = parser(__doc__, rounds=5)
    options.add_argument("--sizes", type=int, nargs="+", default=[100, 600, 2000], help="megabytes")
    options.add_argument("--dir", default=None, help="a folder on the disk that is to be measured")
    arguments = options.parse_args()
    # A writer outlives who started it until all is written: whatever ends this, it comes back here.
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
        if be_agent(pid, service):
            return 1
        results = json.loads((folder / "results.json").read_text())
    finally:
        linux.end_children(10)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(lines(results)))
    keep(arguments.output, {"rounds": arguments.rounds, "sizes": results})
    return 1 if any(missed(found) for found in results.values()) else 0


def lines(results: dict[str, Any]) -> Iterator[str]:
    for size, found in results.items():
        share = found["memory"]["share"]
        yield f"\n{size}, {found['bytes'] / 1e6:.0f} MB; copies into memory take {share:.2%}"
        for method, row in found["table"].items():
            cells = [f"{name} {value:.3f}" for name, value in row.items() if value is not None]
            yield f"  {method:20} {'  '.join(cells)}"
        for method, ratios in found["ratios"].items():
            yield f"  {method}: {', '.join(f'{name} {value:g}' for name, value in ratios.items())}"
        yield from (f"  missed: {what}" for what in missed(found))


if __name__ == "__main__":
    sys.exit(main())
