"""Compress gradients, or exchange them less often: torch's communication hooks of DistributedDataParallel.

The strategy saves the state of a hook, so that a resumed run computes the same numbers.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Collection, Mapping
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
from slurmddp.checkpoint.state.optimizers import load_optimizer
from slurmddp.collectives.values import gather
from slurmddp.strategies.replicas import average, collective_timeout

State = dict[str, Any]


class CommHook:
    """Base class of objects that exchange the gradients of a model.

    A hook without a state overrides no method.
    """

    settings: Mapping[str, Any] = {}
    """The options on which the state depends. A state with other options can't be restored."""

    def follow(self, optimizer: Optimizer) -> None:
        """Register callbacks of this hook at the steps of `optimizer`; called once per optimizer."""

    def state_dict(self) -> State:
        """Return the state of the hook on this rank; empty if it has none."""
        return {}

    def check_state_dict(self, state: State) -> None:
        """Raise CheckpointError if `load_state_dict` can't restore a state."""

    def load_state_dict(self, state: State) -> None:
        """Restore a result of `state_dict`, after models and optimizers have loaded their states."""


@functools.wraps(default_hooks.fp16_compress_hook)
def _bf16(state: Any, bucket: Any) -> Any:
    """Compress gradients by torch's hook for bfloat16, under the name of torch's hook for float16.

    On CPUs torch refuses the bfloat16 hook, which it detects by its name, although gloo can sum bfloat16.
    """
    return default_hooks.bf16_compress_hook(state, bucket)


# `wraps` copies the annotations of a hook of torch, because register_comm_hook checks them.
@functools.wraps(post_localSGD_hook)
def _exchange(hook: Any, bucket: Any) -> Any:
    """Call `hook.exchange`; this function has the form that torch requires of a communication hook."""
    return hook.exchange(bucket)


class Compressed(CommHook):
    """Communication hook that sends gradients as float16 or bfloat16, and returns their means as float32."""

    def __init__(self, model: DistributedDataParallel, name: str) -> None:
        hooks: dict[str, Callable[..., Any]] = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16}
        model.register_comm_hook(None, hooks[name])


