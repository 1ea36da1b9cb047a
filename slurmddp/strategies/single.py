"""Train in one process, without wrapping the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed, nn

from slurmddp.errors import MismatchError


class Single:
    """Train in one process; raise MismatchError on several ranks, whose replicas would drift apart."""

    name = "single"

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            raise MismatchError(
                f"Strategy {self.name!r} was chosen, but {distributed.get_world_size()} ranks are running.",
                hint="Use strategy=ddp, or start one rank.",
            )

        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model
