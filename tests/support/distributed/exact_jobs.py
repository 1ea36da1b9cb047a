"""Rank programs of test_exact_resume: a training that draws from all generators and ends at a given step."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import random
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset

from slurmddp.errors import StoppedAtCheckpoint
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.strategies import build
from slurmddp.training.distributon import Distributon
from slurmddp.training.instantiate import instantiate, locate
from slurmddp.training.run_log import RunLog
from support.distributed.rank_jobs import batch_of


@dataclass(frozen=True)
class Halt:
    """The end of an attempt; `step` counts the optimizer steps of the whole training."""

    how: str
    """told: a stop between two steps; evaluation: only one rank sees the stop, during an evaluation;
    signal: SIGTERM to one rank; killed: nothing is saved after it."""
    step: int
    part: int = 0
    """The backward pass of the step, or the batch of the evaluation, in which the halt happens."""

    def __str__(self) -> str:
        return f"{self.how} {self.step}" + f".{self.part}" * (self.how != "told")


class Killed(Exception):
    """Exception that imitates the death of the process: nothing after it runs."""


class Halting(Distributon):
    """Distributon that causes a halt in its training, to which the API then reacts."""

    def __init__(self, halt: Halt | None, **options: Any) -> None:
        super().__init__(**options)
        self._halt = halt or Halt("never", 0)
        self._steps = self._passes = self._batches = 0
        """Steps of the whole training; backward passes, and evaluated batches, since the last of them."""

    def load(self, *args: Any, **options: Any) -> int | None:
        step = super().load(*args, **options)
        self._steps = step or 0
        return step

    def should_stop(self) -> bool:
        is_due = self._halt.how == "told" and self._steps >= self._halt.step
        return super().should_stop() or is_due

    def backward(self, loss: torch.Tensor, *, accumulate: int = 1) -> None:
        if (self._steps, self._passes) == (self._halt.step, self._halt.part):
            if self._halt.how == "killed":
                raise Killed
            if self._halt.how == "signal":
                self._be_signalled()

        super().backward(loss, accumulate=accumulate)
        self._passes = (self._passes + 1) % accumulate
        self._batches = 0
        self._steps += self._passes == 0

    def _be_signalled(self) -> None:
        """Send SIGTERM, and wait until all ranks know of it.

        A step is shorter than the time between two polls.
        """
        if self._is_last:
            os.kill(os.getpid(), signal.SIGTERM)
        while not super().stop_requested:
            time.sleep(0.001)

    @property
    def stop_requested(self) -> bool:
        is_at_halt = (self._steps, self._batches) == (self._halt.step, self._halt.part)
        self._batches += 1
        is_due = self._halt.how == "evaluation" and self._is_last and is_at_halt
        return is_due or super().stop_requested

    @property
    def _is_last(self) -> bool:
        return self.rank == self.world_size - 1


def attempt(config: dict[str, Any], folder: str, number: int, halt: Halt | None) -> str:
    """Run the program of `config` as attempt `number`; return how it ended."""
    os.environ["SLURMDDP_ATTEMPT"] = str(number)
    program = locate(config["program"]["_target_"], key="program._target_")
    strategy = build(**config["strategy"])

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            halting = Halting(
                halt, seed=config["seed"], strategy=strategy, precision=config.get("precision", "32")
            )
            with halting as d:
                program(d.launch(), config, RunFolder(folder))
        except StoppedAtCheckpoint as stopped:
            return str(stopped)
        except Killed:
            return "killed"

    return "finished"


class Blurred(Dataset[Any]):
    """Data set of samples (index, six numbers of a class), with noise that is drawn from three generators."""

    def __init__(self, size: int, heldout: int = 10, bad: int | None = None) -> None:
        self._size = size
        self._heldout = heldout
        self._bad = bad

    def __len__(self) -> int:
        return self._size

    def heldout(self) -> Dataset[Any]:
        return Blurred(self._heldout)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch_of(index, 1)
        noise = torch.randn(6) + random.random() + float(np.random.rand())
        if index == self._bad:
            noise[0] = float("nan")
        return torch.cat([torch.tensor([float(index)]), x[0] + 0.3 * noise]), y[0]


class Noisy(nn.Module):
    """Model that is so wide that gradients are summed in parts; it adds noise drawn from three generators.

    With `notes` it writes the samples on which it is trained to a file, for each rank.
    """

    def __init__(
        self, width: int = 64, dropout: float = 0.2, norm: bool = True, notes: str | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, 3)
        self._noisy = dropout > 0
        self._notes = Path(notes) if notes else None

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        if self.training and self._notes is not None:
            with (self._notes / f"rank-{os.environ['RANK']}").open("a") as file:
                file.write(" ".join(str(int(index)) for index in samples[:, 0]) + "\n")

        x = self.norm(torch.tanh(self.first(samples[:, 1:])))
        for layer in self.hidden:
            scale = 1 + random.random() + float(np.random.rand()) if self._noisy else 1
            x = x + self.drop(torch.tanh(layer(x))) * scale

        logits: torch.Tensor = self.last(x)
        return logits


class Drift:
    """A callback whose state changes the weights in each step."""

    def __init__(self) -> None:
        self.steps = 0
        self.lowest = 10.0

    def on_step_end(self, training: Any) -> None:
        self.steps += 1
        with torch.no_grad():
            training.components.bare_model.last.bias += 1e-3 * self.steps * self.lowest

    def on_evaluation_end(self, training: Any, metrics: Any) -> None:
        self.lowest = min(self.lowest, metrics["eval_loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "lowest": self.lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.lowest = state["lowest"]


class Best:
    """A user's object: the lowest loss so far, and its step."""

    def __init__(self) -> None:
        self.loss = float("inf")
        self.seen = []

    def look(self, step: int, loss: float) -> None:
        if loss < self.loss:
            self.loss = loss
            self.seen.append((step, loss))

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]
        self.seen = state["seen"]