class PowerSgd(CommHook):
    """Communication hook that sends each gradient matrix as two thin factors.

    Each rank keeps the error of its compression and adds it to its next gradient. If a step is skipped
    because its gradients are not finite, the errors and factors from before the step are restored.

    Args:
        model: the wrapped model.
        rank: the rank of the factors: the number of columns of each.
        start_step: number of exchanges of whole gradients before factors are sent.
        layout: the options of DistributedDataParallel. They decide which parameters are in which bucket.
        loss_scale: returns the loss scale, a scalar tensor on the device of the gradients. None: always 1.

    Source:
        Vogels et al., PowerSGD, 2019, arXiv:1905.13727.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        rank: int,
        start_step: int,
        layout: Mapping[str, Any],
        loss_scale: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.settings = {"powersgd_rank": rank, **layout}
        self._state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )
        self._device = next(model.parameters()).device
        self._loss_scale = loss_scale
        self._scales: dict[int, torch.Tensor] = {}
        """By index of a bucket, the loss scale by which its error is multiplied; 1 if it is missing."""
        self._before: dict[int, _BucketMemory] = {}
        """By index of a bucket, its error and factors before the first exchange after the last optimizer
        step."""
        self._stepped: set[int] = set()
        """The ids of the optimizers that have stepped since the last exchange."""
        model.register_comm_hook(self, _exchange)

    def exchange(self, bucket: Any) -> Any:
        """Average the gradients of a bucket; return a torch future of the averaged bucket."""
        state = self._state
        if state.iter >= state.start_powerSGD_iter:
            self._prepare(bucket)

        future = powerSGD_hook.powerSGD_hook(state, bucket)
        if self._device.type == "cpu":
            # Wait for each exchange, because gloo's threads could start the messages of several buckets in
            # any order.
            future.wait()
        return future

    def _prepare(self, bucket: Any) -> None:
        """Rescale the error of a bucket to the current loss scale, and keep a copy of its error and factors.

        The copy is made at the first exchange after an optimizer step. It is restored if the next step is
        skipped.
        """
        number = bucket.index()
        if self._stepped:
            self._stepped.clear()
            self._before.clear()
        elif number in self._before and not torch.isfinite(self._state.error_dict[number]).all():
            # If the error is not finite and no optimizer has stepped since the last exchange, the program
            # itself has skipped the step.
            self._before[number].restore(self._state, number)

        if self._loss_scale is not None:
            self._rescale(number, self._loss_scale())
        if number not in self._before:
            self._before[number] = _BucketMemory(self._state, bucket)

    def _rescale(self, number: int, scale: torch.Tensor) -> None:
        error = self._state.error_dict.get(number)
        if error is not None:
            error.mul_(scale / self._scales.get(number, 1))
        self._scales[number] = scale

    def follow(self, optimizer: Optimizer) -> None:
        if hasattr(optimizer, "register_step_post_hook"):
            optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Restore the errors of an optimizer's parameters if none had a gradient: the step was skipped."""
        # Nothing to restore: no gradients were exchanged since the last step of this optimizer.
        if id(optimizer) in self._stepped:
            return

        self._stepped.add(id(optimizer))

        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter.grad is None for parameter in trained):
            for number, memory in self._before.items():
                memory.restore(self._state, number, {id(parameter) for parameter in trained})

    def state_dict(self) -> State:
        hook_state = self._state
        random = hook_state.rng.get_state(legacy=False)["state"]

        # Divide by the loss scale, because the scale may be another one when the errors are loaded.
        errors = {
            number: error / self._scales.get(number, 1) for number, error in hook_state.error_dict.items()
        }
        return {
            "step": hook_state.iter,
            "random": [torch.from_numpy(random["key"].astype(np.int64)), random["pos"]],
            "errors": errors,
            "p": dict(hook_state.p_memory_dict),
            "q": dict(hook_state.q_memory_dict),
        }

    def load_state_dict(self, state: State) -> None:
        key, position = state["random"]
        self._state.iter = state["step"]
        self._state.rng.set_state(("MT19937", key.numpy().astype(np.uint32), position, 0, 0.0))
        self._state.error_dict = self._copied(state["errors"])
        self._state.p_memory_dict = self._copied(state["p"])
        self._state.q_memory_dict = self._copied(state["q"])

        self._scales.clear()
        self._before.clear()
        self._stepped.clear()

    def _copied(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return copies of tensors on the model's device, because the hook changes tensors in place."""
        return {bucket: tensor.to(self._device, copy=True) for bucket, tensor in tensors.items()}


class _BucketMemory:
    """Snapshot of the error and the factors that torch's PowerSGD hook keeps for a bucket.

    The factors are copied, because torch overwrites them in place. It creates a new error in each exchange.
    """

    def __init__(self, state: powerSGD_hook.PowerSGDState, bucket: Any) -> None:
        number = bucket.index()
        self._error: torch.Tensor | None = state.error_dict.get(number)
        self._factors = [
            memory[number].clone() if number in memory else None for memory in _factors_of(state)
        ]
        self._spans: dict[int, slice] = {}
        """By the id of a parameter, the slice of the error that belongs to it."""
        begin = 0
        for parameter in bucket.parameters():
            self._spans[id(parameter)] = slice(begin, begin + parameter.numel())
            begin += parameter.numel()

    def restore(
        self, state: powerSGD_hook.PowerSGDState, number: int, parameters: Collection[int] | None = None
    ) -> None:
        """Write the error and the factors of the snapshot back into the state of torch's hook.

        Args:
            state: the state of torch's hook.
            number: the index of the bucket.
            parameters: the ids of the parameters whose errors are restored. None: all of the bucket.
        """
        spans = [span for key, span in self._spans.items() if parameters is None or key in parameters]
        if not spans:
            return

        for span in spans:
            state.error_dict[number][span] = 0 if self._error is None else self._error[span]

        # Restore the factors of all parameters of the bucket. Factors are only the start values of the next
        # ones, so this does no harm to the other parameters.
        for memory, factors in zip(_factors_of(state), self._factors, strict=True):
            if factors is None:
                memory.pop(number, None)
            else:
                memory[number] = factors.clone()


def _factors_of(state: powerSGD_hook.PowerSGDState) -> list[dict[int, torch.Tensor]]:
    return [state.p_memory_dict, state.q_memory_dict]


class PostLocalSgd(CommHook):
    """Communication hook that averages gradients within groups of ranks, and weights over all ranks.

    Before `start_step` gradients are averaged over all ranks. Afterwards the weights are averaged every
    `period` steps. The replicas differ between two averages, so the state of each rank contains its weights
    and optimizers.

    Source:
        Lin et al., Don't use large mini-batches, use local SGD, 2018, arXiv:1808.07217.
    """

    def __init__(
        self, model: DistributedDataParallel, start_step: int, period: int, group_ranks: int | None
    ) -> None:
        groups = _groups(group_ranks)
        self.settings = {"hook_start_step": start_step, "groups": groups}
        self._state = PostLocalSGDState(None, _group_of_rank(groups), start_step)  # type: ignore[no-untyped-call]
        self._model = model.module
        self._period = period
        self._optimizers: list[Optimizer] = []
        self._steps: list[int] = []
        """For each optimizer, its number of steps on gradients that were averaged within groups only."""
        self._is_local = False
        """Whether the last gradients were averaged within groups only."""
        model.register_comm_hook(self, _exchange)

    def exchange(self, bucket: Any) -> Any:
        """Average the gradients of a bucket; return a torch future of the averaged bucket."""
        self._is_local = self._state.iter >= self._state.start_localSGD_iter
        return post_localSGD_hook(self._state, bucket)

    def follow(self, optimizer: Optimizer) -> None:
        number = len(self._optimizers)
        self._optimizers.append(optimizer)
        self._steps.append(0)
        optimizer.register_step_post_hook(lambda *_: self._after_step(number))

    def _after_step(self, number: int) -> None:
        """Average the weights of an optimizer after its first local step, and then every `period` steps.

        Args:
            number: the index of the optimizer.
        """
        if not self._is_local:
            return
        if self._steps[number] % self._period == 0:
            self._average(self._optimizers[number])
        self._steps[number] += 1

    def _average(self, optimizer: Optimizer) -> None:
        ids = {id(parameter) for parameter in self._model.parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

        # Include parameters without a gradient: all ranks must average the same ones, but may skip different
        # steps.
        with torch.no_grad():
            average([parameter for parameter in parameters if id(parameter) in ids])

    def state_dict(self) -> State:
        state: State = {"step": self._state.iter, "steps": list(self._steps)}
        if any(self._steps):
            state["model"] = self._model.state_dict()
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
        return state

    def check_state_dict(self, state: State) -> None:
        if "model" not in state:
            return

        optimizer_states = state["optimizers"]
        if len(optimizer_states) != len(self._optimizers):
            problem = (
                f"{len(optimizer_states)} optimizers trained the replica, "
                f"and {len(self._optimizers)} were set up before load"
            )
            raise compatibility.misfit("replica of a model", self._model, problem)

        compatibility.check("replica of a model", self._model, state["model"])
        for optimizer, saved in zip(self._optimizers, optimizer_states, strict=True):
            compatibility.check("optimizer of a replica", optimizer, saved)

    def load_state_dict(self, state: State) -> None:
        self._state.iter = state["step"]
        new_optimizers = len(self._optimizers) - len(state["steps"])
        self._steps = [*state["steps"], *[0] * new_optimizers]
        self._is_local = any(self._steps)
        if "model" in state:
            self._model.load_state_dict(state["model"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                load_optimizer(optimizer, saved)


def _groups(group_ranks: int | None) -> list[list[int]]:
    """Divide all ranks into groups, and return the ranks of each group.

    Args:
        group_ranks: number of consecutive ranks in a group. None: a group for each node.
    """
    keys = gather(socket.gethostname())
    if group_ranks is not None:
        keys = [str(rank // group_ranks) for rank in range(len(keys))]

    groups: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _group_of_rank(groups: list[list[int]]) -> distributed.ProcessGroup:
    """Create a process group for each list of ranks, and return this rank's. All ranks must call it."""
    group, _ = distributed.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=collective_timeout()
    )
    return group  # type: ignore[no-any-return]
