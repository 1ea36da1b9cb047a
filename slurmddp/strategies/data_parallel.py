"""Use several GPUs in one process, by torch's DataParallel, for comparison.

It copies the model to every GPU and gathers the outputs in each step, under one interpreter lock. torch
advises DistributedDataParallel even on one machine.
"""

from __future__ import annotations

import torch
from torch import nn

from slurmddp.strategies.single import Single


class DataParallel(Single):
    """Split each batch over the visible GPUs of one process; with one GPU or none, the bare model."""

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
