"""Train by the Trainer of transformers, which saves just in time after SIGTERM and then returns."""

import time

import steps
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import get_last_checkpoint


class Model(torch.nn.Module):
    """A linear model with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean squared error as the loss."""
        return {"loss": (self.layer(x) - labels).square().mean()}


class Steps(TrainerCallback):
    """A callback that records each step.

    At one step it waits for the timer after which a signalled rank saves.
    """

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Record a step that has ended."""
        steps.taken(state.global_step)
        (jit,) = (
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, JITCheckpointCallback)
        )
        while state.global_step == steps.WAITS_AT and not jit.jit_manager.is_checkpoint_requested:
            time.sleep(0.02)


checkpoint = get_last_checkpoint(str(steps.FOLDER))
trainer = Trainer(
    model=Model(),
    args=TrainingArguments(
        output_dir=str(steps.FOLDER),
        max_steps=steps.last_step(int(checkpoint.rpartition("-")[2]) if checkpoint else 0),
        per_device_train_batch_size=2,
        enable_jit_checkpoint=True,
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    ),
    train_dataset=[{"x": torch.ones(1), "labels": torch.ones(1)}] * 64,
    callbacks=[Steps()],
)
trainer.train(resume_from_checkpoint=checkpoint)
