"""Rank programs of test_fsdp: sharded trainings that report whole weights and the size of their shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.memory import writer_process
from slurmddp.checkpoint.state import reader
from slurmddp.checkpoint.state.shards import local, whole
from slurmddp.collectives import values as collectives
from slurmddp.errors import CheckpointError
from slurmddp.strategies import build
from slurmddp.training.distributon import Distributon


class Stack(nn.Module):
    """Model with layers of one class, a parameter that is used twice, and a buffer.

    Its sizes are no multiples of two or three.
    """

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(width, 5, bias=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        outputs: torch.Tensor = self.last(x) * self.scale
        return outputs


def part_of_batch(d: Distributon, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 5, generator=generator)
    y = torch.randint(0, 5, (12,), generator=generator)
    share = slice(d.rank * 12 // d.world_size, (d.rank + 1) * 12 // d.world_size)
    return x[share], y[share]


def setup(d: Distributon, width: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5 + d.rank)  # All ranks begin with the weights and buffers of rank 0.
    stack = Stack(width)
    stack.scale.add_(d.rank)
    model = d.setup_model(stack)
    return model, d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def take_steps(
    d: Distributon, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int
) -> list[float]:
    """Take steps of two accumulated passes; return the norms of the gradients before clipping."""
    norms = []
    for step in range(first, end):
        for number in range(2):
            x, y = part_of_batch(d, 10 * step + number)
            with d.accumulating(model, last=number == 1):
                d.backward(nn.functional.cross_entropy(model(x), y), accumulate=2)

        norms.append(float(d.clip_gradients(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()

    return norms


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return weights and moments as whole tensors; all ranks call it."""
    state = dict(model.state_dict())
    for number, moments in optimizer.state_dict()["state"].items():
        state |= {f"{number}/{name}": value for name, value in moments.items()}
    return {name: whole(value.detach()).clone() for name, value in state.items()}


