"""Measures how long a save stops training, when it is durable, and what steps cost meanwhile.

    python benchmarks/checkpoint_stall.py [--sizes 100 600 2000] [--rounds N] [--dir FOLDER] [--output FILE]

States of an Adam-like mix of tensors are saved in turn by torch.save, torch.save and fsync,
torch.distributed.checkpoint (DCP) save and async_save, and by `Distributon.save(wait=False)` with the agent's
keeper in another process (`slurmddp`) and with a writer that the rank starts (`slurmddp, no agent`). Beside
each save a small training on the CPU takes steps. All in one process and one run, so that the load of the
machine meets all of them; figures are medians over the rounds, and ratios are taken within a round:

stall     seconds that the call takes; `of a copy` divides by one copy of the tensors into warm memory
durable   seconds from the call until the files are flushed (torch.save alone does not flush)
steps     mean time of a step while the save goes on beside it, divided by that of steps before it

Promised, of the agent's saves: stall <= 1.5 copies and <= 0.3 of async_save's; durable no later than
torch.save with fsync; steps at most 10 % slower, and less than async_save's; copies into memory, as often as
the trainer makes them, take less than 1 % of the steps' time. What is missed is named, and then the exit code
is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from record import keep, parser, ratio
from torch import nn

from slurmddp.launchers import linux
from slurmddp.launchers.keeper import Keeper
from slurmddp.node import memory
from slurmddp.node.channel import CHANNEL_VARIABLE
from slurmddp.training.distributon import Distributon
from slurmddp.training.memory_pace import MemoryPace

BEFORE_S = 1.0
REST_S = 1.0
METHODS = ("torch.save", "torch.save+fsync", "DCP save", "DCP async_save", "slurmddp", "slurmddp, no agent")
LIMITS = {
    "stall of copies": 1.5,
    "stall of async_save": 0.3,
    "durable of torch.save+fsync": 1.0,
    "steps beside it": 1.1,
}
Row = dict[str, float]


class State(nn.Module):
    """A model whose state, with Adam's, has about so many megabytes: large matrices and small vectors."""

    def __init__(self, megabytes: int, device: str) -> None:
        super().__init__()
        width = 512 if megabytes < 300 else 1024
        layer_bytes = 12 * (4 * width * width + 6 * width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 4 * width), nn.LayerNorm(width)])
            for _ in range(max(1, round(megabytes * 1e6 / layer_bytes)))
        )
        self.to(device)
        self.optimizer = torch.optim.Adam(self.parameters())
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        state = self.optimizer.state_dict()["state"].values()
        moments = [part for one in state for part in one.values()]
        return [*self.state_dict().values(), *moments]

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.state_dict(), "optimizer": self.optimizer.state_dict()}


class Steps:
    """A training small enough to live in the processor's caches, and its steps on the clock."""

    def __init__(self) -> None:
        self._model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._inputs = torch.randn(128, 256)

    def take(self) -> float:
        started = time.perf_counter()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - started

    def for_a_while(self, seconds: float) -> float:
        """Return the mean time of a step."""
        taken = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            taken.append(self.take())
        return statistics.mean(taken)


