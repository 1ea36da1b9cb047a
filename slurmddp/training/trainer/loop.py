"""The default program of a run: one explicit loop on the public API, to copy and change.

    program: {_target_: slurmddp.training.trainer.train}

It trains any model on data of pairs (inputs, targets) and resumes bit for bit after a stop. docs/data.md
lists the attributes of a data set that it uses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.nn import functional

from slurmddp.checkpoint.files.manifest import folder_name
from slurmddp.environments.names import ALLOW_OTHER_CONFIG_VARIABLE
from slurmddp.errors import ConfigError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.checkpointing.finite import gradient_norm
from slurmddp.training.checkpointing.restore import quarantine
from slurmddp.training.distributon import Distributon
from slurmddp.training.run_log import RunLog, Stopwatch
from slurmddp.training.trainer.components import Components, build_components, is_due
from slurmddp.training.trainer.evaluate import evaluate, has_samples


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats.

    Args:
        logits: shape (..., classes), a float type.
        targets: shape (...), int64 class numbers.

    Returns:
        A scalar.

    Raises:
        ConfigError: a shape or a type differs.
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
            f"`loss` is token_cross_entropy, but the model's output is {_kind(logits)} and the data's target "
            f"is {_kind(targets)}.",
            hint="It needs outputs (..., classes) of a float type and targets (...) of class numbers, int64. "
            "For other data choose another loss, such as loss._target_=torch.nn.functional.mse_loss.",
        )
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def train(distributon: Distributon, config: dict[str, Any], folder: RunFolder) -> None:
    """Train from the newest checkpoint to `train.steps`.

    Args:
        distributon: launched.
        config: the run's configuration.
        folder: the run folder.

    Raises:
        StoppedAtCheckpoint: the training was stopped; its state is saved.
    """
    training = Training(distributon, build_components(distributon, config), folder)
    settings, batches = training.components.settings, training.components.batches()
    training.resume()
    while training.step < settings.steps:
        if distributon.should_stop():
            training.stop()
        if training.evaluation_is_due():
            training.evaluate()
        training.take_step(batches)
        if training.went_back():
            batches = training.components.batches()
        if is_due(settings.log_every, training.step) or training.step == settings.steps:
            training.log()
        if is_due(settings.save_every, training.step) and training.step < settings.steps:
            training.save(wait=False)
        elif distributon.memory_save_is_due(settings.memory_save_every) and training.step < settings.steps:
            training.memory_save()
    if training.evaluation_is_due():
        training.evaluate()
    training.save()
    training.write_sample()


class Training:
    """One training between two steps."""

    def __init__(self, distributon: Distributon, components: Components, folder: RunFolder) -> None:
        self.distributon, self.components = distributon, components
        self.step = 0
        self._evaluated_at = -1
        self._saved: tuple[int, int] | None = None
        """Step of the newest checkpoint, and the step of the last evaluation before it."""
        self._losses: list[float] = []
        """Losses of the steps since the last log line, averaged over ranks."""
        self._pending: list[torch.Tensor] = []
        """Loss and gradient norm of this rank's last steps, alternating, on the device.

        Reading each value would make the GPU wait."""
        self._unchecked: int | None = None
        """Step of the loaded checkpoint, until the step after it is known to be finite."""
        self._lr = 0.0
        self._is_first = True
        self._root = folder.checkpoints_dir
        run = RunContext.read(os.environ, folder)
        loggers = distributon._session.loggers
        self._journal = RunLog(run, active=distributon.is_global_zero, unit=components.unit, loggers=loggers)
        self._stopwatch = Stopwatch()
        self._sampled = folder.sample_file.exists()

    def resume(self) -> None:
        """Resume from the newest checkpoint; without a checkpoint, check that one can be written."""
        progress: dict[str, Any] = {}
        step = self.distributon.load(self._root, progress=progress, **self.components.saved_objects)
        if step is None:
            self.distributon.check_can_save(
                self._root,
                keep_last=self.components.settings.keep_last,
                wait=False,
                progress={"evaluated_at": -1, "losses": []},
                **self.components.saved_objects,
            )
            return
        self.step, self._evaluated_at = step, progress["evaluated_at"]
        self._losses = list(progress["losses"])
        self._saved = (self.step, self._evaluated_at)
        self._unchecked = step if self.distributon.resumed_from == "disk" else None
        self.distributon.print(f"resumed at step {step}")

    def take_step(self, batches: Iterator[Any]) -> None:
        """Take one optimizer step, on `accumulate` batches."""
        components, accumulate = self.components, self.components.loader.accumulate
        self._stopwatch.start()
        total = torch.zeros((), device=self.distributon.device)
        for number in range(1, accumulate + 1):
            inputs, targets = _pair(next(batches))
            with self.distributon.accumulating(components.model, last=number == accumulate):
                loss = components.loss(components.model(inputs), targets)
                self.distributon.backward(loss, accumulate=accumulate)
            total += loss.detach() / accumulate
        self._pending += [total, self._update()]
        self.step += 1
        self._stopwatch.stop(self._samples_per_step() * components.units_per_sample)
        self._is_first = False

    def went_back(self) -> bool:
        """Go back to an older checkpoint if the first step after a load is not finite; return whether it did.

        The loaded checkpoint may be spoilt. Each attempt would then end at the same step. Training goes back
        at most once per checkpoint.
        """
        loaded, self._unchecked = self._unchecked, None
        if loaded is None:
            return False
        try:
            self._collect_losses()
        except SlurmddpError as problem:
            self._go_back(loaded, problem)
            return True
        return False

    def _go_back(self, loaded: int, problem: SlurmddpError) -> None:
        found = f"{problem.message} It is the first step after checkpoint {folder_name(loaded)}"
        renamed = quarantine(self._root, loaded)
        if renamed is None:
            hint = (
                f"{problem.hint} To resume from an older one, move {self._root / folder_name(loaded)} away."
            )
            raise SlurmddpError(f"{found}.", hint=hint) from problem
        bad_name, before = renamed
        text = f"{found}, which is now {bad_name}: training goes back to step {before}."
        self._journal.event("warned", about="checkpoint", text=text)
        self.distributon.print(text)
        self.resume()

    def _update(self) -> torch.Tensor:
        """Take the optimizer's step; return the norm of the gradients before clipping, a scalar."""
        optimizer, scheduler = self.components.optimizer, self.components.scheduler
        norm = gradient_norm(self.components.bare_model, self.components.settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._lr = float(optimizer.param_groups[0]["lr"])
        if scheduler is not None:
            scheduler.step()
        return norm

    def _samples_per_step(self) -> int:
        loader = self.components.loader
        return (loader.batch_size or 1) * loader.accumulate * self.distributon.world_size

    def _collect_losses(self) -> None:
        """Read the losses of the last steps; raises SlurmddpError if a loss or norm is not finite."""
        if not self._pending:
            return
        device = self.distributon.device
        values = torch.stack([value.to(device, torch.float32) for value in self._pending])
        means = self.distributon.all_reduce(values).tolist()
        self._pending.clear()
        losses, norms = means[::2], means[1::2]
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), self.step - len(losses) + 1):
            if not math.isfinite(loss):
                raise self._not_finite(f"The loss of step {step} is {loss}.")
            if not math.isfinite(norm):
                raise self._not_finite(f"The gradient norm of step {step} is {norm}.")
        self._losses += losses

    def _not_finite(self, problem: str) -> SlurmddpError:
        hint = "Try a smaller optimizer.lr, more scheduler.warmup_steps, or train.clip_norm=1. "
        hint += "Nothing of that step is saved"
        if self._saved is not None:
            hint += (
                f"; checkpoint {folder_name(self._saved[0])} is from before it. To resume from it, change "
                f"the run's config.yaml and set {ALLOW_OTHER_CONFIG_VARIABLE}=1 for `slurmddp resume`"
            )
        return SlurmddpError(problem, hint=f"{hint}.")

    def log(self) -> None:
        """Log the mean loss since the last line."""
        self._collect_losses()
        loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        rate = self._stopwatch.take_rate()
        self._journal.step(self.step, loss=loss, lr=self._lr, rate=rate)
        self.distributon.print(f"step {self.step}: loss {loss:.4f}, {rate:,.0f} {self.components.unit}/s")

    def evaluation_is_due(self) -> bool:
        settings = self.components.settings
        if self._evaluated_at == self.step or not has_samples(self.components):
            return False
        return self.step in (0, settings.steps) or is_due(settings.eval_every, self.step)

    def evaluate(self) -> None:
        """Log the held-out loss; an interrupted evaluation is repeated after the resume."""
        loss = evaluate(self.distributon, self.components)
        if loss is None:  # A further step would skip this evaluation for good.
            self.stop()
        self._evaluated_at = self.step
        self._journal.evaluation(self.step, loss)
        self.distributon.print(f"step {self.step}: held-out loss {loss:.4f}")

    def save(self, *, wait: bool = True) -> None:
        """Save the state; with `wait`, return when it is durable."""
        if self._saved != (self.step, self._evaluated_at):
            keep_last = self.components.settings.keep_last
            self.distributon.save(self._root, self.step, keep_last=keep_last, wait=wait, **self._state())
            self._saved = (self.step, self._evaluated_at)
        elif wait:
            self.distributon.finish_saving()

    def memory_save(self) -> None:
        """Copy the state into memory, from which the replacement of a dead rank resumes."""
        self.distributon.memory_save(self._root, self.step, **self._state())

    def _state(self) -> dict[str, Any]:
        self._collect_losses()
        progress = {"evaluated_at": self._evaluated_at, "losses": self._losses}
        return {"progress": progress, **self.components.saved_objects}

    def stop(self) -> NoReturn:
        """Save and leave; raises StoppedAtCheckpoint on all ranks."""
        reason = self.distributon.stop_reason or "a request"
        if not self._is_first:  # Otherwise this attempt has nothing to save.
            self.save()
        raise StoppedAtCheckpoint(
            f"Stopped at step {self.step} of {self.components.settings.steps} by {reason}.",
            hint="The next start resumes from there.",
        )

    def write_sample(self) -> None:
        """Let the model generate `train.sample_chars` characters, if model and data can do so."""
        model: Any = self.components.bare_model
        data, count = self.components.data, self.components.settings.sample_chars
        can = hasattr(model, "generate") and hasattr(data, "encode") and hasattr(data, "decode")
        self.distributon.heartbeat("ending")
        if can and count and self.distributon.is_global_zero and not self._sampled:
            model.eval()
            prompt = data.encode("def ")[None].to(self.distributon.device)
            generator = torch.Generator().manual_seed(0)
            self._journal.sample(data.decode(model.generate(prompt, count, generator=generator)[0]))
        self.distributon.barrier()


def _pair(batch: Any) -> tuple[Any, torch.Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"of type {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        found = f"of {len(batch)} parts"
    raise ConfigError(
        f"The data gives batches {found}; the trainer needs pairs (inputs, targets).",
        hint="Return pairs from the data set, or name your own training function in program._target_.",
    )
