"""Compressed or rarer exchange of gradients under DistributedDataParallel: torch's communication hooks.

A hook with a state of its own gives it to the strategy, so that a resumed run computes the same numbers.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurmddp.checkpoint.state import compatibility
from slurmddp.strategies.replicas import average, collective_timeout

State = dict[str, Any]


class CommHook:
    """The exchange of one model's gradients; without a state, and complete before an optimizer's step."""

    def follow(self, optimizer: Optimizer) -> None:
        """Take part in the steps of an optimizer."""

    def state_dict(self) -> State:
        """Return this rank's state."""
        return {}

    def check_state_dict(self, state: State) -> None:
        """Raise CheckpointError if `load_state_dict` can't restore a state."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state of this rank, after models and optimizers have got theirs."""


@functools.wraps(default_hooks.fp16_compress_hook)
def _bf16(state: Any, bucket: Any) -> Any:
    """Call torch's hook, which torch refuses by its name on CPUs although gloo can sum bfloat16."""
    return default_hooks.bf16_compress_hook(state, bucket)


class Compressed(CommHook):
    """Send gradients as float16 or bfloat16, and store the mean as float32 again."""

    def __init__(self, model: DistributedDataParallel, name: str) -> None:
        hooks: dict[str, Callable[..., Any]] = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16}
        model.register_comm_hook(None, hooks[name])


class PowerSgd(CommHook):
    """Send gradient matrices as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

    Each rank keeps the error of its compression and adds it to its next gradient.
    """

    def __init__(self, model: DistributedDataParallel, rank: int, start_step: int) -> None:
        self._state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )
        self._device = next(model.parameters()).device
        model.register_comm_hook(
            self._state, _in_order if self._device.type == "cpu" else powerSGD_hook.powerSGD_hook
        )

    def state_dict(self) -> State:
        kept, random = self._state, self._state.rng.get_state(legacy=False)
        return {
            "step": kept.iter,
            "random": [torch.from_numpy(random["state"]["key"].astype(np.int64)), random["state"]["pos"]],
            "errors": dict(kept.error_dict),
            "p": dict(kept.p_memory_dict),
            "q": dict(kept.q_memory_dict),
        }

    def load_state_dict(self, state: State) -> None:
        words, position = state["random"]
        self._state.iter = state["step"]
        self._state.rng.set_state(("MT19937", words.numpy().astype(np.uint32), position, 0, 0.0))
        self._state.error_dict = self._own(state["errors"])
        self._state.p_memory_dict = self._own(state["p"])
        self._state.q_memory_dict = self._own(state["q"])

    def _own(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Copy tensors, which the hook changes in place."""
        return {bucket: tensor.to(self._device, copy=True) for bucket, tensor in tensors.items()}


@functools.wraps(powerSGD_hook.powerSGD_hook)
def _in_order(state: Any, bucket: Any) -> Any:
    """Wait for each bucket: gloo's threads would start the messages of several buckets in any order."""
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


class PostLocalSgd(CommHook):
    """Average gradients within groups of ranks, and weights over all ranks now and then.

    Before `start_step` gradients are averaged over all ranks (Lin et al. 2018, arXiv:1808.07217). Afterwards
    the replicas differ, so each rank's weights and optimizer belong to its state.
    """

    def __init__(
        self, model: DistributedDataParallel, start_step: int, period: int, group_ranks: int | None
    ) -> None:
        self._model, self._optimizers = model.module, list[Optimizer]()
        self._state = PostLocalSGDState(None, _own_group(group_ranks), start_step)  # type: ignore[no-untyped-call]
        self._steps, self._start_step, self._period = 0, start_step, period
        model.register_comm_hook(self._state, post_localSGD_hook)

    def follow(self, optimizer: Optimizer) -> None:
        self._optimizers.append(optimizer)
        optimizer.register_step_post_hook(lambda *_: self._average())

    def _average(self) -> None:
        past = self._steps - self._start_step
        if past >= 0 and past % self._period == 0:
            with torch.no_grad():  # Parameters without a gradient too: ranks may leave out different steps.
                average([one for one in self._model.parameters() if one.requires_grad])
        self._steps += 1

    def state_dict(self) -> State:
        state: State = {"step": self._state.iter, "steps": self._steps}
        if self._steps > self._start_step:
            state["model"] = self._model.state_dict()
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
        return state

    def check_state_dict(self, state: State) -> None:
        if "model" in state:
            if (saved := len(state["optimizers"])) != (here := len(self._optimizers)):
                problem = f"{saved} optimizers trained it, and {here} were set up before load"
                raise compatibility.misfit("replica of a model", self._model, problem)
            compatibility.check("replica of a model", self._model, state["model"])
            for optimizer, one in zip(self._optimizers, state["optimizers"], strict=True):
                compatibility.check("optimizer of a replica", optimizer, one)

    def load_state_dict(self, state: State) -> None:
        self._state.iter, self._steps = state["step"], state["steps"]
        if "model" in state:
            self._model.load_state_dict(state["model"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)


def _own_group(group_ranks: int | None) -> distributed.ProcessGroup:
    """Return the group of this rank: blocks of `group_ranks` ranks; None: the ranks of each node."""
    names: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(names, socket.gethostname())
    keys = names if group_ranks is None else [rank // group_ranks for rank in range(len(names))]
    blocks = [[rank for rank, key in enumerate(keys) if key == one] for one in dict.fromkeys(keys)]
    group, _ = distributed.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        blocks, timeout=collective_timeout()
    )
    return group  # type: ignore[no-any-return]
