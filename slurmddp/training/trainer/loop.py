"""The default program of a run: one explicit loop on the public API, to copy and change.

    program: {_target_: slurmddp.training.trainer.train}

It trains any model on batches that are pairs (inputs, targets) or dicts, and resumes bit for bit after a
stop. docs/guides/data.md lists the shapes of a batch, and the attributes of a data set that the trainer uses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch.nn import functional

from slurmddp.checkpoint.files.manifest import folder_name
from slurmddp.checkpoint.state.shards import has_shards
from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE
from slurmddp.errors import ConfigError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.runs.folder.late_files import is_there
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.checkpointing import restore
from slurmddp.training.checkpointing.finite import gradient_norm
from slurmddp.training.distributon import Distributon
from slurmddp.training.instantiate import instantiate
from slurmddp.training.run_log import RunLog, Stopwatch
from slurmddp.training.trainer.batch import IGNORED, forward, has_ignored_targets, kind_of, loss_of_output
from slurmddp.training.trainer.best_checkpoint import BestCheckpoint
from slurmddp.training.trainer.callbacks import Callbacks
from slurmddp.training.trainer.changed_rates import apply_changes, configured_rates
from slurmddp.training.trainer.compilation import uncompiled
from slurmddp.training.trainer.components import Components, build_components, is_due
from slurmddp.training.trainer.evaluate import evaluate, has_samples
from slurmddp.training.trainer.spike_guard import Spike, SpikeGuard
from slurmddp.training.trainer.step_loss import StepLoss
from slurmddp.training.trainer.time_budget import TimeBudget
from slurmddp.training.trainer.utilization import Utilization, utilization_text


def token_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = IGNORED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy in nats, and the number of targets other than `ignore_index`.

    Args:
        logits: shape (..., classes), a float type.
        targets: shape (...), int64 class numbers.
        ignore_index: targets of this class number are ignored, for example padding.

    Returns:
        Two scalar tensors.

    Raises:
        ConfigError: `logits` or `targets` has another shape or dtype.
    """
    tensors = isinstance(logits, torch.Tensor) and isinstance(targets, torch.Tensor)
    if not (
        tensors
        and logits.ndim > 1
        and logits.is_floating_point()
        and targets.dtype == torch.int64
        and targets.numel() * logits.shape[-1] == logits.numel()
    ):
        raise ConfigError(
            f"`loss` is token_cross_entropy, but the model's output is {kind_of(logits)} and the data's "
            f"target is {kind_of(targets)}.",
            hint="It needs outputs (..., classes) of a float type and targets (...) of class numbers, int64. "
            "For other data choose another loss, such as loss._target_=torch.nn.functional.mse_loss, or "
            "loss=null for the loss that the model's output holds.",
        )

    classes = targets.flatten()
    total = functional.cross_entropy(
        logits.flatten(0, -2), classes, ignore_index=ignore_index, reduction="sum"
    )
    return total, (classes != ignore_index).sum()


