"""Guard a training against loss spikes and against losses and gradients that are not finite.

`train.on_spike` chooses the reaction. `fail` ends the attempt. `skip` leaves out the update of a step whose
loss or gradient norm is not finite. `rollback` returns to a checkpoint and leaves out the data that followed
it, after such a step and after a loss spike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Literal

import torch
from torch import nn

from slurmddp.errors import SlurmddpError

WINDOW = 128
"""Steps before a loss with which it is compared."""
_FEWEST = 16
"""Losses of the window before which only values that are not finite count as a spike."""
_DEVIATIONS = 8.0
"""Deviations above the median at which a loss is a spike: normally distributed noise never reaches 8."""
_TO_DEVIATION = 1.4826
"""The standard deviation of normally distributed values over their median absolute deviation (MAD)."""
MOST, PERIOD = 10, 1000
"""Skips or rollbacks within so many steps; one more ends the attempt."""


class Spike(SlurmddpError):
    """A step to which the training reacts by going back; raised on all ranks alike."""

    def __init__(self, step: int, problem: str, hint: str) -> None:
        super().__init__(problem, hint=hint)
        self.step = step


class SpikeGuard:
    """The reaction to spikes; its decisions are equal on all ranks.

    Args:
        mode: `train.on_spike`.
        model: the module whose buffers a skipped step restores.
        scales: whether a loss scaler leaves out steps with infinite gradients by itself.
    """

    def __init__(
        self, mode: Literal["fail", "skip", "rollback"], model: nn.Module, *, scales: bool = False
    ) -> None:
        self.mode = mode
        self._model, self._scales = model, scales
        self._buffers: list[torch.Tensor] = []
        """The buffers before the running step."""
        self.recent: deque[float] = deque(maxlen=WINDOW)
        """The last losses, averaged over ranks, without spikes."""
        self.at: list[int] = []
        """The steps of the last skips or rollbacks."""
        self.back_at: int | None = None
        """The step of the checkpoint of the last rollback."""
        self.left_out = 0
        """Steps whose data rollbacks have left out: the data are so many steps ahead."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        own = {"at": self.at, "back_at": self.back_at, "left_out": self.left_out}
        return {"recent": list(self.recent), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; an empty dict starts again."""
        self.recent = deque(state.get("recent", ()), maxlen=WINDOW)
        self.at, self.left_out = list(state.get("at", ())), state.get("left_out", 0)
        self.back_at = state.get("back_at")

    # The step.

    def begin_step(self) -> None:
        """Keep the buffers of the model, if the step may be skipped."""
        if self.mode == "skip":
            self._buffers = [buffer.detach().clone() for buffer in self._model.buffers()]

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss; if it is not finite, its gradient is NaN.

        So the averaged gradient norm shows on all ranks that a rank's loss is not finite, without a further
        message. A finite loss keeps its bits, and so do its gradients.
        """
        if self.mode != "skip":
            return loss
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def skips(self, norm: torch.Tensor) -> bool:
        """Return whether to leave out the update of a step, and restore the buffers then.

        Args:
            norm: of the gradients, averaged over the ranks. It is read, so a GPU is awaited.
        """
        if self.mode != "skip" or math.isfinite(float(norm)):
            return False
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        return True

    # Between steps.

    def problem(self, step: int, loss: float, norm: float) -> str:
        """Return why a step is a spike, as a sentence; empty if it is not one.

        Args:
            step: number of the step.
            loss, norm: loss and gradient norm, averaged over the ranks.
        """
        if not math.isfinite(loss):
            return f"The loss of step {step} is {loss}."
        if not math.isfinite(norm) and not self._scales:
            return f"The gradient norm of step {step} is {norm}."
        if self.mode != "rollback":
            return ""
        limit = spike_limit(list(self.recent))
        if loss > limit:
            return f"The loss of step {step} is {loss:.4g}, a spike above {limit:.4g}."
        self.recent.append(loss)
        return ""

    def spoilt(self, step: int) -> int | None:
        """Return the step of the checkpoint that led to a spike at `step` again, or None.

        Training from it, with other data, has not passed the last spike. So the checkpoint holds the cause,
        for example an optimizer state that is not finite.
        """
        return self.back_at if self.at and step <= self.at[-1] else None

    def record(self, step: int, problem: SlurmddpError) -> str:
        """Count a skip or rollback at `step`; return its number in words.

        Raises:
            SlurmddpError: there were too many.
        """
        self.at = [one for one in self.at if one > step - PERIOD] + [step]
        if len(self.at) <= MOST:
            return f"{self.mode} {len(self.at)} of at most {MOST} within {PERIOD} steps"
        raise SlurmddpError(
            f"{problem.message} This would be {self.mode} {len(self.at)} within {PERIOD} steps.",
            hint=problem.hint,
        ) from problem


def spike_limit(losses: list[float]) -> float:
    """Return the loss above which the next one is a spike: median + 8 * max(1.4826 * MAD, |median| / 10).

    Args:
        losses: of the last steps. With few of them the limit is infinite.
    """
    if len(losses) < _FEWEST:
        return math.inf
    median = statistics.median(losses)
    deviation = _TO_DEVIATION * statistics.median(abs(loss - median) for loss in losses)
    return median + _DEVIATIONS * max(deviation, abs(median) / 10)
