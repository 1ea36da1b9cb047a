"""A small model, and trainings of it on the public API, for the ranks of the tests.

Each function returns plain values. The other modules named `..._jobs` serve one subject each.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.strategies.replicas import average
from slurmddp.training.distributon import Distributon


class Net(nn.Module):
    """A model with dropout and a buffer, and with so many layers that DDP rebuilds its buckets."""

    def __init__(self, width: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.hidden:
            x = x + self.drop(torch.tanh(layer(x)))
        logits: torch.Tensor = self.last(x)
        return logits


def batch_of(
    seed: int, size: int = 4, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of 6 features and their classes; a seed gives the same batch on each device."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator)
    classes = torch.randint(3, (size,), generator=generator)
    return inputs.to(device), classes.to(device)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights and buffers, on the CPU."""
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def samples_seen(
    count: int, batch_size: int, drop_last: bool, even: bool, epochs: int
) -> list[list[list[int]]]:
    """Return the samples of this rank, by epoch and batch."""
    with Distributon(seed=3) as d:
        d.launch()
        data = TensorDataset(torch.arange(count))
        loader = d.setup_dataloader(
            DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=drop_last), even=even
        )
        seen = [[batch[0].tolist() for batch in loader] for _ in range(epochs)]
        assert len(seen[0]) == len(loader)
        return seen


def set_up_again() -> list[str]:
    with Distributon() as d:
        given = Net()
        made = d.launch().setup_model(given)
        answers = []

        for model in (given, made, torch.compile(made)):
            try:
                d.setup_model(model)
            except ConfigError as error:
                answers.append("refused" if "set up already" in str(error) else str(error))

        return answers


def two_functions() -> list[Any]:
    return [
        Distributon(2).launch(lambda d, value: d.broadcast(value), 1),
        Distributon(2).launch(lambda d: d.broadcast("second")),
    ]


def errors_of_save_and_load(root: str) -> dict[str, str]:
    """Return this rank's errors of saves and loads that fail on rank 0, or on another rank."""
    errors: dict[str, str] = {}
    with Distributon(seed=1) as d:
        d.launch()
        model = d.setup_model(Net())
        Path(root, f"file-{d.rank}").write_text("in the way")
        attempts = {
            "no folder": lambda: d.save(1, root=Path(root, "file-0"), model=model),
            "no state": lambda: d.save(1, root=Path(root, "a"), model=3),
            "not saved": lambda: d.load(root=Path(root, "b"), model=model, optimiser={}),
            "other model": lambda: d.load(root=Path(root, "b"), model=Net(width=5)),
            "one rank": lambda: d.load(root=Path(root, "b"), model=model if d.rank == 0 else Net(width=5)),
        }
        d.save(1, root=Path(root, "b"), model=model, optimizer={"lr": 1})

        for name, attempt in attempts.items():
            try:
                attempt()
            except SlurmddpError as error:
                errors[name] = f"{type(error).__name__}: {error}"

        errors["none"] = str(d.load(root=Path(root, "c"), model=model))

    return errors


def own_draws() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an initial weight, and a random number after each of two calls of `setup_model`."""
    with Distributon(seed=7) as d:
        d.launch()
        net = Net()
        built = net.first.weight.clone().detach()
        d.setup_model(net)
        draw = torch.rand(4)
        d.setup_model(nn.Linear(1, 1))
        return built, draw, torch.rand(4)


class WorkerSeeds(Dataset[int]):
    """Data set whose samples are the seeds of the loader workers that read them."""

    deterministic = True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        assert worker is not None
        return int(worker.seed)


def worker_seeds() -> tuple[set[int], set[int]]:
    """Return the seeds of two loader workers: with seeds that differ by rank, and with equal seeds."""
    seeds: list[set[int]] = []
    with Distributon() as d:
        d.launch()
        for workers in (True, False):
            d.seed_everything(7, workers=workers)
            loader = d.setup_dataloader(DataLoader(WorkerSeeds(), batch_size=2, num_workers=2))
            seeds.append({int(seed) for batch in loader for seed in batch})

    return seeds[0], seeds[1]


def means() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of values over the ranks, reduced as one tensor and one by one."""
    with Distributon() as d:
        d.launch()
        values = torch.randn(37, generator=torch.Generator().manual_seed(d.rank))
        return d.all_reduce(values), torch.stack([d.all_reduce(value) for value in values])


