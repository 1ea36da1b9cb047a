"""The API of a training loop, which runs unchanged on one process or on a thousand.

    d = Distributon(seed=0)
    d.launch()
    model = d.setup_model(model)
    optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters()))
    for inputs, targets in d.setup_dataloader(loader):
        loss = cross_entropy(model(inputs), targets)
        d.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

The script works under plain `python` (with `num_devices` it starts its ranks), under `srun` with one task per
rank, under `torchrun`, under `mpirun`, and in jobs of slurmddp.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import distributed, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from slurmddp.checkpoint.files.best_by_metric import check_best, check_choice
from slurmddp.checkpoint.state.shards import has_shards
from slurmddp.collectives import values as collectives
from slurmddp.environments.detect import Environment
from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE
from slurmddp.errors import ConfigError
from slurmddp.launchers.local.launcher import Launcher
from slurmddp.settings.check_values import check_folder
from slurmddp.settings.schema import KEEP_LAST
from slurmddp.strategies import Strategy, build
from slurmddp.training import rng
from slurmddp.training.checkpointing import restore
from slurmddp.training.checkpointing.async_writer import AsyncWriter, Keep
from slurmddp.training.checkpointing.checkpointer import Checkpointer
from slurmddp.training.checkpointing.finite import gradient_norm
from slurmddp.training.checkpointing.program import (
    UserProgram,
    loaded_line,
    nothing_left_line,
    shared_folder_line,
)
from slurmddp.training.checkpointing.snapshot_interval import SnapshotInterval
from slurmddp.training.checkpointing.training_state import merged, required_step
from slurmddp.training.data.distributed_loader import DistributedLoader
from slurmddp.training.data.loader import distribute
from slurmddp.training.heartbeat import shown_as
from slurmddp.training.loggers import Logger
from slurmddp.training.loggers.logger_threads import build as build_loggers
from slurmddp.training.precision import LossScaler, autocast, dtype_of
from slurmddp.training.process_group.rendezvous import environment_with
from slurmddp.training.rank_session import RankSession, connect_to_agent
from slurmddp.training.run_log import RunLog, loggers_of, numbers
from slurmddp.training.stopping.stop_controller import StopController

Result = TypeVar("Result")
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Shared = TypeVar("Shared")


class Distributon:
    """A training on one or more ranks: the object by which a program uses slurmddp.

    As a context manager it closes itself at the end of the block.

    Args:
        num_devices: number of ranks on this machine. "auto": the ranks that a launcher has started; without a
            launcher one per visible GPU, or one.
        strategy: a name from docs/guides/strategies.md, or a class of your own with the methods of
            `slurmddp.strategies.Strategy`, given as its import path, the class or an object.
        backend: "nccl", "gloo", or "auto": nccl for ranks with GPUs, else gloo. "package.module.Class" names
            a transport of your own. "cpu:gloo,cuda:nccl" names a backend for each type of device
            (docs/reference/process-groups.md).
        precision: "32", "bf16" or "fp16". With "bf16" or "fp16" the forward passes of models run under
            autocast to bfloat16 or float16, and return float32. Weights, gradients and checkpoints stay in
            float32. With "fp16" `backward` scales the loss. A step with infinite gradients then changes
            neither weights nor optimizer states, but counts as a step.
        seed: makes initial weights equal on all ranks and later random draws different on each rank, and
            fixes the order of the data. None: weights and draws are random, and the data have the order of
            seed 0.
        config: nested mapping of plain values that change the results. Checkpoints store it, and `load`
            refuses a checkpoint with another configuration.
        environment: the source of this process's rank: "slurm", "torchrun", "mpi", "single", or a function or
            class of your own (`slurmddp.environments.detect.Environment`). None: the innermost launcher.
        launcher: starts the ranks if no launcher has: "local", or a class of your own with the methods of
            `slurmddp.launchers.local.launcher.Launcher`.
        loggers: receivers of rank 0's metrics. Each is a name such as "tensorboard", a mapping or an object
            (docs/guides/loggers.md). In a job of slurmddp they are used in addition to the loggers of its
            configuration.
        init_method: where the ranks meet: "tcp://host:port" of rank 0, or "file:///path" on a disk that all
            nodes share. None: at the address that the launcher gives.
        rendezvous_timeout_s: seconds to wait for ranks that have not joined.
        collective_timeout_s: seconds that a collective may take.

    Raises:
        ConfigError: an argument is not of the form above.

    Example:
        d = Distributon(num_devices=4, precision="bf16", seed=0)
    """

    def __init__(
        self,
        num_devices: int | Literal["auto"] = "auto",
        *,
        strategy: str | Strategy | type[Strategy] = "ddp",
        backend: str = "auto",
        precision: str = "32",
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
        environment: str | Environment | type[Environment] | None = None,
        launcher: str | Launcher | type[Launcher] = "local",
        loggers: Sequence[str | Mapping[str, Any] | Logger] = (),
        init_method: str | None = None,
        rendezvous_timeout_s: float = 60.0,
        collective_timeout_s: float = 1800.0,
    ) -> None:
        connect_to_agent(os.environ)

        if num_devices != "auto":
            _require_above(
                0, "num_devices", num_devices, 'Give a number of ranks on this machine, or "auto".'
            )
        if seed is not None:
            _require_seed(seed)
        for name, seconds in (("rendezvous", rendezvous_timeout_s), ("collective", collective_timeout_s)):
            _require_above(0, f"{name}_timeout_s", seconds, "Give seconds, more than 0.", Real)
        _require("config", (Mapping, type(None)), "Give a dict of plain values.", config)
        _require("backend", str, "Give a name from docs/reference/process-groups.md.", backend)

        self._group_settings: dict[str, Any] = {
            "backend": backend, "init_method": init_method, "rendezvous_timeout_s": rendezvous_timeout_s,
            "collective_timeout_s": collective_timeout_s,
        }  # fmt: skip
        self._settings: dict[str, Any] = self._group_settings | {
            "num_devices": num_devices, "strategy": strategy, "precision": precision,
            "seed": seed, "config": config, "environment": environment, "loggers": loggers,
        }  # fmt: skip

        self._num_devices = num_devices
        self._strategy = build(strategy)
        self._dtype = dtype_of(precision)
        self._scaler: LossScaler | None = None
        self._seed = seed
        self._config = config
        self._loggers = build_loggers(loggers)
        self._workers_differ = True
        self._draws_equally = False
        """Whether all ranks draw equal random numbers now: from seeding to the next `setup_model`."""

        self._loaders: list[DistributedLoader] = []
        self._models: list[nn.Module] = []
        self._wrapped: list[nn.Module] = []
        """The results of the strategy's `wrap`, in the order of `_models`."""

        self._session = RankSession(
            environment_with(os.environ, init_method), self._leave, environment, launcher
        )
        self._session.heartbeat.on_step = self._step_taken
        self._opened: Checkpointer | None = None
        """The checkpointer, which is built at the first save or load; None before."""
        self.resumed_from: str | None = None
        """Where `load` found the state: "memory" or "disk"; None without a state."""
        self._program = UserProgram.current(self._session.run)
        self._resumed: tuple[Path, int] | None = None
        """Folder and step of the newest checkpoint, which was loaded outside of a run of slurmddp."""
        self._known_folders: set[Path] = set()
        """Checkpoint folders that were already checked for checkpoints of other programs."""

    # Start and end of the training.

    @overload
    def launch(self, /) -> Distributon: ...

    @overload
    def launch(
        self,
        function: Callable[..., Result],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Result: ...

    def launch(self, function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """Join the process group of all ranks; without a launcher, start the ranks first.

        A process without a launcher that asks for several devices runs its own command once per device, as
        the ranks, and exits with their exit code. So only the ranks run the lines after `launch()`. The
        command may be a script, `-m module` or an app of Hydra, whose ranks share one output folder. The
        ranks have the environment variables of torchrun. Under srun, torchrun or mpirun no rank is started.
        A default process group that exists already, such as Fabric's, is used and stays open after `close`.

        With a `function`, a process without a launcher starts ranks for this call alone, and continues
        when the call returns. That works in a notebook too. The ranks are new processes, to which the
        function is sent pickled. Under a launcher, and for a single rank, this process itself calls the
        function and then closes this object.

        Args:
            function: called on each rank with a launched Distributon of that rank, `args` and `kwargs`.
            args, kwargs: further arguments of the function.

        Returns:
            This object. With a `function`: the function's result on rank 0; under a launcher, its result on
            this rank.

        Raises:
            SlurmddpError: `launch` was called before, or a rank failed in `function`.
            ConfigError: the environment does not fit `num_devices`, or `function` can't be sent to the ranks.
            StoppedAtCheckpoint: the training in `function` was stopped.
            SystemExit: SIGTERM or SIGUSR2 has ended the ranks; the exception ends this program too.

        Example:
            def train(d, lr):
                model = d.setup_model(nn.Linear(4, 1))
                optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=lr))
                loss = model(torch.ones(1, 4)).sum()
                d.backward(loss)
                optimizer.step()
                return loss.item()


            loss = Distributon(2).launch(train, lr=0.1)
        """
        if function is not None:
            if not callable(function):
                raise ConfigError(
                    f"launch was given {function!r:.80}, which is not a function.",
                    hint="Give a function that takes the Distributon first, or no argument.",
                )

            ranks = self._session.ranks_to_start(self._num_devices)
            if ranks:
                from slurmddp.launchers.local.function import call_on_ranks

                call = partial(_as_rank, self._settings, self._program, function, args, kwargs)
                return call_on_ranks(call, ranks, self._session.launcher)

            with self:
                self.launch()
                return function(self, *args, **kwargs)

        self._session.start(self._num_devices, self._group_settings)

        if self._dtype is torch.float16:
            self._scaler = self._make_scaler()
        if self.is_global_zero:
            self._session.loggers = loggers_of(self._session.run, self._loggers, self._config)
        if self._seed is not None:
            self.seed_everything(self._seed)
        return self

    def _make_scaler(self) -> LossScaler:
        scaler = LossScaler(self.device)
        if hasattr(self._strategy, "set_loss_scale"):
            self._strategy.set_loss_scale(scaler.factor)
        return scaler

    def seed_everything(self, seed: int, *, workers: bool = True) -> None:
        """Seed python, NumPy and torch equally on all ranks, as the constructor's `seed` does.

        Call it on all ranks, after `launch` and before the model is built. The initial weights are then equal
        on all ranks. After `setup_model` each rank draws different random numbers.

        Args:
            seed: from 0 to 2^64 - 1.
            workers: whether data loader workers of different ranks get different seeds. False: worker 3 has
                the same seed on each rank. Workers of one rank always have different seeds. Random draws
                while a sample is read depend on the sample, not on the worker (see `setup_dataloader`).

        Raises:
            ConfigError: `seed` is out of range or no integer.

        Example:
            d.seed_everything(7, workers=False)
        """
        _require_seed(seed)
        self._session.context  # noqa: B018 - raises before launch.

        self._seed = int(seed)
        self._workers_differ = workers
        rng.seed_everything(self._seed)
        self._draws_equally = True

    def close(self) -> None:
        """Wait until all saves are durable, and leave the process group.

        The end of the program calls it too. Later calls do nothing.

        Raises:
            CheckpointError: on all ranks, if a save without `wait` failed.
        """
        self._session.close()

    def __enter__(self) -> Distributon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._resumed = None
        self._session.end(error)

    # Rank, node and device of this process.

    @property
    def rank(self) -> int:
        """The rank of this process: 0 to `world_size` - 1."""
        return self._session.context.info.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node, from 0 on."""
        return self._session.context.info.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node, from 0 on."""
        return self._session.context.info.node_rank

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self._session.context.info.world_size

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._session.context.info.nodes

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return self._session.context.info.local_world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU, or the CPU."""
        return self._session.context.device

    @property
    def run_folder(self) -> Path | None:
        """The run folder of this job of slurmddp, for files of your own; None outside of such jobs."""
        folder = self._session.run.folder
        return None if folder is None else folder.path

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0 only, for work that one process does: print, write a file."""
        return self.rank == 0

    # Models, optimizers and data loaders.

    @overload
    def setup_model(self, model: nn.Module, /) -> nn.Module: ...

    @overload
    def setup_model(self, model: nn.Module, /, *more: nn.Module) -> tuple[nn.Module, ...]: ...

    def setup_model(self, model: nn.Module, /, *more: nn.Module) -> nn.Module | tuple[nn.Module, ...]:
        """Move models to this rank's device and wrap them by the strategy. All ranks call it.

        Args:
            model: a module that is equal on all ranks; it is moved in place.
            more: further modules.

        Returns:
            The module to call in training; a tuple of modules for several models. On several ranks the module
            may be a wrapper without the attributes and methods of the model (see `unwrap`).

        Raises:
            ConfigError: the strategy refuses a model, or a model is set up already.

        Example:
            generator, critic = d.setup_model(generator, critic)
        """
        context = self._session.context
        models = (model, *more)
        _require("setup_model", nn.Module, "Give modules of torch, one argument each.", *models)

        known = {id(_uncompiled(module)) for module in (*self._models, *self._wrapped)}
        if any(id(_uncompiled(module)) in known for module in models):
            raise ConfigError(
                "setup_model was given a model that is set up already.",
                hint="Set each model up once, before the loop, and use the result.",
            )

        wrapped = tuple(self._strategy.wrap(module.to(context.device), context.device) for module in models)
        for module in wrapped:
            if not isinstance(module, nn.Module):
                raise self._wrong_result("wrap", module, "the module to call in training")
        for module in models:
            autocast(module, context.device, self._dtype)
        self._models += models
        self._wrapped += wrapped

        # The initial weights have been drawn, equally on all ranks. From here on each rank draws different
        # numbers, for example for dropout. Seed only once: a second time would repeat the same numbers.
        if self._seed is not None and self._draws_equally and context.info.rank > 0:
            rng.seed_everything(rng.derive(self._seed, "rank", context.info.rank))
        self._draws_equally = False

        return wrapped if more else wrapped[0]

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `setup_model`, with its own attributes and methods.

        The module runs without the other ranks; only a module that fsdp has sharded needs all ranks. Don't
        compute a training loss with it: only calls of `setup_model`'s result lead to averaged gradients.

        Args:
            model: a result of `setup_model`, or `torch.compile` of it.

        Returns:
            The module itself; the names in its state have no prefix of a wrapper.

        Example:
            width = d.unwrap(model).in_features  # model.in_features works on one rank only
            if d.is_global_zero:
                torch.save(d.unwrap(model).state_dict(), "weights.pt")
        """
        return self._strategy.unwrap(_uncompiled(model))

    @overload
    def setup_optimizer(self, optimizer: AnyOptimizer, /) -> AnyOptimizer: ...

    @overload
    def setup_optimizer(self, optimizer: Optimizer, /, *more: Optimizer) -> tuple[Optimizer, ...]: ...

    def setup_optimizer(self, optimizer: Optimizer, /, *more: Optimizer) -> Optimizer | tuple[Optimizer, ...]:
        """Check optimizers, and count the steps of the first one as the steps of the training.

        Args:
            optimizer: built after `setup_model`, from the parameters of its result.
            more: further optimizers. Their steps don't count as steps of the training.

        Returns:
            The optimizer to step, which the strategy may have replaced; a tuple of optimizers if several were
            given. Build schedulers from it.

        Raises:
            ConfigError: an optimizer has a parameter that belongs to no model of `setup_model`, or does not
                work with the precision.

        Example:
            optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        """
        optimizers = tuple(self._set_up_optimizer(each) for each in (optimizer, *more))
        self._session.heartbeat.follow(optimizers[0])
        return optimizers if more else optimizers[0]

    def _wrong_result(self, method: str, result: object, expected: str) -> ConfigError:
        return ConfigError(
            f"{type(self._strategy).__name__}.{method} returned a {type(result).__name__}.",
            hint=f"It must return {expected}; see slurmddp.strategies.Strategy.",
        )

    def _set_up_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check an optimizer, and return the optimizer to use instead, which the strategy chooses.

        Raises:
            ConfigError: a parameter belongs to no model of `setup_model`, or the optimizer does not work with
                the precision.
        """
        if not hasattr(optimizer, "param_groups"):
            _require("setup_optimizer", Optimizer, "Give optimizers, one argument each.", optimizer)

        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = {id(p): number for number, model in enumerate(self._models) for p in model.parameters()}
        unknown = [p for p in parameters if p.device != self.device or id(p) not in owners]
        if unknown:
            raise ConfigError(
                f"{len(unknown)} of the {len(parameters)} parameters of this {type(optimizer).__name__} "
                "belong to no model that was set up.",
                hint="Call setup_model first, and build the optimizer from the parameters of its result.",
            )

        setup = getattr(self._strategy, "setup_optimizer", None)
        if setup is not None:
            optimizer = setup(optimizer, self._wrapped[owners[id(parameters[0])]])
            if not hasattr(optimizer, "param_groups"):
                raise self._wrong_result("setup_optimizer", optimizer, "the optimizer to step")

        if self._scaler is not None:
            if has_shards(optimizer):
                raise ConfigError(
                    'precision="fp16" scales the loss, which sharded gradients do not support.',
                    hint='Use precision="bf16", or strategy.param_dtype=bfloat16.',
                )
            self._scaler.follow(optimizer)

        return optimizer

    @overload
    def setup_dataloader(
        self,
        loader: DataLoader[Any],
        /,
        *,
        accumulate: int = 1,
        even: bool = True,
        keep_global_batch: bool = False,
    ) -> DistributedLoader: ...

    @overload
    def setup_dataloader(
        self,
        loader: DataLoader[Any],
        /,
        *more: DataLoader[Any],
        accumulate: int = 1,
        even: bool = True,
        keep_global_batch: bool = False,
    ) -> tuple[DistributedLoader, ...]: ...

    def setup_dataloader(
        self,
        loader: DataLoader[Any],
        /,
        *more: DataLoader[Any],
        accumulate: int = 1,
        even: bool = True,
        keep_global_batch: bool = False,
    ) -> DistributedLoader | tuple[DistributedLoader, ...]:
        """Return a loader that yields this rank's part of the batches, on this rank's device.

        Map-style data that is read in order, shuffled, or drawn by a WeightedRandomSampler is distributed
        again in each epoch. A sampler of another class and iterable data keep their order. `save` stores the
        position, and `load` restores it. Random draws while a sample is read depend on seed, epoch and sample
        alone. A data set without such draws can set `deterministic = True`, which saves microseconds per
        sample.

        Args:
            loader: a DataLoader. Its `batch_size` is the number of samples per rank and batch.
            more: further loaders, with the same settings.
            accumulate: number of batches per optimizer step. If it is above 1, give the DataLoader
                `drop_last=True`. Otherwise the last step of an epoch may have fewer batches; a warning of
                that is logged.
            even: whether all ranks get equally many batches. True: without `drop_last`, the last samples of
                an epoch are left out if they are fewer than the ranks. False: each sample is read once, and
                ranks may get different numbers of batches. Then no call in the loop may wait for other ranks.
            keep_global_batch: whether `load` on another number of ranks changes the loader's `accumulate`,
                so that a step has as many samples over all ranks as before. The loop must use
                `loader.accumulate`.

        Returns:
            The loader to iterate over; a tuple of loaders if several were given.

        Raises:
            ConfigError: `accumulate` is not an integer above 0, or a loader can't be distributed.

        Example:
            train, test = d.setup_dataloader(train, test)
            loader = d.setup_dataloader(DataLoader(data, 8, shuffle=True, drop_last=True), accumulate=4)
            for epoch in range(loader.epoch, 10):
                for inputs, targets in loader:
                    ...
        """
        _require_above(0, "accumulate", accumulate, "Give a number of batches, 1 or more.")
        context = self._session.context
        loaders = tuple(
            distribute(
                each,
                device=context.device,
                info=context.info,
                seed=self._seed or 0,
                accumulate=int(accumulate),
                even=even,
                keep_global_batch=keep_global_batch,
            )
            for each in (loader, *more)
        )
        for distributed_loader in loaders:
            distributed_loader.progress = self._session.heartbeat
            distributed_loader.workers_differ = self._workers_differ

        self._loaders += loaders
        return loaders if more else loaders[0]

    # Calls in the steps of the training loop.

    def backward(self, loss: torch.Tensor, *, accumulate: int = 1) -> None:
        """Compute the gradients of `loss / accumulate`, averaged over all ranks.

        Args:
            loss: a scalar.
            accumulate: number of backward passes per optimizer step. The step uses the mean of their
                gradients.

        Raises:
            ConfigError: `loss` is not a scalar tensor, `loss` depends on no parameter that takes gradients,
                or `accumulate` is not an integer above 0.

        Example:
            d.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        """
        self._session.context  # noqa: B018 - raises before launch.
        # Assign only if the value changes, because each assignment to a class attribute invalidates Python's
        # attribute caches for the class.
        if StopController.is_leaving:
            StopController.is_leaving = False
        self._session.heartbeat.backward_begins()

        _require_loss(loss)
        if accumulate != 1:
            _require_above(0, "accumulate", accumulate, "Give 1 or more backward passes.")
            loss = loss / accumulate
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one batch of an accumulated step.

        Args:
            model: the result of `setup_model`, or `torch.compile` of it.
            last: whether this is the last batch of the step. Only then do the ranks average gradients.

        Returns:
            A context manager.

        Example:
            for number, (inputs, targets) in enumerate(loader, 1):  # of a DataLoader with drop_last=True
                last = number % loader.accumulate == 0
                with d.accumulating(model, last=last):
                    d.backward(mse_loss(model(inputs), targets), accumulate=loader.accumulate)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        """
        self._session.context  # noqa: B018
        return nullcontext() if last else self._strategy.no_sync(_uncompiled(model))

    def should_stop(self) -> bool:
        """Decide whether to save and exit now. All ranks call it, once between two optimizer steps.

        Call it before the first batch of the step is taken, because batches that were yielded count as
        trained. The first call waits for all ranks and installs signal handlers. If it is never called,
        SIGTERM and SIGUSR2 end the program as usual.

        After True, call `save` and `stop`. A `with` block that ends without `stop` raises
        StoppedAtCheckpoint, unless `backward` was called after `should_stop` had returned True.

        Returns:
            True at the same step on all ranks: after SIGTERM or SIGUSR2 at any rank, after `slurmddp stop`,
            and shortly before the job's time limit.

        Example:
            if d.should_stop():
                d.save(step, model=model, optimizer=optimizer)
                d.stop()
        """
        self._session.heartbeat.step_begins()
        if self._opened is not None:
            self._opened.saves.poll()

        stops = self._session.stop.should_stop(self._session.context)
        if stops:
            self._session.milestones.stopped(self._session.stop.reason)
        return stops

    def stop(self) -> NoReturn:
        """Leave the program after a stop: wait until all saves are durable, then exit with code 75.

        All ranks call it, after `should_stop` has returned True and the state is saved. Exit code 75 asks
        slurmddp, or another batch script, to run the program again.

        Raises:
            StoppedAtCheckpoint: always; it is a SystemExit, so a program need not catch it.
            CheckpointError: on all ranks, if a save without `wait` failed.
        """
        self._session.context  # noqa: B018
        self.finish_saving()
        raise self._session.stopped()

    @property
    def stop_requested(self) -> bool:
        """Whether this rank knows of a request to stop.

        Ranks learn of it at different times. Use it to end a long loop between two steps early, such as an
        evaluation; `should_stop` then returns True on all ranks.
        """
        return self._session.stop.requested

    @property
    def stop_reason(self) -> str | None:
        """The source of the stop, such as "SIGTERM on rank 3 (node7)"; None without a request."""
        reason = self._session.stop.reason
        return None if reason is None else reason.text

    def heartbeat(self, phase: str = "evaluating") -> None:
        """Report progress to the watchdog during long work between two steps; call it repeatedly.

        Args:
            phase: the name of the work; docs/guides/watchdog.md lists the phases and their time limits.

        Raises:
            ConfigError: the phase is unknown.

        Example:
            for inputs, targets in held_out:
                d.heartbeat()
                loss = mse_loss(d.unwrap(model)(inputs), targets)
        """
        self._session.heartbeat.alive(phase)

    def clip_gradients(self, owner: nn.Module | Optimizer, max_norm: float) -> torch.Tensor:
        """Scale gradients in place so that their total 2-norm is at most `max_norm`.

        Call it after the last `backward` of a step. The gradients are averaged over the ranks then, so that
        all ranks scale by the same factor.

        Args:
            owner: the model or the optimizer whose gradients are clipped.
            max_norm: a number above 0.

        Returns:
            The norm before clipping, a scalar on the device of the gradients. It may be infinite or NaN.

        Raises:
            ConfigError: `max_norm` is not a number above 0, or precision is "fp16" and a parameter with a
                gradient belongs to no optimizer of `setup_optimizer`.

        Example:
            d.backward(loss)
            norm = d.clip_gradients(model, max_norm=1.0)
            optimizer.step()
        """
        _require_above(0, "max_norm", max_norm, "Give a number above 0.", Real)

        if isinstance(owner, Optimizer):
            parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
        else:
            _require("clip_gradients", nn.Module, "Give the model or the optimizer.", owner)
            parameters = list(owner.parameters())

        if self._scaler is not None:
            self._scaler.unscale(parameters)
        return gradient_norm(parameters, max_norm)

    # Values and waits between ranks.

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return a tensor reduced over all ranks, for metrics. All ranks call it.

        Args:
            tensor: of the same shape and dtype on all ranks. During the call, each rank holds the tensors of
                all ranks in memory. The result has no gradient function.
            op: "mean", "sum", "product", "max" or "min".

        Returns:
            A new tensor of the same shape, dtype and device, equal to the bit on all ranks.

        Raises:
            ConfigError: `op` is unknown, or it is "mean" for integers, or "max" or "min" for complex numbers.

        Example:
            mean = d.all_reduce(loss)
            samples = d.all_reduce(torch.tensor(len(inputs)), "sum")
        """
        _require("all_reduce", torch.Tensor, "Give torch.tensor(value).", tensor)
        return collectives.reduce(tensor, op, self.device)

    def all_gather(self, value: Shared) -> list[Shared]:
        """Return the values of all ranks, in the order of ranks. All ranks call it.

        Args:
            value: a tensor, or a plain value: None, bool, int, float, str, or lists, tuples and dicts of
                these and of tensors. Shapes and lengths may differ between ranks. Nothing is pickled.

        Returns:
            One value per rank. A tensor arrives on this rank's device, a tensor within a value on the CPU.

        Raises:
            CheckpointError: on all ranks, if a rank's value can't be sent.

        Example:
            names = d.all_gather({"rank": d.rank, "loss": loss.item()})
        """
        self._session.context  # noqa: B018
        return [self._on_device(gathered) for gathered in collectives.gather(value)]

    def broadcast(self, value: Shared) -> Shared:
        """Return the value of rank 0 on all ranks. All ranks call it; values of other ranks are ignored.

        Args:
            value: as for `all_gather`.

        Returns:
            Rank 0's value. A tensor arrives on this rank's device, a tensor within a value on the CPU.

        Raises:
            CheckpointError: on all ranks, if the value can't be sent.

        Example:
            name = d.broadcast("fit-7" if d.is_global_zero else "")
        """
        self._session.context  # noqa: B018
        received: Shared = self._on_device(collectives.from_zero(value))
        return received

    def _on_device(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    @contextmanager
    def rank_zero_first(self, *, local: bool = False) -> Iterator[None]:
        """Run a block on rank 0 first, and on the other ranks once rank 0 has left it.

        Use it for work whose result the other ranks read from disk, such as a download. All ranks enter it.

        Args:
            local: whether local rank 0 of each node goes first, instead of rank 0: for disks that nodes don't
                share.

        Raises:
            SlurmddpError: on the other ranks, if the block raised on the rank that went first.

        Example:
            with d.rank_zero_first():
                data = prepare("data")
        """
        rank = self.local_rank if local else self.rank
        if rank == 0:
            with collectives.agreed():
                yield
        else:
            with collectives.agreed():
                pass
            yield

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        if self._session.context.backend is not None:
            distributed.barrier()

    def print(self, *values: object) -> None:
        """Print on rank 0 only.

        Args:
            values: as for Python's `print`.

        Example:
            d.print("step", step, "loss", loss.item())
        """
        if self.is_global_zero:
            print(*values, flush=True)

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log rank 0's metrics after a step: for loggers, `slurmddp status` and the report of the run.

        Other ranks record nothing, so any rank may call it. In a job of slurmddp, the values are also lines
        of `metrics.jsonl` in the run folder; outside of such jobs only the `loggers` of this object get them.
        If a step is repeated after a restart, its newest values count. The report draws `loss` and
        `eval_loss` as training and held-out loss, and shows a name such as `images_per_s` as the speed.

        Args:
            metrics: one number per name: an int, a float, or a tensor with one element. The call waits for a
                tensor on a GPU, so don't log one in every step.
            step: the number of completed optimizer steps.

        Raises:
            ConfigError: on rank 0, if `step` or a value is not a single number, or a name is `step`,
                `attempt` or `time`.

        Example:
            if step % 10 == 0:
                d.log_metrics({"loss": d.all_reduce(loss), "accuracy": 0.93}, step)
        """
        if self.is_global_zero:
            journal = RunLog(self._session.run, active=True, loggers=self._session.loggers)
            _require_above(-1, "step", step, "Give the number of completed optimizer steps.")
            journal.metrics(int(step), numbers(metrics))

    # Saves and loads of checkpoints.

    @shown_as("saving")
    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        /,
        *,
        root: str | Path | None = None,
        keep_last: int = KEEP_LAST,
        keep_best: tuple[str, str] | None = None,
        wait: bool = True,
        metrics: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> Path:
        """Write a checkpoint of the objects, of all loaders and of the random states. All ranks call it.

        Rank 0 writes; of a sharded state, each node writes its shards. An error on any rank is raised on all
        ranks.

        Args:
            step: number of completed optimizer steps.
            state: objects by name. They have `state_dict` and `load_state_dict`, or are dicts of plain
                values.
            root: the folder of all checkpoints. If left out: `checkpoints` in the run folder in a job of
                slurmddp, else `checkpoints` in the working directory.
            keep_last: number of this program's checkpoints to keep. Older checkpoints are deleted, but two
                always stay.
            keep_best: the name of a metric, and "min" or "max": the checkpoint with the least or the greatest
                value stays too.
            wait: whether to return only when the checkpoint is durable. False: the call returns as soon as
                the state is copied into memory. Another process writes the copy, even if this process is
                killed.
            metrics: rank 0's numbers by name, as in `log_metrics`, by which `load` can choose the best
                checkpoint. NaN and infinity are not stored.
            objects: further objects, or all of them, as keywords.

        Returns:
            The folder of the checkpoint, on all ranks.

        Raises:
            CheckpointError: the checkpoint was not written, or an earlier save without `wait` failed.
            ConfigError: `step` is not a number, a name is given twice, an object has no `state_dict`, or
                `metrics` or `keep_best` is not of the form above.
            SlurmddpError: a trainable parameter holds NaN or infinity.

        Example:
            d.save(step, {"model": model, "optimizer": optimizer})
            d.save(step, model=model, root="/shared/fit", wait=False)
            d.save(step, model=model, metrics={"eval_loss": 0.31}, keep_best=("eval_loss", "min"))
        """
        named = merged(state, objects, "save(step, {...}, root=folder)")
        step = required_step(step, "save")
        if keep_best is not None:
            check_best(keep_best)
        keep = Keep(keep_last, keep_best)

        started = time.monotonic()
        folder = self._root_to_save_in(root)
        checkpoint = self._checkpointer.save(folder, step, named, metrics or {}, keep, wait=wait)
        self._session.stop.exclude_pause()
        if wait:
            self._session.stop.saved(time.monotonic() - started)

        return checkpoint

    @shown_as("saving")
    def finish_saving(self) -> None:
        """Wait until all saves without `wait` are durable. All ranks call it.

        Raises:
            CheckpointError: on all ranks, if such a save failed.
        """
        if self._opened is not None and self._opened.saves.unfinished:
            self._opened.finish()
            self._session.stop.exclude_pause()

    @shown_as("saving")
    def check_can_save(
        self,
        state: Mapping[str, Any] | None = None,
        /,
        *,
        root: str | Path | None = None,
        keep_last: int = KEEP_LAST,
        wait: bool = True,
        **objects: Any,
    ) -> float:
        """Write the files of a save, verify them and delete them. All ranks call it, before the first step.

        The check finds a full disk, a used-up quota, a folder without write permission, and an object that
        can't be stored. It includes the space for the states that torch's optimizers create in the first
        step. It also allocates the memory for later saves.

        Args:
            state, root, keep_last, wait, objects: as for the later `save`.

        Returns:
            The seconds that the check took, the same on all ranks.

        Raises:
            CheckpointError, ConfigError, SlurmddpError: for the reasons listed at `save`.

        Example:
            d.check_can_save(model=model, optimizer=optimizer)
        """
        named = merged(state, objects, "check_can_save({...}, root=folder)")
        seconds = self._checkpointer.check_can_save(self._root(root), named, keep_last=keep_last, wait=wait)
        self._session.stop.exclude_pause()
        self._session.startup.lap("checkpoint")
        self._session.stop.saved(seconds)
        return seconds

    def memory_save_is_due(self, every: int | Literal["auto"] = "auto") -> bool:
        """Decide whether to call `memory_save` after this step; equal on all ranks.

        Args:
            every: number of steps between two copies. "auto": an interval at which copies take less than 1 %
                of the training time; without an agent of slurmddp, no copies. 0: no copies.

        Returns:
            Whether to copy the state now.

        Example:
            if d.memory_save_is_due(every=50):
                d.memory_save(step, root="checkpoints", model=model, optimizer=optimizer)
        """
        if every != "auto":
            _require_above(-1, "every", every, 'Give a number of steps, or "auto".')
        return self._checkpointer.pace.is_due(every)

    @shown_as("saving")
    def memory_save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        /,
        *,
        root: str | Path | None = None,
        **objects: Any,
    ) -> None:
        """Copy the state of a save into the memory of each node, not to disk. All ranks call it.

        slurmddp's agent replaces a rank that dies, and `load` then resumes from the copy, unless `root` has
        a newer checkpoint. Without an agent, or with too little memory, the call copies nothing.

        Args:
            step, state, root, objects: as for `save`.

        Raises:
            ConfigError: for the reasons listed at `save`.
            SlurmddpError: a trainable parameter holds NaN or infinity.

        Example:
            if d.memory_save_is_due():
                d.memory_save(step, model=model, optimizer=optimizer)
        """
        named = merged(state, objects, "memory_save(step, {...}, root=folder)")
        step = required_step(step, "memory_save")
        self._checkpointer.copy_to_memory(self._root(root), step, named)
        self._session.stop.exclude_pause()

    @shown_as("loading")
    def load(
        self,
        state: Mapping[str, Any] | None = None,
        /,
        *,
        root: str | Path | None = None,
        step: int | None = None,
        best: tuple[str, str] | None = None,
        strict: bool = True,
        allow_other_config: bool = False,
        **objects: Any,
    ) -> int | None:
        """Load the newest, a chosen or the best state. All ranks call it, after all setup_ methods.

        Rank 0 chooses the newest checkpoint that verifies. Ranks that replace dead ranks load the state in
        their nodes' memory if it is as new. If `load` raises or finds no state, no object has changed.
        Outside of run folders rank 0 prints which step of which command was loaded.

        Args:
            state, root, objects: as for `save`; a dict is cleared and filled. Outside of jobs of slurmddp,
                if `root` is left out, this script must have written the newest checkpoint.
            step: load the checkpoint of this step.
            best: the name of a metric that was given to `save`, and "min" or "max": load the checkpoint with
                the least or the greatest value. If several are equal, load the newest.
            strict: whether checkpoint and arguments must have the same objects, and a model the same keys.
                False: objects, keys and loaders that the checkpoint lacks keep their state, and rank 0 logs
                the names without a counterpart. Shapes must fit in any case.
            allow_other_config: whether to accept a checkpoint with another `config`;
                SLURMDDP_ALLOW_OTHER_CONFIG=1 does the same.

        Returns:
            The number of completed steps of the state. None if there is no state; with `step` or `best` a
            missing state is an error.

        Raises:
            CheckpointError: the checkpoint can't be read, does not fit an object, was written by another
                program, or does not exist; the message lists the steps that exist.
            ConfigError: the checkpoint has another `config`, an object has no `load_state_dict`, or the
                arguments don't fit together.

        Example:
            step = d.load({"model": model, "optimizer": optimizer}) or 0
            d.save(1200, model=model, optimizer=optimizer, metrics={"eval_loss": 0.31})
            d.load(model=model, step=1200)  # or best=("eval_loss", "min")
            d.load(model=model, strict=False)  # what fits
        """
        named = merged(state, objects, "load({...}, root=folder)")
        check_choice(step, best)

        allow = allow_other_config or os.environ.get(ALLOW_OTHER_CONFIG_VARIABLE) == "1"
        load = partial(restore.load, step=step, best=best, strict=strict, allow_other_config=allow)
        is_chosen = step is not None or best is not None
        if root is None and not is_chosen and self._session.run.folder is None:
            load = partial(load, of_program=self._program)

        return self._load(load, self._root(root), named, is_chosen=is_chosen)

    def _load(
        self, load: Callable[..., Any], root: Path, objects: Mapping[str, Any], *, is_chosen: bool
    ) -> int | None:
        """Call a function that loads, and record and print which step it has loaded.

        Args:
            load: returns step and source ("memory" or "disk"), or None if there is no state.
            root: the folder of all checkpoints.
            objects: the objects to load into, by name.
            is_chosen: whether the program asked for a step or the best checkpoint.

        Returns:
            The step; None if there is no state.
        """
        newest = self._session.milestones.open(root)
        # The program may ask for a checkpoint that is still being written in the background: wait for it.
        if is_chosen:
            self.finish_saving()

        step = None
        self.resumed_from = None
        loaded = load(root, objects, self._checkpointer)
        if loaded is not None:
            step, self.resumed_from = loaded
            if not self._session.run.keeps(root):
                self._show_load(root, step, is_chosen=is_chosen)

        self._session.heartbeat.resumed(step or 0)
        self._session.milestones.resumed(None if is_chosen else newest, step, self.resumed_from)
        self._session.loggers.resumed(step)
        return step

    def _root_to_save_in(self, root: str | Path | None) -> Path:
        """Return the folder for a save.

        Before the first save there, print whether other programs use the folder.
        """
        folder = self._root(root).absolute()
        if not self.is_global_zero or folder in self._known_folders or self._session.run.keeps(folder):
            return folder

        self._known_folders.add(folder)
        line = shared_folder_line(folder, self._program)
        if line:
            print(line, file=sys.stderr, flush=True)

        return folder

    def _show_load(self, root: Path, step: int, *, is_chosen: bool) -> None:
        """Print which checkpoint was loaded.

        In a run of slurmddp print nothing, because the run folder records it.
        """
        self._resumed = None if is_chosen else (root, step)
        self._known_folders.add(root.absolute())
        if self.is_global_zero and self.resumed_from == "disk":
            print(loaded_line(root, step, self._program, is_chosen=is_chosen), file=sys.stderr, flush=True)

    @property
    def _checkpointer(self) -> Checkpointer:
        context = self._session.context
        if self._opened is None:
            saves = AsyncWriter(os.environ, context.info)
            saves.on_durable = self._session.stop.saved
            self._session.stop.is_writing = lambda: saves.is_writing
            self._opened = Checkpointer(
                loaders=self._loaders,
                unwrap=lambda model: _uncompiled(self.unwrap(model)),
                strategy=self._strategy,
                scaler=self._scaler,
                seed=self._seed,
                config=self._config,
                program=self._program,
                saves=saves,
                pace=SnapshotInterval(has_agent=saves.has_agent),
            )

        return self._opened

    def _step_taken(self, step: int, seconds: float) -> None:
        if self._opened is not None:
            self._opened.pace.step(seconds)
        self._session.milestones.step(step)

    def _leave(self) -> None:
        """Close the strategy, and wait for all saves; called at an orderly end."""
        took_no_step = self._session.heartbeat.awaits_first_step and not StopController.is_leaving
        if self._resumed is not None and took_no_step and self.is_global_zero:
            print(nothing_left_line(*self._resumed), file=sys.stderr, flush=True)

        if hasattr(self._strategy, "close"):
            self._strategy.close()

        if self._opened is not None:
            try:
                self.finish_saving()
            finally:
                self._opened.saves.close()
                self._opened = None

    def _root(self, root: str | Path | None) -> Path:
        """Return `root`, or its default (see `save`)."""
        if root is not None:
            _require("root", (str, os.PathLike), "Give the path of a folder.", root)
            check_folder("root", os.fspath(root))
            return Path(root)

        folder = self._session.run.folder
        return folder.checkpoints_dir if folder else Path("checkpoints")


def _require(where: str, kind: type | tuple[type, ...], hint: str, *values: object) -> None:
    """Raise ConfigError unless all `values` are instances of `kind`.

    Args:
        where: the method that was given the values, for the message.
        kind: the allowed type or types.
        hint: what to do.
        values: the values to check.
    """
    for value in values:
        if not isinstance(value, kind):
            raise ConfigError(f"{where} was given a {type(value).__name__}.", hint=hint)


def _require_above(bound: int, name: str, value: Any, hint: str, kind: Any = Integral) -> None:
    """Raise ConfigError unless `value` is a number of `kind` (by default an integer) above `bound`."""
    if not isinstance(value, kind) or not value > bound:
        raise ConfigError(f"{name} is {value!r}.", hint=hint)


def _require_loss(loss: Any) -> None:
    """Raise ConfigError unless `loss` is a scalar tensor that a backward pass can start from."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"backward was given a {type(loss).__name__}.", hint="Pass the loss as a tensor.")
    if loss.numel() != 1:
        raise ConfigError(
            f"backward was given a tensor of shape {tuple(loss.shape)}, but a loss must be a scalar.",
            hint="Give the mean over the batch: loss.mean(), or reduction='mean' of a loss of torch.",
        )
    if not loss.requires_grad:
        raise ConfigError(
            "backward was given a loss that depends on no parameter which takes gradients.",
            hint="Compute it from the model's output, without .detach(), .item() and torch.no_grad(), and "
            "leave requires_grad of at least one parameter on.",
        )


def _require_seed(seed: Any) -> None:
    if not isinstance(seed, Integral) or not 0 <= int(seed) < 1 << 64:
        raise ConfigError(f"seed is {seed!r}.", hint="Give an integer from 0 to 2^64 - 1.")


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside a result of `torch.compile`, and any other module unchanged."""
    return getattr(model, "_orig_mod", model)


def _as_rank(
    settings: Mapping[str, Any],
    program: UserProgram | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Launch this rank, which `Distributon.launch(function)` started, and call the function.

    Args:
        settings: the arguments of the Distributon of the rank.
        program: the program that called `launch`.
        function: called with the launched Distributon, `args` and `kwargs`.
        args: further positional arguments.
        kwargs: further keyword arguments.

    Returns:
        The result of the function.
    """
    distributon = Distributon(**settings)
    distributon._program = program
    return distributon.launch(function, *args, **kwargs)
