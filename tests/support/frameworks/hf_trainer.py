"""Train by the Trainer of Hugging Face transformers, which saves checkpoints by itself."""

import json
import os
from typing import Any

import progress
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Model(torch.nn.Module):
    """A linear model with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean squared error as the loss."""
        return {"loss": (self.layer(x) - labels).square().mean()}


class Steps(TrainerCallback):
    """Callback that stores the first step of this training, and slows down its steps."""

    first = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Store the step at which the training begins."""
        self.first = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait as long as a step of this test is to last."""
        progress.pace()


def step_of(state: Any) -> int:
    """Return the step of a saved trainer state."""
    return int(json.loads(state.read_text())["global_step"])


states = sorted(progress.FOLDER.glob("checkpoint-*/trainer_state.json"), key=step_of)
step = step_of(states[-1]) if states else 0
steps = Steps()
trainer = Trainer(
    model=Model(),
    args=TrainingArguments(
        output_dir=str(progress.FOLDER),
        max_steps=progress.last_step(step),
        per_device_train_batch_size=2,
        save_steps=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    ),
    train_dataset=[{"x": torch.ones(1), "labels": torch.ones(1)}] * 64,
    callbacks=[steps],
)
trainer.train(resume_from_checkpoint=str(states[-1].parent) if states else None)
rank = trainer.args.process_index
world_size = trainer.args.world_size
progress.record(rank, int(os.environ["LOCAL_RANK"]), world_size, steps.first, trainer.state.global_step)
