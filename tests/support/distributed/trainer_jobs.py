"""Rank programs of the trainer's tests: the default program, stopped on request, or a part of it."""

from __future__ import annotations

import contextlib
import io
import os
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from slurmddp.collectives import values as collectives
from slurmddp.errors import SlurmddpError, StoppedAtCheckpoint
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.training.distributon import Distributon
from slurmddp.training.stopping.agreement import StopReason
from slurmddp.training.stopping.stop_controller import StopController
from slurmddp.training.trainer import loop, time_budget
from slurmddp.training.trainer.components import build_components
from slurmddp.training.trainer.evaluate import evaluate


class Signalled(StopController):
    reason = None  # type: ignore[assignment]


class StopsAfter(Distributon):
    """Stops on all ranks before the step `after` + 1 of this process."""

    def __init__(self, after: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._session.stop = Signalled(None, self._session.run)
        self._left = after

    def should_stop(self) -> bool:
        if self._left is None:
            return False

        self._left -= 1
        if self._left < 0:
            reason = StopReason("SIGTERM", "SIGTERM on rank 0 (here)", 0)
            self._session.stop.reason = reason  # type: ignore[misc]

        return self._left < 0


class Recorder:
    """A callback that writes down each call, and counts them in its state."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.calls = 0

    def _note(self, hook: str, training: Any, value: str = "") -> None:
        self.calls += 1
        with open(f"{self._path}-{training.distributon.rank}", "a") as file:
            file.write(f"{self.calls} {hook} {training.step}{value}\n")

    def on_train_start(self, training: Any) -> None:
        self._note("start", training)

    def on_step_end(self, training: Any) -> None:
        self._note("step", training)

    def on_evaluation_end(self, training: Any, metrics: Any) -> None:
        self._note("evaluation", training, f" {', '.join(metrics)}")

    def on_save(self, training: Any) -> None:
        self._note("save", training)

    def on_train_end(self, training: Any) -> None:
        self._note("end", training)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class TenSecondSteps:
    """A callback that advances the clock of the time budget: by 10 s on rank 0, by 20 s on rank 1."""

    def __init__(self) -> None:
        self._now = 0.0
        time_budget.time = SimpleNamespace(monotonic=lambda: self._now)  # type: ignore[assignment]

    def on_step_end(self, training: Any) -> None:
        self._now += 10.0 * (1 + training.distributon.rank)


class Score:
    """A metric with given values: one for each evaluation, of which there is one every two steps."""

    step: ClassVar[int] = 0

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def __call__(self, outputs: Any, targets: Any) -> float:
        return self._values[Score.step // 2]


class Spoil:
    """A callback that once puts NaN into the optimizer's state, so that the next checkpoint contains it."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._is_done = False

    def on_step_end(self, training: Any) -> None:
        if training.step == self._step and not self._is_done:
            self._is_done = True
            optimizer = training.components.optimizer
            next(iter(optimizer.state.values()))["exp_avg"].fill_(torch.nan)


class ScoreStep:
    """A callback that passes the step to `Score`."""

    def on_train_start(self, training: Any) -> None:
        Score.step = training.step

    def on_step_end(self, training: Any) -> None:
        Score.step = training.step


def train_once(config: dict[str, Any], folder: str, stop_after: int | None) -> str:
    """Run the default program, perhaps with a stop; return how it ended."""
    output = io.StringIO()
    os.environ.update({"SLURMDDP_RUN_DIR": folder, "SLURMDDP_ATTEMPT": "0"})
    with contextlib.redirect_stdout(output):
        try:
            with StopsAfter(stop_after, seed=config["seed"]) as d:
                d.launch()
                loop.train(d, config, RunFolder(folder))
        except StoppedAtCheckpoint as stopped:
            return str(stopped)

    return "finished"


def error_of_training(config: dict[str, Any], folder: str) -> str:
    try:
        train_once(config, folder, None)
    except SlurmddpError as error:
        return f"{type(error).__name__}: {error}"

    return ""


def heldout_means_of_drifted(config: dict[str, Any]) -> dict[str, float] | None:
    """Return the held-out loss and metrics if the running averages differ between ranks."""
    with Distributon(seed=0) as d:
        d.launch()
        parts = build_components(d, config)
        for buffer in parts.bare_model.buffers():
            buffer += d.rank
        return evaluate(d, parts)


def shared_buffer() -> list[list[float]]:
    """Return a buffer that is a transposed view, after all ranks have received rank 0's buffer."""
    with Distributon() as d:
        d.launch()
        model = torch.nn.Module()
        model.register_buffer("turned", (torch.arange(6.0).reshape(2, 3) + d.rank).t())
        collectives.share(model.buffers())
        return model.turned.tolist()
