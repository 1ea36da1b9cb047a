"""Undoes a part of an optimizer step: ranks that stop between its batches save what was there before it.

Until the optimizer moves, a step has changed gradients, random states, buffers (the running means of batch
normalisation) and the place in the data. With these as they were, the resumed run takes the whole step as an
undisturbed one would have. What a model keeps elsewhere, in plain attributes, is not undone.
"""

from __future__ import annotations

import torch

from slurmddp.training import rng
from slurmddp.training.parts import Parts


class StepStart:
    """What a step changes before the optimizer moves, gradients aside, as it is when this is made."""

    def __init__(self, parts: Parts) -> None:
        self._loader, self._place = parts.loader, parts.loader.mark()
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in parts.bare_model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._randomness = rng.capture()

    def restore(self) -> None:
        """Put all of it back; an iterator over the loader is of no use any more."""
        self._loader.go_back(self._place)
        with torch.no_grad():
            for module, name, buffer, before in self._buffers:
                buffer.copy_(before)
                setattr(module, name, buffer)  # The step may have put another tensor in its place.
        rng.restore(self._randomness)
