"""Measure how far a resumed run deviates with torch's DistributedDataParallel, and with fixed buckets.

    python benchmarks/ddp_buckets.py [--ranks 4] [--steps 200] [--output FILE]

DistributedDataParallel packs gradients into buckets, and packs them again after the first backward pass of a
process. So the first step of a resumed run sums in the first layout, where the undisturbed run sums in the
second.

The benchmark trains both runs, on the same batches and without any randomness. A small GPT learns the source
text of Python's json and asyncio modules. Its state after a tenth of the steps is loaded into a new wrapper,
which repeats the other steps. The output shows mean losses over all ranks, and weights; a difference of 0
means equal bits. FILE keeps the results of other numbers of ranks.
"""

from __future__ import annotations

import copy
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from record import keep, parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp import Distributon
from slurmddp.strategies.ddp import Ddp
from slurmddp.training.builtin.gpt import GPT
from slurmddp.training.builtin.text import VOCAB_SIZE, SourceText
from slurmddp.training.trainer.loop import token_cross_entropy

CONTEXT = 32
BATCH = 4
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "torch's": {},
    "torch's, static_graph": {"static_graph": True},
    "torch's, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "fixed": None,
}
"""Options of DistributedDataParallel; None stands for slurmddp's strategy."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""


class Replicas:
    """A model wrapped for its ranks, and its optimizer."""

    def __init__(self, d: Distributon, layout: str) -> None:
        torch.manual_seed(0)
        self.d = d
        self.net = GPT(vocab_size=VOCAB_SIZE, context=CONTEXT, width=32, layers=2, heads=2, dropout=0.0)
        options = LAYOUTS[layout]
        self.model: nn.Module
        if options is None:
            self.model = Ddp().wrap(self.net, d.device)
        else:
            self.model = DistributedDataParallel(self.net, **options)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state."""
        return copy.deepcopy({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: dict[str, Any]) -> None:
        """Load a state that `state` returned."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Take a step and return the mean loss over all ranks."""
        total, count = token_cross_entropy(self.model(inputs), targets)
        loss = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.d.all_reduce(loss.detach().double()))


def read_batches(d: Distributon, steps: int) -> list[Batch]:
    """Return this rank's batch of each step."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [SourceText(path=str(library / name), context=CONTEXT) for name in ("json", "asyncio")]
    samples = [text[index] for text in texts for index in range(len(text))]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()

    batches = []
    for step in range(steps):
        first = (step * d.world_size + d.rank) * BATCH
        chosen = [samples[order[index % len(order)]] for index in range(first, first + BATCH)]
        inputs = torch.stack([sample[0] for sample in chosen])
        targets = torch.stack([sample[1] for sample in chosen])
        batches.append((inputs, targets))
    return batches


def compare(d: Distributon, layout: str, batches: list[Batch]) -> dict[str, Any]:
    """Train undisturbed, then repeat the steps after a saved state; return the differences."""
    saved_at = len(batches) // 10
    whole = Replicas(d, layout)
    for batch in batches[:saved_at]:
        whole.step(*batch)
    state = whole.state()
    losses = [whole.step(*batch) for batch in batches[saved_at:]]

    resumed = Replicas(d, layout)
    resumed.load(state)
    losses_again = [resumed.step(*batch) for batch in batches[saved_at:]]

    differences = [abs(again - loss) for again, loss in zip(losses_again, losses, strict=True)]
    different = [index for index, difference in enumerate(differences) if difference]
    pairs = zip(whole.net.parameters(), resumed.net.parameters(), strict=True)
    return {
        "ranks": d.world_size,
        "layout": layout,
        "steps": len(batches),
        "saved_at": saved_at,
        "final_loss": losses[-1],
        "first_step_that_differs": saved_at + different[0] + 1 if different else None,
        "by": differences[different[0]] if different else 0.0,
        "largest_difference_of_losses": max(differences),
        "largest_difference_of_weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
    }


def results_of_other_ranks(output: Path | None, ranks: int) -> list[dict[str, Any]]:
    """Return the results for other numbers of ranks that a file holds."""
    if output is None or not output.exists():
        return []
    return [result for result in json.loads(output.read_text())["found"] if result["ranks"] != ranks]


def main() -> None:
    """Compare both runs for each layout and print the differences."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--steps", type=int, default=200)
    arguments = options.parse_args()

    with Distributon(arguments.ranks) as d:
        d.launch()
        torch.set_num_threads(1)
        batches = read_batches(d, arguments.steps)
        results = [compare(d, layout, batches) for layout in LAYOUTS]
        for result in results:
            d.print(json.dumps(result))
        if d.is_global_zero:
            others = results_of_other_ranks(arguments.output, arguments.ranks)
            keep(arguments.output, {"found": [*others, *results]})


if __name__ == "__main__":
    main()
