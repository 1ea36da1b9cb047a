"""Train in one process: the bare model, or torch's DataParallel over several GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed, nn

from slurmddp.errors import MismatchError


class Single:
    """Strategy for one process, which uses the bare model.

    `wrap` raises MismatchError on several ranks, whose replicas would differ.
    """

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


class DataParallel(Single):
    """Strategy that splits each batch over the GPUs of one process; on one GPU it uses the bare model.

    In each step torch's DataParallel copies the model to every GPU and gathers the outputs, in one process.
    torch recommends DistributedDataParallel even on one machine. So this strategy only serves comparisons of
    speed.
    """

    name = "data_parallel"

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        model = super().wrap(model, device)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            return nn.DataParallel(model)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, nn.DataParallel):
            unwrapped: nn.Module = model.module
            return unwrapped
        return model
