"""The API: everything a training loop needs in order to run on one process or on a thousand.

    distributon = Distributon()
    distributon.launch()
    model = distributon.setup_model(model)
    optimizer = distributon.setup_optimizer(torch.optim.AdamW(model.parameters()))
    for inputs, targets in distributon.setup_dataloader(loader):
        loss = cross_entropy(model(inputs), targets)
        distributon.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

The same script works under plain `python` (with `num_devices` it starts its own ranks), under `srun` with one
task per rank, under `torchrun`, under `mpirun`, and in slurmddp's own jobs. How replicas agree is the
strategy's business, how processes start the launcher's, and how a process learns its place the environment's.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import distributed, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from slurmddp.environments.detect import detect
from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    ConfigError,
    SlurmddpError,
    StoppedAtCheckpoint,
)
from slurmddp.host.heartbeat_page import Pulse
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.strategies import Strategy, build
from slurmddp.training import rng
from slurmddp.training.checkpointing import restore
from slurmddp.training.checkpointing.async_writer import AsyncWriter
from slurmddp.training.checkpointing.checkpointer import Checkpointer
from slurmddp.training.checkpointing.snapshot_interval import SnapshotInterval
from slurmddp.training.data.loader import DistributedLoader, distribute
from slurmddp.training.heartbeat import Heartbeat, shown_as
from slurmddp.training.process_group import collectives, setup
from slurmddp.training.process_group.launch_check import refuse_to_multiply, require_devices
from slurmddp.training.run_log import Milestones
from slurmddp.training.startup_timer import StartupTimer
from slurmddp.training.stopping.controller import StopController
from slurmddp.training.stopping.exit_guard import ExitGuard

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

# gloo's threads let go of the last gradients a moment after the group is destroyed, and need the interpreter
# for it; a process that ends at once dies of "terminate called without an active exception" (torch 2.13).
_DRAIN_S = 0.1


class Distributon:
    """One training's view of all its processes; a context manager that leaves them on exit.

    `num_devices` is the number of ranks on this machine; "auto" takes what the scheduler started, or one per
    visible GPU, or one. `seed` makes initial weights equal on all ranks, later draws (dropout) different on
    each, and fixes the order of the data. `config`, any nested mapping of plain values, says what is
    computed: checkpoints keep it, and `load` refuses one that was written under another, key by key.
    """

    def __init__(
        self,
        num_devices: int | Literal["auto"] = "auto",
        *,
        strategy: str | Strategy = "ddp",
        backend: str = "auto",
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if num_devices != "auto" and (not isinstance(num_devices, int) or num_devices < 1):
            raise ConfigError(
                f"num_devices is {num_devices!r}.", hint='Give a number of ranks on this machine, or "auto".'
            )
        self._num_devices = num_devices
        self._strategy = build(strategy) if isinstance(strategy, str) else strategy
        self._backend, self._seed, self._config = backend, seed, config
        self._place: setup.RankContext | None = None
        self._loaders: list[DistributedLoader] = []
        self._models: list[nn.Module] = []
        self._run = RunContext.read(os.environ)
        self._stop = StopController(ExitGuard.standing, self._run)
        self._start_up = StartupTimer(os.environ)
        self._progress = Heartbeat(Pulse.attach(os.environ), self._start_up)
        self._progress.on_step = self._step_taken
        self._milestones = Milestones(self._run, self._start_up)
        self._opened: Checkpointer | None = None
        """The checkpointer; the first save or load makes it."""
        self.resumed_from: str | None = None
        """Where `load` found the state: `memory` or `disk`."""

    # How processes start, and end.

    def launch(self) -> Distributon:
        """Join the process group of all ranks; start the ranks first if no launcher has started them.

        A plain process that asks for several devices runs its command once per device. It exits with their
        code when they have ended, so the lines after `launch()` run in the ranks only. `launch` uses a
        default process group that exists already, for example Fabric's, and `close` leaves that group open.

        Raises:
            SlurmddpError: `launch` was called before.
            ConfigError: the environment does not fit `num_devices`.
        """
        if self._place is not None:
            raise SlurmddpError(
                "launch() was called a second time.", hint="Call it once, before any setup_ method."
            )
        info = detect(os.environ)
        wanted = self._ranks_wanted(info)
        if info.environment == "single" and wanted > 1 and not distributed.is_initialized():
            refuse_to_multiply()
            from slurmddp.launchers.local.launch import launch_script

            launch_script(wanted)
        require_devices(info, wanted)
        self._progress.enter("meeting")
        self._place = setup.start(info, backend=self._backend, stopped=lambda: self._stop.requested)
        self._pid = os.getpid()
        StopController.is_leaving = False
        atexit.register(self._close_at_exit)
        if self._seed is not None:
            rng.seed_everything(self._seed)
        self._progress.enter("loading", watched=False)
        self._start_up.lap("rendezvous")
        return self

    def _ranks_wanted(self, info: RankInfo) -> int:
        if self._num_devices != "auto":
            return self._num_devices
        return info.local_world_size if info.environment != "single" else max(1, setup.visible_gpus())

    def close(self) -> None:
        """Leave the other ranks; happens at the end of the program in any case, and only once."""
        atexit.unregister(self._close_at_exit)
        if self._place is None or os.getpid() != self._pid:  # A forked process ends, the rank goes on.
            return
        self._progress.enter("ending")
        try:
            self._close_saves()
        finally:
            self._leave(self._place)
        self._progress.enter("ending", watched=False)

    def _leave(self, place: setup.RankContext) -> None:
        self._stop.close()
        setup.finish(place)
        if place.backend is not None:
            time.sleep(_DRAIN_S)
        self._place = None

    def _close_at_exit(self) -> None:
        is_forked = os.getpid() != self._pid  # What it has copies of is still its parent's.
        if not is_forked and not hasattr(
            sys, "last_type"
        ):  # The program ends by itself, not by an exception.
            self.close()

    @property
    def _is_alone(self) -> bool:
        return self._place is None or self._place.backend is None

    def __enter__(self) -> Distributon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StoppedAtCheckpoint) and self._place is not None:
            self._milestones.stopped(self.stop_reason)
        code = error.code or EXIT_FINISHED if isinstance(error, SystemExit) else EXIT_FAILED
        if error is None:
            code = EXIT_FINISHED
        stopped = self._stopped() if code == EXIT_FINISHED and StopController.is_leaving else None
        if code in (EXIT_FINISHED, EXIT_STOPPED) or self._is_alone:
            self.close()
        else:  # The others may be stuck in a collective that this rank will never join: don't wait for them.
            atexit.unregister(self._close_at_exit)
        if stopped is not None:
            raise stopped

    # Where this process stands.

    @property
    def _here(self) -> setup.RankContext:
        if self._place is None:
            raise SlurmddpError(
                "This Distributon has not been launched, or is closed already.",
                hint="Call launch() first: right after the constructor, before the model is built.",
            )
        return self._place

    @property
    def rank(self) -> int:
        return self._here.info.rank

    @property
    def local_rank(self) -> int:
        return self._here.info.local_rank

    @property
    def node_rank(self) -> int:
        return self._here.info.node_rank

    @property
    def world_size(self) -> int:
        return self._here.info.world_size

    @property
    def device(self) -> torch.device:
        return self._here.device

    @property
    def is_global_zero(self) -> bool:
        """True on exactly one rank of the job: the one that writes files and prints."""
        return self.rank == 0

    # Setting up.

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Move `model` to this rank's device and return the module to call instead of it."""
        place = self._here
        wrapped = self._strategy.wrap(model.to(place.device), place)
        self._models.append(model)
        if self._seed is not None and place.info.rank > 0:
            # All ranks have built the same model; from here on each draws its own dropout.
            rng.seed_everything(rng.derive(self._seed, "rank", place.info.rank))
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `setup_model`; call it for evaluation, without the others."""
        return self._strategy.unwrap(model)

    def setup_optimizer(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Return `optimizer`; raises ConfigError unless it holds parameters that `setup_model` has moved."""
        self._require_models(optimizer)
        self._progress.follow(optimizer)
        return optimizer

    def _require_models(self, optimizer: Optimizer) -> None:
        known = {id(parameter) for model in self._models for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = [p for p in held if p.device != self._here.device or id(p) not in known]
        if strange:
            raise ConfigError(
                f"{len(strange)} of the {len(held)} parameters of this {type(optimizer).__name__} belong to "
                "no model that was set up.",
                hint="Call setup_model first, and build the optimizer from the parameters of its result.",
            )

    def setup_dataloader(
        self,
        loader: DataLoader[Any],
        *,
        accumulate: int = 1,
        even: bool = True,
        keep_global_batch: bool = False,
    ) -> DistributedLoader:
        """Return a loader that gives this rank its part of the batches, on its device.

        Map-style data, in order, shuffled or drawn by a WeightedRandomSampler, is dealt out again in each
        epoch. A sampler of your own and iterable data keep their order (`training/data/passthrough.py`).
        `batch_size` is per rank, `accumulate` the number of batches between two optimizer steps. With
        `keep_global_batch`, `load` changes the loader's `accumulate`, which the loop has to read, so that a
        step has as many samples over all ranks as when the checkpoint was written. What a sample draws at
        random while it is read follows from seed, epoch and sample alone; a data set that draws nothing can
        say so (`deterministic = True`) and save microseconds. Without `drop_last` the last few samples, fewer
        than ranks, are left out so that all ranks get equally many batches; `even=False` gives each sample
        exactly once, for an evaluation whose loop calls nothing that waits for other ranks. `save` and `load`
        keep the position.
        """
        if accumulate < 1:
            raise ConfigError(f"accumulate is {accumulate}.", hint="Give a number of batches, 1 or more.")
        place = self._here
        own = distribute(
            loader,
            device=place.device,
            info=place.info,
            seed=self._seed or 0,
            accumulate=accumulate,
            even=even,
            keep_global_batch=keep_global_batch,
        )
        own.progress = self._progress
        self._loaders.append(own)
        return own

    # In the loop.

    def backward(self, loss: torch.Tensor, *, parts: int = 1) -> None:
        """Compute the gradients of `loss` (a scalar) divided by `parts`, and leave their mean over all ranks.

        With `parts` backward passes per optimizer step, the step uses the mean over all of them.
        """
        self._here  # noqa: B018 - raises before launch.
        StopController.is_leaving = False
        self._progress.backward_begins()
        (loss / parts if parts != 1 else loss).backward()  # type: ignore[no-untyped-call]

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return a context for one of several passes before a step; the `last` exchanges the gradients.

        Both the forward and the backward pass belong inside.
        """
        self._here  # noqa: B018
        return nullcontext() if last else self._strategy.no_sync(model)

    def should_stop(self) -> bool:
        """Return whether to save and leave now; call it on every rank, once before each step.

        Ask before the step's first batch is taken: what a loop was handed counts as trained. True at the same
        step on all ranks, after SIGTERM or SIGUSR2 came to any of them, in a run of slurmddp after `slurmddp
        stop`, and when a save only just fits before the job's time limit. The first call waits for all ranks
        and puts handlers for the signals in place, so a program that never asks is ended by them as usual.

        After True, save and call `stop`. A program that leaves its loop instead has not finished either:
        leaving the `with` block raises StoppedAtCheckpoint, unless `backward` was called after the True.
        """
        self._progress.step_begins()
        if self._opened is not None:
            self._opened.saves.poll()
        stops = self._stop.tick(self._here)
        if stops:
            self._milestones.stopped(self.stop_reason)
        return stops

    def stop(self) -> NoReturn:
        """Leave the program after a stop: wait until all saves are durable, then exit with code 75.

        All ranks call it, after `should_stop` has returned True and the state is saved. The code 75 tells
        slurmddp, or a batch script of your own, that the training goes on when the program runs again.

        Raises:
            StoppedAtCheckpoint: always; it is a SystemExit, so a program need not catch it.
            CheckpointError: on all ranks, if a save without `wait` has failed.
        """
        self.finish_saving()
        raise self._stopped()

    def _stopped(self) -> StoppedAtCheckpoint:
        why = f" by {self.stop_reason}" if self.stop_reason else ""
        stopped = StoppedAtCheckpoint(
            f"The training was stopped{why}.",
            hint="Run the same command again to resume from its checkpoint.",
        )
        if not self._run.by_agent and self._place is not None and self.rank == 0:
            print(stopped, file=sys.stderr)  # Under an agent, the worker prints it.
        return stopped

    def heartbeat(self, phase: str = "evaluating") -> None:
        """Show the watchdog that long work of your own makes progress; call it again and again.

        Args:
            phase: what the work is; docs/watchdog.md lists the phases and their limits.

        Raises:
            ConfigError: the phase is unknown.
        """
        self._progress.alive(phase)

    alive = heartbeat
    """The name of `heartbeat` in 0.1.0."""

    @property
    def stop_requested(self) -> bool:
        """Whether this rank knows that it should stop soon; leave long loops between steps early then."""
        return self._stop.requested

    @property
    def stop_reason(self) -> str | None:
        """Who asked to stop, and why."""
        return self._stop.reason

    def all_reduce_mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of `tensor` over all ranks; for metrics: each rank holds all parts for a moment."""
        return collectives.mean(tensor, self._here.device)

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        if self._here.backend is not None:
            distributed.barrier()

    def print(self, *values: object) -> None:
        """Print on global rank 0 only."""
        if self.is_global_zero:
            print(*values, flush=True)

    # Checkpoints.

    @property
    def _checkpointer(self) -> Checkpointer:
        place = self._here
        if self._opened is None:
            saves = AsyncWriter(os.environ, place.info)
            saves.on_durable = self._stop.saved
            self._stop.is_writing = lambda: saves.busy
            self._opened = Checkpointer(
                loaders=self._loaders,
                unwrap=self.unwrap,
                seed=self._seed,
                config=self._config,
                saves=saves,
                pace=SnapshotInterval(keeps=saves.has_agent),
            )
        return self._opened

    @shown_as("saving")
    def save(
        self,
        root: str | Path | int | None = None,
        step: int | None = None,
        *,
        keep_last: int = 3,
        wait: bool = True,
        **objects: Any,
    ) -> Path:
        """Write a checkpoint of `objects`, of the loaders and of every rank's randomness; all ranks call it.

            d.save(step, model=model, optimizer=optimizer)
            d.save("/shared/fit", step, model=model, optimizer=optimizer)

        `root` is the folder of all checkpoints, and may be left out. It is then `checkpoints` in the run
        folder of a job of slurmddp, else `checkpoints` in the working directory. An object has `state_dict`
        and `load_state_dict`, or is a dict of plain values. Global rank 0 writes; all ranks return the
        checkpoint's folder when it is durable, or all raise. Without `wait` they return once the state is
        copied into memory, from which another process writes it, also when this one is killed; what goes
        wrong there is raised by the next `save`, by `finish_saving` or by `close`.
        """
        folder, number = self._root_and_step(root, step)
        started = time.monotonic()
        saved = self._checkpointer.save(folder, number, objects, keep_last=keep_last, wait=wait)
        self._stop.stood_still()
        if wait:
            self._stop.saved(time.monotonic() - started)
        return saved

    @shown_as("saving")
    def finish_saving(self) -> None:
        """Return when all that was saved without `wait` is durable, or raise on all ranks why it is not."""
        if self._opened is not None and self._opened.saves.unfinished:
            self._opened.finish()
            self._stop.stood_still()

    def memory_save_is_due(self, every: int | Literal["auto"] = "auto") -> bool:
        """Return whether to call `memory_save` after this step: the same on all ranks.

        Args:
            every: the number of steps between two copies; `auto` chooses it so that copies take less than
                1 % of the time, and makes none without an agent; 0 means never.
        """
        return self._checkpointer.pace.is_due(every)

    @shown_as("saving")
    def memory_save(self, root: str | Path, step: int, **objects: Any) -> None:
        """Copy what `save` would write into the memory of each node; nothing goes to the disk.

        slurmddp's agent replaces a rank that dies, and `load` then resumes from there if nothing newer is
        under `root`. Without an agent, or without memory for a copy, nothing is kept.
        """
        self._checkpointer.keep_in_memory(Path(root), step, objects)
        self._stop.stood_still()

    @shown_as("saving")
    def test_save(
        self, root: str | Path | None = None, *, keep_last: int = 3, wait: bool = True, **objects: Any
    ) -> float:
        """Do all that `save` would but leave nothing behind; return the seconds it took. All ranks call it.

        Before the first step it finds a full disk, a used-up quota, a folder that can't be written to, or an
        object that can't be stored; the room that torch's optimizers need later on is counted in. The memory
        for saves (without `wait`, say) is taken meanwhile.
        """
        started = time.monotonic()
        seconds = self._checkpointer.check_can_save(self._root(root), objects, keep_last=keep_last, wait=wait)
        self._stop.stood_still()
        self._start_up.lap("checkpoint")
        self._stop.saved(time.monotonic() - started)
        return seconds

    @shown_as("loading")
    def load(
        self, root: str | Path | None = None, *, allow_other_config: bool = False, **objects: Any
    ) -> int | None:
        """Give `objects` the state of the newest good checkpoint under `root` and return its step.

            step = d.load(model=model, optimizer=optimizer) or 0

        Without `root` it looks where `save` without `root` writes. It returns None, and changes nothing, when
        there is no checkpoint; it changes nothing either when it raises because one does not fit. All ranks
        call it, after all setup_ methods; rank 0 chooses. A checkpoint of another `config` is loaded only
        with `allow_other_config`, or SLURMDDP_ALLOW_OTHER_CONFIG=1. Ranks that take the place of others go
        on from the state in their nodes' memory if it is as new.
        """
        folder = self._root(root)
        newest = self._milestones.open(folder, self.rank)
        found = restore.load(
            folder,
            objects,
            self._checkpointer,
            allow_other_config=allow_other_config or os.environ.get(ALLOW_OTHER_CONFIG_VARIABLE) == "1",
            device=self._here.device,
        )
        step, self.resumed_from = (None, None) if found is None else found
        self._progress.resumed(step or 0)
        self._milestones.resumed(newest, step, self.resumed_from)
        return step

    def _step_taken(self, step: int, seconds: float) -> None:
        if self._opened is not None:
            self._opened.pace.step(seconds)
        self._milestones.step(step)

    def _close_saves(self) -> None:
        if self._opened is not None:
            try:
                self.finish_saving()
            finally:
                self._opened.saves.close()
                self._opened = None

    def _root(self, root: str | Path | None) -> Path:
        """Return `root`, or by default the run's checkpoints folder, or `./checkpoints` outside of a run."""
        if root is not None:
            return Path(root)
        return self._run.folder.checkpoints_dir if self._run.folder else Path("checkpoints")

    def _root_and_step(self, root: str | Path | int | None, step: int | None) -> tuple[Path, int]:
        """Return the two first arguments of `save`, of which the root may be left out."""
        if step is None and not isinstance(root, (str, os.PathLike)):
            root, step = None, root
        if step is None or isinstance(root, int):
            raise ConfigError(
                f"save() was given root={root!r} and step={step!r}.",
                hint="Call save(step, model=model), or save(folder, step, model=model).",
            )
        return self._root(root), step