def train(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    """Train from the newest checkpoint to `train.steps`.

    Args:
        distributon: a launched Distributon.
        config: the run's configuration.
        folder: the run folder.

    Raises:
        StoppedAtCheckpoint: the training was stopped; its state is saved.
    """
    components = build_components(distributon, config)
    callbacks = Callbacks(instantiate(config.get("callbacks") or {}, _key_="callbacks"))
    training = Training(distributon, components, callbacks, folder)
    batches = training.components.batches()

    training.resume()
    training.check_time()
    training.warn_of_unused_metrics()
    training.call_back("on_train_start")

    while not training.is_complete():
        try:
            _take_steps(distributon, training, batches)
        except Spike as spike:
            batches = training.roll_back(spike)

    if training.evaluation_is_due():
        training.evaluate()
    training.record_memory()
    training.save()
    training.call_back("on_train_end")
    training.write_sample()


def _take_steps(distributon: Distributon, training: Training, batches: Iterator[Any]) -> None:
    """Train until the last step.

    Raises:
        Spike: on all ranks, if training has to go back to a checkpoint.
        StoppedAtCheckpoint: the training was stopped.
    """
    settings = training.components.settings
    while not training.is_complete():
        if distributon.should_stop():
            training.stop()

        if training.evaluation_is_due():
            training.evaluate()
        if training.save_is_due():
            training.save(wait=False)
        elif distributon.memory_save_is_due(settings.memory_save_every):
            training.memory_save()

        training.take_step(batches)
        if training.went_back():
            batches = training.components.batches()

        if is_due(settings.log_every, training.step) or training.step == settings.steps:
            training.log()
            training.check_time()


class Training:
    """State of the training between two steps, and its operations: take a step, evaluate, save, stop."""

    def __init__(
        self, distributon: Distributon, components: Components, callbacks: Callbacks, folder: RunFolder
    ) -> None:
        self.distributon = distributon
        self.components = components
        self._callbacks = callbacks
        self.step = 0
        self._last_step = components.settings.steps
        """The step after which the training is complete."""
        self._is_first = True
        """Whether this attempt has not taken a step yet."""

        self._evaluated_at = -1
        """The step of the last evaluation; -1 before the first evaluation."""
        self._metrics: dict[str, float] = {}
        """Loss and metrics of the last evaluation of this attempt."""
        self._best = BestCheckpoint(components.settings.best)
        self._is_best = False
        """Whether the last evaluation is the best so far, and its step has no checkpoint yet."""
        self._saved: tuple[int, int] | None = None
        """Step of the newest checkpoint, and the step of the last evaluation before it."""
        self._unchecked: int | None = None
        """Step of the loaded checkpoint, until the step after it is known to be finite."""

        self._losses: list[float] = []
        """Losses of the steps since the last log line, averaged over ranks."""
        self._norms: list[float] = []
        """Gradient norms of the same steps, before clipping."""
        self._pending: list[torch.Tensor] = []
        """Loss and gradient norm of this rank's last steps, alternating, on the device.

        They are read together, because each read makes the GPU wait.
        """
        scales = distributon._scaler is not None
        self._guard = SpikeGuard(components.settings.on_spike, components.bare_model, scales=scales)
        self._lr = 0.0
        self._rates = configured_rates(components.optimizer)
        """Learning rate and weight decay of the configuration, by group of parameters."""

        self._root = folder.checkpoints_dir
        self._run_name = folder.name
        self._journal = RunLog(
            RunContext.read(os.environ, folder),
            active=distributon.is_global_zero,
            unit=components.unit,
            loggers=distributon._session.loggers,
        )
        self._utilization = Utilization(distributon, components, self._journal)
        self._stopwatch = Stopwatch()
        self._budget = TimeBudget(components.settings.max_time)
        self._sampled = is_there(folder.sample_file)
        """Whether an earlier attempt has written the text that the model generates at the end."""

    @property
    def _saved_objects(self) -> dict[str, Any]:
        """The objects that checkpoints store, by name: components, and callbacks with a state."""
        objects = self.components.saved_objects
        if self._callbacks.has_state:
            objects["callbacks"] = self._callbacks
        return objects

    def resume(self) -> None:
        """Resume from the newest checkpoint; without a checkpoint, check that one can be written."""
        progress: dict[str, Any] = {}
        self._best.resume(self._root)
        step = self.distributon.load(root=self._root, progress=progress, **self._saved_objects)
        if step is None:
            self.distributon.check_can_save(
                root=self._root,
                keep_last=self.components.settings.keep_last,
                wait=False,
                progress=self._progress(),
                **self._saved_objects,
            )
            self._budget.resume({})
            return

        self.step = step
        self._evaluated_at = progress["evaluated_at"]
        self._losses = list(progress["losses"])
        self._norms = list(progress.get("norms", ()))
        self._guard.load_state_dict(progress.get("guard", {}))
        self._budget.resume(progress)

        components = self.components
        saved_rates = progress.get("rates", self._rates)
        apply_changes(saved_rates, self._rates, components.optimizer, components.scheduler)

        self._saved = (self.step, self._evaluated_at)
        is_unchecked = self._guard.mode == "fail" and self.distributon.resumed_from == "disk"
        self._unchecked = step if is_unchecked else None
        self.distributon.print(f"resumed at step {step}")

    def is_complete(self) -> bool:
        """Decide whether all steps were taken or `train.max_time` is over, equally on all ranks."""
        return self.step >= self._last_step

    def check_time(self) -> None:
        """End the training after the current step if `train.max_time` is over. All ranks call it."""
        if not self.is_complete() and self._budget.is_used_up():
            self._last_step = self.step
            settings = self.components.settings
            text = f"train.max_time={settings.max_time} is over: the training ends after step {self.step}"
            self._warn("max_time", f"{text} of {settings.steps}.")

    def warn_of_unused_metrics(self) -> None:
        """Warn if the configuration has metrics but there is no held-out data to compute them on."""
        components = self.components
        if components.metrics and not has_samples(components):
            names = ", ".join(f"metrics.{name}" for name in components.metrics)
            self._warn(
                "metrics",
                f"{names} will not be computed: {type(components.data).__name__} has no held-out data. Give "
                "it a method heldout(), and set train.eval_batches=1 or more.",
            )

    def warn_of_ignored_targets(self, batch: Any) -> None:
        """Warn if the model returns a mean loss per batch, and batches have ignored targets.

        A batch with few other targets then has the same weight in the loss as other batches.

        Args:
            batch: a batch of the first step of this attempt.
        """
        components = self.components
        batches_per_step = self.distributon.world_size * components.loader.accumulate
        if components.loss is loss_of_output and batches_per_step > 1 and has_ignored_targets(batch):
            self._warn(
                "loss",
                "With loss=null, the loss of a step is the mean of the means of its batches. Some targets of "
                "this data don't count (-100), so a batch with few targets weighs as much as other batches. "
                "Name a loss that returns a sum and a count: see docs/guides/loss.md.",
            )

    def take_step(self, batches: Iterator[Any]) -> None:
        """Take one optimizer step, on `accumulate` batches."""
        components = self.components
        accumulate = components.loader.accumulate
        self._stopwatch.start()
        self._guard.begin_step()

        step_loss = StepLoss(self.distributon, accumulate)
        for number in range(1, accumulate + 1):
            batch = next(batches)
            with self.distributon.accumulating(components.model, last=number == accumulate):
                loss = components.loss(*forward(components.model, batch, components.bare_model))
                loss = self._guard.marked(step_loss.add(loss))
                self.distributon.backward(loss, accumulate=accumulate)

        total = step_loss.finish(components.bare_model)
        self._pending += [total, self._update()]
        self.step += 1
        self._stopwatch.stop(components.units_per_step(self.distributon.world_size))

        if self._is_first:
            self.warn_of_ignored_targets(batch)
            self._utilization.count(batch)
        self._is_first = False
        self.call_back("on_step_end")

    def went_back(self) -> bool:
        """If the first step after a load has a loss that is not finite, resume from an older checkpoint.

        The loaded checkpoint may contain the cause, and each attempt would then end at the same step. Only
        the first step after a load is checked, and only if `train.on_spike` is "fail".

        Returns:
            Whether training has gone back to an older checkpoint.
        """
        loaded = self._unchecked
        self._unchecked = None
        if loaded is None:
            return False

        try:
            self._collect_losses()
        except SlurmddpError as problem:
            self._go_back(loaded, problem)
            return True

        return False

    def _go_back(self, loaded: int, problem: SlurmddpError) -> None:
        """Quarantine the checkpoint of step `loaded`, and resume from the checkpoint before it.

        Raises:
            SlurmddpError: there is no checkpoint before it.
        """
        name = folder_name(loaded)
        message = f"{problem.message} It is the first step after checkpoint {name}"
        quarantined = restore.quarantine(self._root, loaded)
        if quarantined is None:
            hint = f"{problem.hint} To resume from an older checkpoint, move {self._root / name} away."
            raise SlurmddpError(f"{message}.", hint=hint) from problem

        new_name, step_before = quarantined
        text = f"{message}, which is now {new_name}: training goes back to step {step_before}."
        self._warn("checkpoint", text)
        self.resume()

    def call_back(self, hook: str, *args: Any) -> None:
        """Call the method named `hook` of all callbacks (see `Callback`)."""
        self._callbacks.call(hook, self, *args)

    def _update(self) -> torch.Tensor:
        """Clip the gradients, step optimizer, average and scheduler, and remove the gradients.

        Returns:
            The norm of the gradients before clipping, a scalar.
        """
        components = self.components
        optimizer = components.optimizer
        model = components.bare_model
        if self.distributon._scaler is not None:
            self.distributon._scaler.unscale(model.parameters())
        norm = gradient_norm(model.parameters(), components.settings.clip_norm)

        # To skip the update, remove the gradients: an optimizer changes no parameter without a gradient, and
        # its step still counts.
        if self._guard.skips(norm):
            optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        # Check for gradients, because the loss scaler of fp16 removes them too if it skips a step.
        is_taken = any(parameter.grad is not None for parameter in model.parameters())
        optimizer.zero_grad(set_to_none=True)
        if components.ema is not None and is_taken:
            components.ema.update()

        self._lr = float(optimizer.param_groups[0]["lr"])
        if components.scheduler is not None:
            components.scheduler.step()
        return norm

    def _collect_losses(self) -> None:
        """Read losses and gradient norms of the last steps, and check them.

        Raises:
            SlurmddpError: a loss or norm is not finite, and the step's update was not skipped.
            Spike: `train.on_spike` is "rollback", and a loss or norm is a spike or not finite.
        """
        if not self._pending:
            return

        # Reading the values waits until a GPU has computed these steps, so the time counts for the rate.
        self._stopwatch.start()
        device = self.distributon.device
        values = torch.stack([value.to(device, torch.float32) for value in self._pending])
        means = self.distributon.all_reduce(values).tolist()
        self._stopwatch.stop(0)
        self._pending.clear()

        losses = means[::2]
        norms = means[1::2]
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), self.step - len(losses) + 1):
            problem = self._guard.problem(step, loss, norm)
            if not problem:
                self._losses.append(loss)
                if math.isfinite(norm):
                    self._norms.append(norm)
            elif self._guard.mode == "skip" and not math.isfinite(norm):
                self._record_skip(step, self._not_finite(problem))
            elif self._guard.mode == "rollback":
                raise Spike(step, problem, self._not_finite(problem).hint)
            else:
                raise self._not_finite(problem)

    def _record_skip(self, step: int, problem: SlurmddpError) -> None:
        """Count a step whose update was skipped, and warn of it.

        Raises:
            SlurmddpError: there were too many of them.
        """
        count = self._guard.record(step, problem)
        self._warn("spike", f"{problem.message} Its update is left out ({count}).")

    def _warn(self, about: str, text: str) -> None:
        self._journal.event("warned", about=about, text=text)
        self.distributon.print(text)

    def roll_back(self, spike: Spike) -> Iterator[Any]:
        """Load a checkpoint from before a spike, and skip the data up to the spike.

        The newest checkpoint whose step is a multiple of `train.save_every` is loaded. Stops save at other
        steps too, and these are not used, so that interruptions don't change how far training goes back. If
        there was a spike again since the last rollback, an older checkpoint than then is loaded, if there is
        one. Newer checkpoints are quarantined.

        Returns:
            The batches after the data of the spike.

        Raises:
            SlurmddpError: there is no checkpoint before the spike, or there were too many rollbacks.
        """
        guard = self._guard
        self.distributon.finish_saving()

        spoilt = guard.spoilt_checkpoint(spike.step)
        count = guard.record(spike.step, spike)
        # Keep these values: `resume` replaces the state of the guard by an older state from the checkpoint.
        reaction_steps = guard.reaction_steps
        data_end = spike.step + guard.left_out

        every = self.components.settings.save_every
        go_back = partial(restore.go_back, self._root, every, checkpointer=self.distributon._checkpointer)
        if (spoilt is None or not go_back(before=spoilt)) and not go_back(before=spike.step):
            raise SlurmddpError(f"{spike.message} There is no checkpoint to go back to.", hint=spike.hint)
        self.resume()

        left_out = data_end - self.step - guard.left_out
        batches = self.components.batches()
        for _ in range(left_out * self.components.loader.accumulate):
            next(batches)

        guard.reaction_steps = reaction_steps
        guard.rollback_step = self.step
        guard.left_out += left_out
        self._warn(
            "spike",
            f"{spike.message} Training is back at step {self.step} and leaves out the data of "
            f"{left_out} steps ({count}).",
        )
        return batches

    def _not_finite(self, problem: str) -> SlurmddpError:
        """Return the error for a spike or a value that is not finite, with a hint how to continue."""
        hint = "Try a smaller optimizer.lr, more scheduler.warmup_steps, or train.clip_norm=1. "
        if self._guard.mode == "fail":
            resume = f"slurmddp resume {self._run_name} train.on_spike=skip"
            hint += f"`{resume}` leaves out such steps; train.on_spike=rollback goes back to a checkpoint. "

        hint += "Nothing of that step is saved"
        if self._saved is not None:
            hint += (
                f"; checkpoint {folder_name(self._saved[0])} was saved before it. To resume from it, "
                f"change the run's config.yaml and set {ALLOW_OTHER_CONFIG_VARIABLE}=1 for `slurmddp resume`"
            )
        return SlurmddpError(problem, hint=f"{hint}.")

    def log(self) -> None:
        """Log loss, learning rate, gradient norm and speed: means over the steps since the last line."""
        self._collect_losses()
        rate = self._stopwatch.take_rate()
        # The updates of all steps since the last line were skipped, so there is nothing to log.
        if not self._losses:
            return

        loss = sum(self._losses) / len(self._losses)
        norm = sum(self._norms) / max(1, len(self._norms))
        self._losses.clear()
        self._norms.clear()

        utilization = self._utilization.at(rate)
        self._journal.step(self.step, loss=loss, lr=self._lr, grad_norm=norm, rate=rate, **utilization)
        self.distributon.print(
            f"step {self.step}: loss {loss:.4f}, lr {self._lr:.2e}, gradient norm {norm:.3g}, "
            f"{rate:,.0f} {self.components.unit}/s{utilization_text(utilization)}"
        )

    def evaluation_is_due(self) -> bool:
        """Decide whether to evaluate now.

        True before the first step, after the last step, and every `train.eval_every` steps.
        """
        settings = self.components.settings
        if self._evaluated_at == self.step or not has_samples(self.components):
            return False
        return self.step in (0, self._last_step) or is_due(settings.eval_every, self.step)

    def evaluate(self) -> None:
        """Evaluate, and log the loss and metrics of the held-out data.

        Raises:
            StoppedAtCheckpoint: a stop interrupted the evaluation, which the next attempt repeats.
        """
        # Check the last losses first: this raises if one is not finite, before time goes into the evaluation.
        self._collect_losses()
        metrics = evaluate(self.distributon, self.components)
        # A stop has interrupted the evaluation. Stop at this step, because the next attempt repeats the
        # evaluation only if it resumes here.
        if metrics is None:
            self.stop()

        self._evaluated_at = self.step
        self._metrics = metrics
        self._is_best = self.step > 0 and self._best.improves(metrics)

        self._journal.metrics(self.step, metrics)
        text = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.distributon.print(f"step {self.step}: {text.replace('eval_loss', 'held-out loss', 1)}")
        self.record_memory()
        self.call_back("on_evaluation_end", metrics)

    def save_is_due(self) -> bool:
        """Decide whether to save now.

        Call it after a due evaluation of this step, because the best value so far is saved too.
        """
        return self._is_best or (self.step > 0 and is_due(self.components.settings.save_every, self.step))

    def record_memory(self) -> None:
        """Record the peak memory of all ranks in the run folder, if this attempt has taken a step."""
        if not self._is_first:
            self._utilization.record_memory(self.step)

    def save(self, *, wait: bool = True) -> None:
        """Save the state, unless it was saved already; with `wait`, return when it is durable."""
        if self._saved != (self.step, self._evaluated_at):
            self.call_back("on_save")
            self.distributon.save(
                self.step,
                self._state(),
                root=self._root,
                keep_last=self.components.settings.keep_last,
                keep_best=self._best.by,
                metrics=self._metrics if self._evaluated_at == self.step else None,
                wait=wait,
            )
            self._is_best = False
            self._saved = (self.step, self._evaluated_at)
        elif wait:
            self.distributon.finish_saving()

    def memory_save(self) -> None:
        """Copy the state into memory, from which a rank that replaces a dead rank resumes."""
        self.distributon.memory_save(self.step, root=self._root, **self._state())

    def _state(self) -> dict[str, Any]:
        self._collect_losses()
        return {"progress": self._progress(), **self._saved_objects}

    def _progress(self) -> dict[str, Any]:
        return {
            "evaluated_at": self._evaluated_at,
            "losses": self._losses,
            "norms": self._norms,
            "guard": self._guard.state_dict(),
            "rates": self._rates,
            **self._budget.progress(),
        }

    def stop(self) -> NoReturn:
        """Save the state, if this attempt has taken a step, and leave.

        Raises:
            StoppedAtCheckpoint: always, on all ranks.
        """
        reason = self.distributon.stop_reason or "a request"
        # Before the first step of this attempt, the loaded checkpoint is still the state.
        if not self._is_first:
            self.save()

        raise StoppedAtCheckpoint(
            f"Stopped at step {self.step} of {self.components.settings.steps} by {reason}.",
            hint="The next start resumes from this step.",
        )

    def write_sample(self) -> None:
        """Let the model generate `train.sample_chars` characters, and write them to the run folder.

        Do nothing unless the model has a method `generate`, and the data set has `encode` and `decode`.
        """
        model: Any = self.components.evaluated_model
        data = self.components.data
        count = self.components.settings.sample_chars
        can_generate = hasattr(model, "generate") and hasattr(data, "encode") and hasattr(data, "decode")
        self.distributon.heartbeat("ending")

        # Of a sharded model all ranks run `generate`, because they gather its weights together.
        takes_part = self.distributon.is_global_zero or has_shards(model)
        # If this attempt has taken no step, an earlier one has finished the training and may have written the
        # sample.
        is_written = self._is_first and self._sampled
        if can_generate and count and takes_part and not is_written:
            model.eval()
            prompt = data.encode("def ")[None].to(self.distributon.device)
            generator = torch.Generator().manual_seed(0)
            with uncompiled(self.components.settings.compile):
                text = data.decode(model.generate(prompt, count, generator=generator)[0])
            self._journal.sample(text)

        self.distributon.barrier()
