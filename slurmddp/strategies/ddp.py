"""Train data-parallel, with the same bucket layout in fresh and resumed runs.

torch's DistributedDataParallel puts gradients into buckets. It rebuilds the buckets before the second
backward pass, in the order in which the first pass finished the gradients. The layout of the buckets decides
the order of summation. A resumed run begins with buckets that are not rebuilt yet. So its first step would
differ in the last bits from the same step of an undisturbed run (seen on four gloo ranks, torch 2.13; on two
ranks a sum has only one order). `fix_bucket_layout` makes torch rebuild the buckets before the first step, in
fresh and in resumed runs. For a static graph the layout is set without a backward pass, because torch would
record that pass as the model's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slurmddp.errors import ConfigError
from slurmddp.strategies.replicas import refuse_sparse, require_trainable, trains

if TYPE_CHECKING:  # Their imports take time, which only a training with these options spends.
    from slurmddp.strategies.comm_hooks import CommHook
    from slurmddp.strategies.zero import ShardedOptimizer


class _Touch(nn.Module):
    """Stand-in for a model: its forward pass adds up all parameters, multiplied by zero, in the given order.

    Args:
        parameters: the trainable parameters of the model, in the order of registration.
        sparse: for each parameter, whether torch expects a sparse gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sparse: Sequence[bool]) -> None:
        super().__init__()
        self._uses = tuple(zip(parameters, sparse, strict=True))

    def forward(self, _: None) -> torch.Tensor:
        total = torch.zeros((), device=self._uses[0][0].device)
        for parameter, is_sparse in self._uses:
            if is_sparse:
                no_rows = torch.empty(0, dtype=torch.long, device=parameter.device)
                values = nn.functional.embedding(no_rows, parameter, sparse=True)
            elif parameter.is_complex():
                values = torch.view_as_real(parameter)
            else:
                values = parameter
            total = total + values.sum() * 0

        return total


def fix_bucket_layout(model: DistributedDataParallel) -> None:
    """Make torch build the final gradient buckets of `model` before the first step.

    One backward pass of zeros runs from the last parameter to the first. All ranks must call the function.
    Parameters, buffers and random states stay unchanged, and gradients stay None. Hooks of the model and its
    parameters do not run, nor do optimizers in the backward pass. Hooks on nodes of autograd's graph do run.
    """
    module = model.module
    broadcasts_buffers = model.broadcast_buffers
    trainable, sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]

    # Replace the model, and not only its forward method, so that no hook of the model runs.
    model.module = _Touch(trainable, sparse)
    model.broadcast_buffers = False
    try:
        with torch.enable_grad(), _without_hooks(trainable):
            # Pass None: with `device_ids`, as on GPUs, torch moves the arguments to the device, and fails if
            # there are none (torch 2.13).
            model(None).backward()
            for parameter in trainable:
                parameter.grad = None

            # torch rebuilds the buckets at the start of the next forward pass, so run one here. It must be in
            # no_sync: otherwise the next backward pass would average gradients even within no_sync.
            with model.no_sync():
                model(None)
    finally:
        model.module = module
        model.broadcast_buffers = broadcasts_buffers


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the hooks of `parameters` during the block: they could change gradients or step an optimizer."""
    # Set empty dicts, because torch 2.13 calls post-accumulate hooks even after they are set to None.
    empty: dict[str, Any] = {
        "_backward_hooks": {},
        "_post_accumulate_grad_hooks": {},
        "_in_backward_optimizers": [],
    }
    detached: list[tuple[nn.Parameter, str, Any]] = []
    for parameter in parameters:
        for name in empty:
            hooks = getattr(parameter, name, None)
            if hooks is not None:
                detached.append((parameter, name, hooks))
                setattr(parameter, name, empty[name])

    try:
        yield
    finally:
        for parameter, name, hooks in detached:
            setattr(parameter, name, hooks)


class _StaticGraph(DistributedDataParallel):
    """DistributedDataParallel with a static graph, and with the final bucket layout from the first step on.

    The buckets contain the parameters from last to first.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()
        self.knows_graph = False
        """Whether the first forward pass has begun, in which torch records the graph."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.knows_graph |= torch.is_grad_enabled()
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class _RefuseUnaveraged:
    """Hook that runs before optimizer steps, and raises ConfigError if a gradient is not averaged over ranks.

    torch averages only gradients of parameters that require a gradient when the model is wrapped. Steps on
    other parameters would make the replicas differ.

    Args:
        averaged: by id, the parameters whose gradients torch averages.
    """

    def __init__(self, averaged: Mapping[int, nn.Parameter]) -> None:
        self._averaged = averaged
        self._groups = 0
        self._unaveraged: list[nn.Parameter] = []
        """The optimizer's parameters whose gradients are not averaged."""

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        # Compare the number of groups in each step, because a program may add a group after any step.
        if self._groups != len(optimizer.param_groups):
            self._groups = len(optimizer.param_groups)
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._unaveraged = [parameter for parameter in parameters if id(parameter) not in self._averaged]

        count = sum(parameter.grad is not None for parameter in self._unaveraged)
        if count:
            raise ConfigError(
                f"The ranks don't average the gradients of {count} parameters of the optimizer, which were "
                "added to the model, or began to require a gradient, after setup_model.",
                hint="Let all parameters require a gradient in setup_model. Freeze some of them afterwards, "
                "with strategy.find_unused_parameters=true.",
            )