def train(name: str, options: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train on this rank's part of common batches; return norms, whole state and the size of the shards."""
    with Distributon(strategy=build(name, **options)) as d:
        d.launch()
        model, optimizer = setup(d)
        norms = take_steps(d, model, optimizer, 0, steps)
        held = [*model.parameters(), *(m for state in optimizer.state.values() for m in state.values())]
        return {
            "norms": norms,
            "state": whole_state(d.unwrap(model), optimizer),
            "unwrapped": d.unwrap(model) is model,
            "numbers held": sum(local(tensor.detach()).untyped_storage().size() // 4 for tensor in held),
        }


def save_at(root: str, saves: list[int], strategy: str = "fsdp") -> dict[str, torch.Tensor]:
    """Train to the last of `saves`, save at each of them in the background, and return the whole state."""
    with Distributon(strategy=strategy) as d:
        d.launch()
        model, optimizer = setup(d)
        for first, end in zip([0, *saves], saves, strict=False):
            take_steps(d, model, optimizer, first, end)
            d.save(end, model=model, optimizer=optimizer, root=root, wait=False)

        d.finish_saving()
        return whole_state(d.unwrap(model), optimizer)


def load_and_train(root: str, end: int, strategy: str = "fsdp") -> dict[str, Any]:
    """Load the newest checkpoint and train to step `end`; return its step, the loaded and the last state."""
    files: set[str] = set()
    read = reader._read_tensors
    with Distributon(strategy=strategy) as d, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_read_tensors", lambda *args: files.add(args[2]) or read(*args))
        d.launch()
        model, optimizer = setup(d)
        step = d.load(model=model, optimizer=optimizer, root=root) or 0
        loaded = whole_state(d.unwrap(model), optimizer)
        take_steps(d, model, optimizer, step, end)
        last = whole_state(d.unwrap(model), optimizer)
        return {"step": step, "loaded": loaded, "last": last, "files": sorted(files), "rank": d.rank}


def save_other_placements(root: str) -> bool:
    """Save a tensor split by columns, and a replicated tensor; return whether a load restores both."""
    with Distributon() as d:
        d.launch()
        mesh = init_device_mesh("cpu", (d.world_size,))
        values = torch.arange(24.0).reshape(4, 6)
        model = nn.ParameterDict(
            {
                "columns": nn.Parameter(distribute_tensor(values, mesh, [Shard(1)])),
                "copies": nn.Parameter(distribute_tensor(values, mesh, [Replicate()])),
            }
        )
        d.save(1, model=model, root=root)
        before = [local(parameter.detach()).clone() for parameter in model.values()]
        with torch.no_grad():
            for weight in model.values():
                weight.zero_()

        d.load(model=model, root=root)
        after = [local(parameter.detach()) for parameter in model.values()]
        return all(torch.equal(shard, other) for shard, other in zip(before, after, strict=True))


def save_and_wait(root: str) -> dict[str, torch.Tensor]:
    """Save with `wait` and gathered parameters, without an agent: rank 0 gathers the state and writes it."""
    with Distributon(strategy=build("fsdp", reshard_after_forward=False)) as d:
        d.launch()
        model, optimizer = setup(d)
        d.check_can_save(model=model, optimizer=optimizer, root=root)
        take_steps(d, model, optimizer, 0, 1)
        with torch.no_grad():
            model(part_of_batch(d, 0)[0])
        d.save(0, model=model, root=root)
        d.save(1, model=model, optimizer=optimizer, root=root)
        return whole_state(d.unwrap(model), optimizer)


@contextmanager
def watched(facts: dict[str, int]) -> Iterator[None]:
    """Count in `facts` the elements of gathered tensors, and the bytes received from other ranks."""
    unpack = collectives.unpack
    full_tensor = DTensor.full_tensor

    def counted(received: bytes) -> Any:
        facts["received"] += len(received)
        return unpack(received)

    def gather(tensor: DTensor) -> torch.Tensor:
        facts["gathered"] += tensor.numel()
        return full_tensor(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "unpack", counted)
        patch.setattr(DTensor, "full_tensor", gather)
        yield


def save_on_nodes(root: str, wait: bool) -> dict[str, Any]:
    """Save steps 1 and 2; return the whole state, and the sizes that this rank has gathered and received."""
    facts = {"gathered": 0, "received": 0}
    with Distributon(strategy="fsdp") as d:
        d.launch()
        model, optimizer = setup(d, width=600)
        with watched(facts):
            d.check_can_save(model=model, optimizer=optimizer, root=root)

        for step in (1, 2):
            take_steps(d, model, optimizer, step - 1, step)
            with watched(facts):
                d.save(step, model=model, optimizer=optimizer, root=root, wait=wait)

        d.finish_saving()
        held = d._checkpointer.saves.states_in_memory(Path(root))
        return {
            **facts,
            "held": [header.tensors_bytes for _, header, _ in held],
            "shards": sum(local(parameter.detach()).nbytes for parameter in model.parameters()),
            "state": whole_state(model, optimizer),
        }


def load_wide(root: str) -> dict[str, torch.Tensor]:
    """Load the newest checkpoint of `save_on_nodes`; return the whole state."""
    with Distributon(strategy="fsdp") as d:
        d.launch()
        model, optimizer = setup(d, width=600)
        assert d.load(model=model, optimizer=optimizer, root=root) == 2
        return whole_state(model, optimizer)


def save_while_a_writer_is_killed(root: str) -> str:
    """Save steps 1 to 5; return the error of step 2, in which the writer of node 1 is killed.

    Steps 4 and 5 are saved while one of the nodes has no memory for a copy.
    """
    with Distributon(strategy="fsdp") as d, pytest.MonkeyPatch.context() as patch:
        d.launch()
        model, optimizer = setup(d)
        d.save(1, model=model, optimizer=optimizer, root=root)
        if d.rank == 1:
            patch.setattr(writer_process, "command", lambda channel: ["sleep", "600"])
        take_steps(d, model, optimizer, 1, 2)
        d.save(2, model=model, optimizer=optimizer, root=root, wait=False)
        patch.undo()
        if d.rank == 1:
            writer = d._checkpointer.saves._writer
            assert writer is not None
            writer.kill()

        error = ""
        try:
            d.finish_saving()
        except CheckpointError as caught:
            error = caught.message

        newest = checkpoint.latest(Path(root))
        assert newest is not None and newest.name == "step-0000000001"
        d.barrier()
        for step, without_memory in ((3, None), (4, 1), (5, 0)):
            d._checkpointer.saves._copies_off = d.rank == without_memory
            d.save(step, model=model, optimizer=optimizer, root=root, wait=False)

        d.finish_saving()
        return error