class Savers:
    """Each method as a call that begins a save and returns a question whether it is durable."""

    def __init__(self, state: State, root: Path, agent: Distributon, alone: Distributon) -> None:
        self._state, self._root = state, root
        self._agent, self._alone = agent, alone
        self._number = 0

    def begin(self, method: str) -> Callable[[], bool]:
        self._number += 1
        if method.startswith("slurmddp"):
            return self._slurmddp(self._agent if method == "slurmddp" else self._alone)
        target = self._root / f"other-{self._number}"
        if method.startswith("torch"):
            with target.open("wb") as stream:
                torch.save(self._state.as_dict(), stream)
                if "fsync" in method:
                    stream.flush()
                    os.fsync(stream.fileno())
        elif method == "DCP save":
            dcp.save(self._state.as_dict(), checkpoint_id=target)
        else:
            response: Any = dcp.async_save(self._state.as_dict(), checkpoint_id=target)
            return lambda: bool(response.done() and response.result())
        return lambda: True

    def _slurmddp(self, d: Distributon) -> Callable[[], bool]:
        root = self._root / ("agent" if d is self._agent else "alone")
        d.save(
            root, self._number, keep_last=2, wait=False, model=self._state, optimizer=self._state.optimizer
        )
        saves = d._saves

        def is_durable() -> bool:
            assert saves is not None
            saves.poll()
            return not saves.busy

        return is_durable

    def touch(self) -> None:
        """Use the memory for copies, as the yardstick's is used: hosts take what is idle from guests."""
        for saves in (self._agent._saves, self._alone._saves):
            for slot in saves._snapshots._slots if saves is not None else ():
                if slot.view is not None:
                    slot.view.bytes[:: memory.PAGE_BYTES].add_(0)

    def tidy(self) -> None:
        """Remove what other methods have written, and let the disk come to rest: it may erase for a while."""
        for path in self._root.glob("other-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        time.sleep(REST_S)


def copy_s(tensors: list[torch.Tensor], warm: list[torch.Tensor]) -> float:
    """Return the time of one copy of all tensors into memory that is there already."""
    started = time.perf_counter()
    for tensor, target in zip(tensors, warm, strict=True):
        target.copy_(tensor, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(method: str, savers: Savers, steps: Steps, copies: Callable[[], float]) -> Row:
    savers.tidy()
    savers.touch()
    copy = statistics.median(copies() for _ in range(3))
    before = steps.for_a_while(BEFORE_S)
    started = time.perf_counter()
    is_durable = savers.begin(method)
    stall = time.perf_counter() - started
    beside: list[float] = []
    while not is_durable():
        beside.append(steps.take())
    durable = time.perf_counter() - started
    row = {
        "stall_s": stall,
        "durable_s": durable,
        "copy_s": copy,
        "step_s": before,
        "of_a_copy": stall / copy,
    }
    if beside:
        row["steps"] = statistics.mean(beside) / before
    return row


def memory_share(d: Distributon, state: State, root: Path, steps: Steps) -> Row:
    """Return what copies into memory take of the steps' time, as often as the trainer makes them."""
    pace, copied, all_s = MemoryPace("auto", keeps=True), 0, 0.0
    while copied < 4:
        seconds = steps.take()
        all_s += seconds
        if pace.step(seconds):
            pace.copied(
                *d.memory_save(root, copied, told=pace.figures, model=state, optimizer=state.optimizer)
            )
            copied += 1
    return {"share": pace.share, "seconds": all_s, "copies": copied}


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
    for number in range(-1, rounds + 1):  # Two warm up: memory is taken, caches of DCP are filled.
        first = number % len(METHODS)  # None comes after the same other one each time.
        for method in METHODS[first:] + METHODS[:first]:
            row = measure(method, savers, steps, lambda: copy_s(tensors, warm))
            if number > 0:
                rows[method].append(row)
                print(megabytes, device, number, method, {k: round(v, 3) for k, v in row.items()}, flush=True)
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
    names = ("stall_s", "durable_s", "copy_s", "step_s", "of_a_copy", "steps")
    ratios = {
        method: {
            "stall of copies": median(found["rows"][method], "of_a_copy"),
            "stall of async_save": paired(found, method, "DCP async_save", "stall_s"),
            "durable of torch.save+fsync": paired(found, method, "torch.save+fsync", "durable_s"),
            "steps beside it": median(found["rows"][method], "steps"),
            "steps beside async_save": median(found["rows"]["DCP async_save"], "steps"),
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
    agent._session  # noqa: B018 - takes the line; the other one must not find it.
    del os.environ[CHANNEL_VARIABLE]
    alone = Distributon().launch()
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)  # for async_save
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    results: dict[str, Any] = {}
    for device in devices:
        for megabytes in arguments.sizes:
            found = measure_size(megabytes, arguments.rounds, folder, device, agent, alone)
            results[f"{megabytes} MB on {device}"] = summary(found)
    return results


def be_agent(pid: int, keeper: Keeper) -> int:
    """Do an agent's part for one rank until it ends; return its status."""
    while True:
        select.select(keeper.descriptors(), [], [], 0.05)
        keeper.handle()
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            keeper.finish(60)
            keeper.close()
            return os.waitstatus_to_exitcode(status)
        if ended:
            keeper.ended(ended, status)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=[100, 600, 2000], help="megabytes")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    options.add_argument("--dir", default=None, help="a folder on the disk that is to be measured")
    arguments = options.parse_args()
    # A writer outlives who started it until all is written: whatever ends this, it comes back here.
    linux.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="slurmddp-stall-", dir=arguments.dir))
    keeper = Keeper()
    os.environ[CHANNEL_VARIABLE] = str(keeper.channel_for(0))
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (folder / "results.json").write_text(json.dumps(train(arguments, folder)))
        os._exit(0)
    try:
        if be_agent(pid, keeper):
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
            yield f"  {method}: {ratios}"
        yield from (f"  missed: {what}" for what in missed(found))


if __name__ == "__main__":
    sys.exit(main())