LEFT_OUT = 6
"""The step that an `OwnLoop` in fp16 leaves out."""


class OwnLoop:
    """A user's loop on the API: two schedulers, averaged weights, a gradient scaler, a user's object."""

    def __init__(self, d: Distributon, config: dict[str, Any]) -> None:
        batch_size = config["train"]["batch_size"]
        workers = config["train"]["workers"]
        data = instantiate(config["data"], _key_="data")
        loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=workers)
        self.loader = d.setup_dataloader(loader)
        self.model = d.setup_model(Noisy())
        self.average = swa_utils.AveragedModel(
            d.unwrap(self.model), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.optimizer = d.setup_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        self.falling = lr_scheduler.SequentialLR(
            self.optimizer,
            [
                lr_scheduler.LinearLR(self.optimizer, 0.2, 1, 3),
                lr_scheduler.ExponentialLR(self.optimizer, 0.9),
            ],
            [3],
        )
        self.plateau = lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.fp16 = config.get("precision") == "fp16"
        self.best = Best()
        self.d = d

    @property
    def objects(self) -> dict[str, Any]:
        names = ("model", "average", "optimizer", "falling", "plateau", "scaler", "best")
        return {name: getattr(self, name) for name in names}

    def step_scaled(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take a step with the user's scaler."""
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.d.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def step_in_fp16(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take a step of two backward passes; in step LEFT_OUT the gradients of one rank are infinite."""
        for last in (False, True):
            with self.d.accumulating(self.model, last=last):
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                spike = 1e30 if step == LEFT_OUT and not last and self.d.rank == 0 else 1.0
                self.d.backward(loss * spike, accumulate=2)

        before = copy.deepcopy(self.d.unwrap(self.model).state_dict())
        self.d.clip_gradients(self.model, max_norm=1.0)
        self.optimizer.step()
        after = self.d.unwrap(self.model).named_parameters()
        unchanged = all(torch.equal(before[name], value) for name, value in after)
        assert unchanged or step != LEFT_OUT
        return loss

    def take_step(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        loss = self.step_in_fp16(step, inputs, targets) if self.fp16 else self.step_scaled(inputs, targets)
        self.optimizer.zero_grad()
        self.average.update_parameters(self.d.unwrap(self.model))
        mean = float(self.d.all_reduce(loss.detach()))
        self.best.look(step, mean)
        self.falling.step()
        self.plateau.step(mean)
        return {"loss": mean, "lr": self.optimizer.param_groups[0]["lr"], "rate": self.scaler.get_scale()}


def own_loop(d: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    """Train to `train.steps` with an `OwnLoop`."""
    training = OwnLoop(d, config)
    train = config["train"]
    journal = RunLog(RunContext.read(os.environ, folder), active=d.is_global_zero)
    step = d.load(training.objects, root=folder.checkpoints_dir) or 0
    stopped = False

    while step < train["steps"] and not stopped:
        for inputs, targets in training.loader:
            step += 1
            journal.step(step, **training.take_step(step, inputs, targets))
            stopped = d.should_stop()
            if stopped or step == train["steps"]:
                break

            if train["save_every"] and step % train["save_every"] == 0:
                d.save(step, training.objects, root=folder.checkpoints_dir)

    d.save(step, training.objects, root=folder.checkpoints_dir)
    if step < train["steps"]:
        raise StoppedAtCheckpoint(f"Stopped at step {step} of {train['steps']}.", hint="")


def script_that_stops_after(arguments: list[str], steps: int | None) -> int:
    """Run a script that calls `should_stop` after each of its steps; return its exit code."""
    counted = itertools.count(1)
    Distributon.should_stop = lambda self: next(counted) == steps  # type: ignore[method-assign]
    sys.argv = arguments

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as exit:
            return int(str(exit.code))

    return 0
