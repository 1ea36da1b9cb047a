"""What the ranks of the tests run: small trainings on the public API, each returning plain values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.checkpoint import views
from slurmddp.errors import SlurmddpError, StoppedAtCheckpoint
from slurmddp.runs.folder import RunFolder
from slurmddp.strategies import build
from slurmddp.strategies.ddp import fix_bucket_layout
from slurmddp.training import trainer, worker
from slurmddp.training.distributon import Distributon
from slurmddp.training.evaluate import evaluate
from slurmddp.training.parts import build_parts


class Net(nn.Module):
    """Deep enough that DDP has something to repack, with dropout and a buffer."""

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


def batch_of(seed: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


# Strategies.


def replicas_after_each_step(synchronise: bool) -> list[dict[str, torch.Tensor]]:
    """Train on different data from different first weights; return this rank's weights after every step."""
    with Distributon() as d:
        d.launch()
        torch.manual_seed(d.rank)
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        history = [weights(d.unwrap(model))]
        for step in range(4):
            with d.accumulating(model, last=synchronise):
                step_on(model, optimizer, *batch_of(100 * step + d.rank))
            history.append(weights(d.unwrap(model)))
        return history


def mean_gradient(size: int) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank's part of a batch of 8, averaged over the ranks by the strategy."""
    with Distributon(seed=5) as d:
        d.launch()
        model = d.setup_model(Net())
        x, y = batch_of(1, 8)
        own = slice(d.rank * size, (d.rank + 1) * size)
        d.backward(nn.functional.cross_entropy(model(x[own]), y[own]))
        return {name: p.grad.clone() for name, p in d.unwrap(model).named_parameters() if p.grad is not None}


def resumed_with_stock_ddp(fixed: bool) -> bool:
    """Return whether a run that resumes at step 3 ends with the weights of the undisturbed one."""
    with Distributon() as d:
        d.launch()

        def start() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            net = Net(width=96)
            wrapped = nn.parallel.DistributedDataParallel(net)
            if fixed:
                fix_bucket_layout(wrapped)
            return net, wrapped, torch.optim.AdamW(net.parameters(), lr=0.01)

        net, wrapped, optimizer = start()
        for step in range(8):
            if step == 3:
                again, again_wrapped, again_optimizer = start()
                again.load_state_dict(weights(net))
                again_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            step_on(wrapped, optimizer, *batch_of(100 * step + d.rank))
        for step in range(3, 8):
            step_on(again_wrapped, again_optimizer, *batch_of(100 * step + d.rank))
        return all(
            torch.equal(a, b) for a, b in zip(weights(net).values(), weights(again).values(), strict=True)
        )


def layout_leaves_no_trace() -> dict[str, bool]:
    with Distributon() as d:
        d.launch()
        torch.manual_seed(d.rank)
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
        calls: list[int] = []
        net.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            for value in net.state_dict().values():
                torch.distributed.broadcast(value, 0)
        before, random = weights(net), torch.get_rng_state()
        model = build("ddp").wrap(net, d._here)
        after = weights(net)
        return {
            "weights and buffers": all(torch.equal(before[name], after[name]) for name in before),
            "random": torch.equal(random, torch.get_rng_state()),
            "gradients": all(p.grad is None for p in net.parameters()),
            "hooks": not calls,
            "model": build("ddp").unwrap(model) is net,
        }


def exchanges(steps: int, parts: int) -> int:
    """Return how many times gradients were exchanged in `steps` steps of `parts` backward passes."""
    with Distributon(seed=0) as d:
        d.launch()
        model = d.setup_model(Net())
        counted: list[int] = []

        def hook(state, bucket):
            counted.append(1)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, hook)  # type: ignore[operator]
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(steps):
            for part in range(parts):
                with d.accumulating(model, last=part == parts - 1):
                    x, y = batch_of(part)
                    d.backward(nn.functional.cross_entropy(model(x), y), parts=parts)
            optimizer.step()
            optimizer.zero_grad()
        return len(counted)


def error_of_single_strategy() -> str:
    d = Distributon(strategy="single").launch()
    try:
        d.setup_model(Net())
    except SlurmddpError as error:
        return str(error)
    return ""


# The API.


def samples_seen(
    count: int, batch_size: int, drop_last: bool, even: bool, epochs: int
) -> list[list[list[int]]]:
    """Return the samples of each batch of each epoch on this rank."""
    with Distributon(seed=3) as d:
        d.launch()
        data = TensorDataset(torch.arange(count))
        loader = d.setup_dataloader(
            DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=drop_last), even=even
        )
        seen = [[batch[0].tolist() for batch in loader] for _ in range(epochs)]
        assert len(seen[0]) == len(loader)
        return seen


