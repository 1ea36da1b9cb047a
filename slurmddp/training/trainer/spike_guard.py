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
"""Number of previous losses with which a loss is compared."""
_MIN_LOSSES = 16
"""With fewer losses in the window, only a value that is not finite counts as a spike."""
_DEVIATIONS = 8.0
"""Deviations above the median at which a loss is a spike: normally distributed noise never reaches 8."""
_MAD_TO_DEVIATION = 1.4826
"""The ratio of standard deviation to median absolute deviation (MAD) of normally distributed values."""
PERIOD = 1000
MAX_REACTIONS = 10
"""How many skips or rollbacks are allowed within `PERIOD` steps; one more ends the attempt."""


class Spike(SlurmddpError):
    """Error after which the training returns to an older checkpoint; raised on all ranks at the same step."""

    def __init__(self, step: int, problem: str, hint: str) -> None:
        super().__init__(problem, hint=hint)
        self.step = step


class SpikeGuard:
    """Decides which loss is a spike, and how the training reacts; equal on all ranks.

    Args:
        mode: `train.on_spike`.
        model: the module. If a step is skipped, its buffers are restored.
        scales: whether a loss scaler (fp16) skips steps whose gradients are not finite.
    """

    def __init__(
        self, mode: Literal["fail", "skip", "rollback"], model: nn.Module, *, scales: bool = False
    ) -> None:
        self.mode = mode
        self._model = model
        self._scales = scales
        self._buffers: list[torch.Tensor] = []
        """The buffers before the running step."""

        self.recent: deque[float] = deque(maxlen=WINDOW)
        """The last losses, averaged over ranks, without spikes."""
        self.reaction_steps: list[int] = []
        """The steps of the last skips or rollbacks."""
        self.rollback_step: int | None = None
        """The step of the checkpoint that the last rollback loaded."""
        self.left_out = 0
        """Number of steps whose data the rollbacks have left out. The position in the data is that many steps
        ahead of the step number."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guard as plain values."""
        return {
            "recent": list(self.recent),
            "at": self.reaction_steps,
            "back_at": self.rollback_step,
            "left_out": self.left_out,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; an empty dict resets the guard."""
        self.recent = deque(state.get("recent", ()), maxlen=WINDOW)
        self.reaction_steps = list(state.get("at", ()))
        self.rollback_step = state.get("back_at")
        self.left_out = state.get("left_out", 0)

    # Methods that are called during a step.

    def begin_step(self) -> None:
        """Keep a copy of the model's buffers, which `skips` restores; only in the mode "skip"."""
        if self.mode == "skip":
            self._buffers = [buffer.detach().clone() for buffer in self._model.buffers()]

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, with a gradient of NaN if it is not finite; only in the mode "skip".

        The averaged gradients, and so their norm, are then NaN on all ranks. So all ranks skip the step,
        without a further message between them. A finite loss and its gradients stay the same to the bit.
        """
        if self.mode != "skip":
            return loss

        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def skips(self, norm: torch.Tensor) -> bool:
        """Decide whether to skip the update of a step: in the mode "skip", if the norm is not finite.

        If so, restore the buffers of the model.

        Args:
            norm: the norm of the gradients, averaged over the ranks. Reading it waits for a GPU.
        """
        if self.mode != "skip" or math.isfinite(float(norm)):
            return False

        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)

        return True

    # Methods that are called between steps.

    def problem(self, step: int, loss: float, norm: float) -> str:
        """Return what is wrong with a step, as a sentence: not finite, or a spike; empty if nothing is.

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

    def spoilt_checkpoint(self, step: int) -> int | None:
        """Return the step of the checkpoint that the last rollback loaded, if it holds the cause of spikes.

        This is so if the new spike at `step` is not after the last spike, although training has used other
        data since. The cause may be an optimizer state that is not finite. Otherwise return None.
        """
        if self.reaction_steps and step <= self.reaction_steps[-1]:
            return self.rollback_step
        return None

    def record(self, step: int, problem: SlurmddpError) -> str:
        """Count a skip or rollback at `step`; return a text such as "skip 1 of at most 10 within 1000 steps".

        Raises:
            SlurmddpError: there were too many skips or rollbacks.
        """
        recent = [reaction for reaction in self.reaction_steps if reaction > step - PERIOD]
        self.reaction_steps = [*recent, step]
        count = len(self.reaction_steps)
        if count <= MAX_REACTIONS:
            return f"{self.mode} {count} of at most {MAX_REACTIONS} within {PERIOD} steps"

        raise SlurmddpError(
            f"{problem.message} This would be {self.mode} {count} within {PERIOD} steps.",
            hint=problem.hint,
        ) from problem


def spike_limit(losses: list[float]) -> float:
    """Return the loss above which the next loss is a spike: median + 8 * max(1.4826 * MAD, |median| / 10).

    MAD is the median absolute deviation from the median.

    Args:
        losses: the losses of the last steps. If there are fewer than 16, the limit is infinite.
    """
    if len(losses) < _MIN_LOSSES:
        return math.inf

    median = statistics.median(losses)
    deviation = _MAD_TO_DEVIATION * statistics.median(abs(loss - median) for loss in losses)
    return median + _DEVIATIONS * max(deviation, abs(median) / 10)