def exchanges(folder: str) -> dict[str, Any]:
    """Return the results of the calls between ranks: reductions, gathered and broadcast values, places."""
    with Distributon() as d:
        d.launch()
        numbers = torch.tensor([d.rank + 1, -d.rank])
        ragged = torch.full((d.rank, 2), d.rank)
        results: dict[str, Any] = {
            op: d.all_reduce(numbers, op).tolist() for op in ("sum", "product", "max", "min")
        }
        results["ragged"] = [tensor.tolist() for tensor in d.all_gather(ragged)]
        results["values"] = d.all_gather({"rank": d.rank, "name": "x" * d.rank})
        results["first"] = d.broadcast(("from", d.rank, torch.tensor([d.rank])))
        results["places"] = (d.nodes, d.local_world_size, d.run_folder)

        with d.rank_zero_first():
            mark = Path(folder, "prepared")
            results["prepared"] = mark.exists()
            mark.touch()

        with d.rank_zero_first(local=True):
            mark = Path(folder, f"node-{d.node_rank}")
            results["prepared on the node"] = mark.exists()
            mark.touch()

        try:
            with d.rank_zero_first():
                results["entered"] = True
                raise ValueError("no space")
        except (ValueError, SlurmddpError) as error:
            results["failed"] = f"{type(error).__name__}: {error}"

        return results


def clipped() -> tuple[list[torch.Tensor], float, float]:
    """Return the gradients of a step after clipping, and their norms before and after clipping."""
    with Distributon(seed=0) as d:
        d.launch()
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batch_of(d.rank, 8, d.device)
        d.backward(nn.functional.cross_entropy(model(x), y))
        norm = float(d.clip_gradients(model, 0.01))
        left = float(d.clip_gradients(optimizer, 1e9))
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        return gradients, norm, left


def trained(precision: str) -> dict[str, torch.Tensor]:
    """Return the weights after three steps in a precision."""
    with Distributon(seed=0, precision=precision) as d:
        d.launch()
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        for step in range(3):
            x, y = batch_of(10 * step + d.rank, device=d.device)
            d.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

        return weights(d.unwrap(model))


def left_out_on_one_rank() -> dict[str, Any]:
    """Train two models in fp16, of which one gets infinite gradients on rank 1; return which have changed."""
    with Distributon(seed=0, precision="fp16").launch() as d:
        models = [d.setup_model(nn.Linear(2, 1)) for _ in range(2)]
        optimizers = [d.setup_optimizer(torch.optim.AdamW(model.parameters())) for model in models]
        before = [weights(d.unwrap(model)) for model in models]
        for number, model in enumerate(models):
            factor = math.inf if (d.rank, number) == (1, 0) else 2.0**-6
            d.backward(model(torch.ones(1, 2, device=d.device)).sum() * factor)

        for optimizer in optimizers:
            optimizer.step()
        changed = [
            not torch.equal(old["weight"], weights(d.unwrap(model))["weight"])
            for old, model in zip(before, models, strict=True)
        ]
        assert d._scaler is not None
        return {"scale": d._scaler.state_dict()["scale"], "changed": changed}


def logged_metrics(folder: str) -> None:
    """Log the rank as a metric in a run folder and for loggers."""
    os.environ |= {"SLURMDDP_RUN_DIR": folder, "SLURMDDP_ATTEMPT": "0"}
    with Distributon(2, loggers=["csv"]).launch() as d:
        d.log_metrics({"rank": d.rank}, 1)


def place(environment: str | None = None) -> dict[str, Any]:
    """Return this rank's numbers after `launch`, and its child processes, of which there must be none."""
    with Distributon(environment=environment) as d:
        d.launch()
        children = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
        return {
            "numbers": [d.rank, d.local_rank, d.node_rank, d.world_size, d.local_world_size, d.nodes],
            "children": "".join(children),
            "sum": d.all_reduce(torch.tensor(1.0), "sum").item(),
        }


def second_launch() -> str:
    """Return the error of a second launch beside a first one."""
    with Distributon().launch():
        try:
            Distributon().launch()
        except SlurmddpError as error:
            return error.message

    return ""


def large_means() -> dict[str, bool]:
    """Return, by function and dtype, whether the mean of values is right although their sum is infinite."""
    values = {torch.float16: 4e4, torch.bfloat16: 3e38, torch.float32: 3e38, torch.complex64: 3e38}
    with Distributon() as d:
        d.launch()
        equal = {}
        for dtype, value in values.items():
            tensor = torch.tensor([value, 1.0], dtype=dtype)
            mean = d.all_reduce(tensor)
            equal[f"all_reduce {dtype}"] = mean.dtype == dtype and torch.equal(mean, tensor)
            if dtype == torch.float16:
                averaged = tensor.clone()
                average([averaged, torch.ones(3)])
                equal[f"average {dtype}"] = torch.equal(averaged, tensor)

        return equal