def train_and_save(root: str, steps: int, dropout: float, resume: bool) -> dict[str, Any]:
    """Train to `steps` with save at the end; return weights, folder and a note."""
    with Distributon(seed=1) as d:
        d.launch()
        model = d.setup_model(Net(dropout=dropout))
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        x, y = batch_of(0, 50)
        loader = d.setup_dataloader(DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
        progress = {"note": "fresh"}
        objects = {"model": model, "optimizer": optimizer, "progress": progress}
        step = (d.load(root, **objects) if resume else None) or 0
        while step < steps:
            for inputs, targets in loader:
                d.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == steps:
                    break
        note, progress["note"] = progress["note"], f"saved at {step}"
        folder = d.save(root, step, **objects)
        state = weights(d.unwrap(model))
        return {
            "weights": state,
            "folder": folder,
            "note": note,
        }


def errors_of_save_and_load(root: str) -> dict[str, str]:
    """Return what each rank hears when something is wrong on rank 0, or on another one."""
    found: dict[str, str] = {}
    with Distributon(seed=1) as d:
        d.launch()
        model = d.setup_model(Net())
        Path(root, f"file-{d.rank}").write_text("in the way")
        attempts = {
            "no folder": lambda: d.save(Path(root, "file-0"), 1, model=model),
            "no state": lambda: d.save(Path(root, "a"), 1, model=3),
            "not saved": lambda: d.load(Path(root, "b"), model=model, optimiser={}),
            "other model": lambda: d.load(Path(root, "b"), model=Net(width=5)),
            "one rank": lambda: d.load(Path(root, "b"), model=model if d.rank == 0 else Net(width=5)),
        }
        d.save(Path(root, "b"), 1, model=model, optimizer={"lr": 1})
        for name, attempt in attempts.items():
            try:
                attempt()
            except SlurmddpError as error:
                found[name] = f"{type(error).__name__}: {error}"
        found["none"] = str(d.load(Path(root, "c"), model=model))
    return found


def own_draws() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as it was built, and a draw after the model was set up."""
    with Distributon(seed=7) as d:
        d.launch()
        net = Net()
        built = net.first.weight.clone().detach()
        d.setup_model(net)
        return built, torch.rand(4)


def means() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of values over ranks, taken together and one by one."""
    with Distributon() as d:
        d.launch()
        values = torch.randn(37, generator=torch.Generator().manual_seed(d.rank))
        return d.all_reduce_mean(values), torch.stack([d.all_reduce_mean(value) for value in values])


# The trainer.


class StopsAfter(Distributon):
    """Is told to stop, on all ranks, before the n-th step that it would take."""

    def __init__(self, after: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._left = after

    def should_stop(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0

    @property
    def stop_reason(self) -> str | None:
        return "SIGTERM on rank 0 (here)"


def train_once(config: dict[str, Any], folder: str, stop_after: int | None) -> str:
    """Run the default program, perhaps with a stop; return how it ended."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            with StopsAfter(stop_after, seed=config["seed"]) as d:
                d.launch()
                trainer.train(d, config, RunFolder(folder))
        except StoppedAtCheckpoint as stopped:
            return str(stopped)
    return "finished"


def error_of_training(config: dict[str, Any], folder: str) -> str:
    try:
        train_once(config, folder, None)
    except SlurmddpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Drawing(torch.utils.data.Dataset[Any]):
    """Samples whose reading draws a random number, as augmentation does."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        torch.rand(())
        return self._data[index]


def heldout_loss(config: dict[str, Any]) -> tuple[float | None, bool]:
    """Return the held-out loss of a fresh model, and whether evaluating left random states as they were."""
    with Distributon(seed=0) as d:
        d.launch()
        parts = build_parts(d, config)
        parts = dataclasses.replace(parts, heldout=Drawing(parts.heldout))
        before = torch.get_rng_state()
        loss = evaluate(d, parts)
        return loss, torch.equal(before, torch.get_rng_state()) and parts.bare_model.training


def train_until_signalled(config: dict[str, Any], folder: str, at_step: int) -> int:
    """Let rank 1 get a SIGTERM of its own in step `at_step`; return the worker's exit code."""
    run = RunFolder(folder)
    os.environ["SLURMDDP_ATTEMPT"] = "0"
    if os.environ["RANK"] == "1":
        SignalText.at = at_step * config["train"]["batch_size"]
    return worker.main(str(run.path))


class SignalText(torch.utils.data.Dataset[Any]):
    """Random classes that ask their own process to stop when a certain number of samples has been read."""

    at: int | None = None
    _read = 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        type(self)._read += 1
        if type(self)._read == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch_of(index, 1)
        return x[0], y[0]


# The worker.


def work(folder: str) -> tuple[int, str]:
    """Run a worker; return its exit code and what it wrote."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
        code = worker.main(folder)
    return code, errors.getvalue()


def program_that_notes(
    distributon: Distributon, config: dict[str, Any], folder: RunFolder, **options: Any
) -> None:
    distributon.print(f"seed {config['seed']} in {folder.name} with {options} on {distributon.world_size}")


def program_that_fails(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    raise ZeroDivisionError("all of it")


def program_that_is_told_to_stop(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    while not distributon.should_stop():
        time.sleep(0.01)
    raise StoppedAtCheckpoint("Enough.", hint="Again.")


# Checkpoints that do not belong here, or are not seen.


def _said_by(attempt: Any) -> str:
    try:
        attempt()
    except SlurmddpError as error:
        return str(error)
    return ""


def load_that_one_rank_refuses(root: str) -> dict[str, Any]:
    """Return what each rank hears when only rank 1 has another model, and whether its model is as before."""
    with Distributon(seed=1) as d:
        d.launch()
        d.save(root, 1, model=d.setup_model(Net()))
        torch.manual_seed(5)
        model = Net() if d.rank == 0 else Net(width=5)
        before = weights(model)
        said = _said_by(lambda: d.load(root, model=model))
        after = weights(model)
        return {"said": said, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def load_from_an_own_folder(root: str) -> str:
    """Return what each rank hears when each looks into a folder of its own and only rank 0's is filled."""
    views.WAITS_S = (0.01, 0.02)
    with Distributon(seed=1) as d:
        d.launch()
        d.save(Path(root, "0"), 1, progress={})
        return _said_by(lambda: d.load(Path(root, str(d.rank)), progress={}))


def save_onto_a_file(root: str) -> str:
    with Distributon(seed=1) as d:
        d.launch()
        Path(root, "file").touch()
        return _said_by(lambda: d.test_save(Path(root, "file"), progress={}))