class Ddp:
    """Strategy of torch's DistributedDataParallel; one process without a process group uses the bare model.

    Args:
        find_unused_parameters: whether some parameters get no gradient in some steps.
        bucket_mb: size of a bucket in MB; None: torch's default.
        static_graph: whether each step uses the same parameters in the same way. torch then permits
            parameters that are never used, or several times under activation checkpointing.
        comm_hook: "fp16" or "bf16": send gradients in that format; "powersgd": send low-rank factors;
            "post_local_sgd": average gradients within a node, and weights over all ranks every
            `average_every` steps. None: average gradients in float32.
        hook_start_step: number of first steps in which gradients are averaged without the hook "powersgd"
            (at least 2; None: 1000) or "post_local_sgd" (None: 100).
        powersgd_rank: the rank of the factors of "powersgd"; None: 1.
        average_every: steps between two averages of the weights by "post_local_sgd"; None: 4.
        group_ranks: number of consecutive ranks that average gradients in each step of "post_local_sgd";
            None: the ranks of a node.
        zero_optimizer: whether the optimizer's state is sharded over the ranks (ZeRO stage 1).

    Raises:
        ConfigError: a number is too small, or two options exclude each other.
    """

    def __init__(
        self,
        *,
        find_unused_parameters: bool | None = False,
        bucket_mb: float | None = None,
        static_graph: bool | None = False,
        comm_hook: Literal["fp16", "bf16", "powersgd", "post_local_sgd"] | None = None,
        hook_start_step: int | None = None,
        powersgd_rank: int | None = None,
        average_every: int | None = None,
        group_ranks: int | None = None,
        zero_optimizer: bool | None = False,
    ) -> None:
        self._options: dict[str, Any] = {"find_unused_parameters": bool(find_unused_parameters)}
        if bucket_mb is not None:
            if bucket_mb <= 0:
                raise ConfigError(f"strategy.bucket_mb is {bucket_mb}.", hint="Give a size above 0, or null.")
            self._options["bucket_cap_mb"] = bucket_mb

        self._options["static_graph"] = bool(static_graph)
        self._zero = zero_optimizer
        self._comm_hook = comm_hook
        self._start_step = hook_start_step
        self._powersgd_rank = powersgd_rank
        self._average_every = average_every
        self._group_ranks = group_ranks
        self._check_options()

        self._hooks: list[tuple[nn.Module, CommHook, dict[str, Any]]] = []
        """For each wrapped model, its communication hook and the hook's initial state."""
        self._sharded: list[ShardedOptimizer] = []
        self._averaged: dict[int, nn.Parameter] = {}
        """The parameters that required a gradient when their model was wrapped, by their ids."""
        self._loss_scale: Callable[[], torch.Tensor] | None = None

    def _check_options(self) -> None:
        if self._comm_hook not in (None, "fp16", "bf16", "powersgd", "post_local_sgd"):
            raise ConfigError(
                f"strategy.comm_hook is {self._comm_hook!r}.",
                hint="Give fp16, bf16, powersgd, post_local_sgd or null.",
            )

        first_start = 2 if self._comm_hook == "powersgd" else 0
        for name, value, minimum, hooks in (
            ("hook_start_step", self._start_step, first_start, ("powersgd", "post_local_sgd")),
            ("powersgd_rank", self._powersgd_rank, 1, ("powersgd",)),
            ("average_every", self._average_every, 2, ("post_local_sgd",)),
            ("group_ranks", self._group_ranks, 1, ("post_local_sgd",)),
        ):
            if value is not None and self._comm_hook not in hooks:
                raise ConfigError(
                    f"strategy.{name}={value} has no effect with comm_hook={self._comm_hook}.",
                    hint=f"Leave it out, or choose strategy.comm_hook={' or '.join(hooks)}.",
                )
            if value is not None and value < minimum:
                raise ConfigError(f"strategy.{name} is {value}.", hint=f"Give {minimum} or more.")

        if self._options["static_graph"] and self._options["find_unused_parameters"]:
            raise ConfigError(
                "strategy.static_graph and strategy.find_unused_parameters are both true.",
                hint="Set only static_graph: torch then finds unused parameters in the first step.",
            )

        if self._zero and self._comm_hook == "post_local_sgd":
            raise ConfigError(
                "strategy.zero_optimizer does not work with comm_hook=post_local_sgd.",
                hint="Leave one of them out: ZeRO needs equal weights on all ranks.",
            )

    def set_loss_scale(self, scale: Callable[[], torch.Tensor]) -> None:
        """Set the function that returns the loss scale, by which gradients are multiplied in fp16."""
        self._loss_scale = scale

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if not distributed.is_initialized():
            return model

        require_trainable(model)
        if self._comm_hook is not None:
            refuse_sparse(model, f"strategy.comm_hook={self._comm_hook}")

        devices = [device] if device.type == "cuda" else None
        is_static = self._options["static_graph"]
        wrapper = _StaticGraph if is_static else DistributedDataParallel
        wrapped = wrapper(model, device_ids=devices, **self._options)
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._averaged[id(parameter)] = parameter

        # With find_unused_parameters torch never rebuilds the buckets, so there is nothing to fix.
        if not is_static and not self._options["find_unused_parameters"]:
            fix_bucket_layout(wrapped)

        if self._comm_hook is not None:
            hook = self._make_hook(wrapped, self._comm_hook)
            self._hooks.append((wrapped, hook, hook.state_dict()))

        return wrapped

    def _make_hook(self, model: DistributedDataParallel, name: str) -> CommHook:
        # Import the hooks here, because the imports take time that trainings without a hook save.
        from slurmddp.strategies.comm_hooks import Compressed, PostLocalSgd, PowerSgd

        start_step = self._start_step
        if name == "powersgd":
            if start_step is None:
                start_step = 1000
            return PowerSgd(model, self._powersgd_rank or 1, start_step, self._options, self._loss_scale)

        if name == "post_local_sgd":
            if start_step is None:
                start_step = 100
            return PostLocalSgd(model, start_step, self._average_every or 4, self._group_ranks)

        return Compressed(model, name)

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Return the optimizer that the training is to step: with `zero_optimizer` a sharded one.

        Args:
            optimizer: an optimizer of parameters of `model`.
            model: the result of `wrap`.
        """
        if not isinstance(model, DistributedDataParallel):
            return optimizer

        if self._zero:
            from slurmddp.strategies.zero import shard

            optimizer = shard(optimizer)
            self._sharded.append(optimizer)

        for hooked_model, hook, _ in self._hooks:
            if trains(optimizer, hooked_model):
                hook.follow(optimizer)

        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(_RefuseUnaveraged(self._averaged))
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks on this rank; empty if they have none. All ranks must call it.

        Sharded optimizers gather their whole states, so that a checkpoint can save them.
        """
        for optimizer in self._sharded:
            optimizer.consolidate()

        states = [hook.state_dict() for _, hook, _ in self._hooks]
        if not any(states):
            return {}

        settings = [dict(hook.settings) for _, hook, _ in self._hooks]
        return {"hooks": states, "comm_hook": self._comm_hook, "settings": settings}

    def reset(self) -> None:
        """Restore the states that the hooks had when their models were wrapped."""
        for _, hook, first_state in self._hooks:
            hook.load_state_dict(first_state)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if `load_state_dict` can't restore a state."""
        for hook, saved in self._with_saved(state):
            hook.check_state_dict(saved)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore this rank's result of `state_dict`, after models and optimizers have got their states.

        Returns:
            False if the state is ignored, because another strategy, another hook or other settings have saved
            it.
        """
        pairs = self._with_saved(state)
        for hook, saved in pairs:
            hook.load_state_dict(saved)
        return bool(pairs)

    def _with_saved(self, state: dict[str, Any]) -> list[tuple[CommHook, dict[str, Any]]]:
        """Return each hook with its state in `state`; empty if `state` belongs to other hooks or settings."""
        hooks = [hook for _, hook, _ in self._hooks]
        settings = [hook.settings for hook in hooks]
        if state.get("comm_hook") != self._comm_hook or state.get("settings", settings) != settings:
            return []
        return list(zip(hooks, state.get("hooks", []), strict=False))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes do not average gradients.

        Raises:
            ConfigError: the graph is static and no forward pass has run. torch averages in its first pass.
        """
        if isinstance(model, _StaticGraph) and not model.knows_graph:
            raise ConfigError(
                "strategy.static_graph does not work with several batches per step.",
                hint="Leave strategy.static_graph out, or set train.accumulate=1.",
            )

        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return nullcontext()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model
