"""A training function for `program._target_`."""

from typing import Any

import torch

from slurmddp import Distributon
from slurmddp.runs.folder.layout import RunFolder


def count_to(
    distributon: Distributon, config: dict[str, Any], folder: RunFolder, *, goal: int = 1000
) -> None:
    """Fit one weight to `goal`, and resume from a checkpoint after a stop."""
    model = distributon.setup_model(torch.nn.Linear(1, 1, bias=False))
    optimizer = distributon.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    step = distributon.load(model=model, optimizer=optimizer) or 0
    while step < config["train"]["steps"]:
        if distributon.should_stop():
            distributon.save(step, model=model, optimizer=optimizer)
            distributon.stop()

        error = (model(torch.ones(1, 1, device=distributon.device)) - goal).square().mean()
        distributon.backward(error)
        optimizer.step()
        optimizer.zero_grad()
        step += 1

    distributon.save(step, model=model, optimizer=optimizer)
    distributon.print(f"after {step} steps the error is {error:.3g}")
