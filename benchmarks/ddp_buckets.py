"""Measure how far a resumed run deviates with torch's DistributedDataParallel, and with fixed buckets.

    python benchmarks/ddp_buckets.py [--ranks 4] [--steps 200] [--output FILE]

DistributedDataParallel packs gradients into buckets and packs them again after the first backward pass of a
process. A run that resumes sums its first step in the first layout where the undisturbed one has the second.
Both are trained here, on the same batches and without any randomness: a small GPT on the source text of
Python's json and asyncio modules, saved after a tenth of the steps and taken up by a new wrapper. The output
shows mean losses over all ranks, and weights; a difference of 0 means equal bits. Results in FILE for other
numbers of ranks stay.
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

CONTEXT, BATCH = 32, 4
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "torch's": {},
    "torch's, static_graph": {"static_graph": True},
    "torch's, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "fixed": None,
}
"""Options of DistributedDataParallel; None stands for slurmddp's strategy."""


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
        return copy.deepcopy({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        total, count = token_cross_entropy(self.model(inputs), targets)
        loss = total / count
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.d.all_reduce_mean(loss.detach().double()))


def read_batches(d: Distributon, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's batch of each step."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [SourceText(path=str(library / name), context=CONTEXT) for name in ("json", "asyncio")]
    samples = [text[index] for text in texts for index in range(len(text))]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    batches = []
    for step in range(steps):
        first = (step * d.world_size + d.rank) * BATCH
        chosen = [samples[order[index % len(order)]] for index in range(first, first + BATCH)]
        batches.append((torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])))
    return batches


def compare(d: Distributon, layout: str, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Train undisturbed, then the rest once more from the middle; return how the two differ."""
    saved_at = len(batches) // 10
    whole = Replicas(d, layout)
    for batch in batches[:saved_at]:
        whole.step(*batch)
    state = whole.state()
    losses = [whole.step(*batch) for batch in batches[saved_at:]]
    resumed = Replicas(d, layout)
    resumed.load(state)
    differences = [
        abs(resumed.step(*batch) - loss) for batch, loss in zip(batches[saved_at:], losses, strict=True)
    ]
    first = next((index for index, difference in enumerate(differences) if difference), None)
    pairs = zip(whole.net.parameters(), resumed.net.parameters(), strict=True)
    return {
        "ranks": d.world_size,
        "layout": layout,
        "steps": len(batches),
        "saved_at": saved_at,
        "final_loss": losses[-1],
        "first_step_that_differs": None if first is None else saved_at + first + 1,
        "by": 0.0 if first is None else differences[first],
        "largest_difference_of_losses": max(differences),
        "largest_difference_of_weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--steps", type=int, default=200)
    options = made.parse_args()
    with Distributon(options.ranks) as d:
        d.launch()
        torch.set_num_threads(1)
        batches = read_batches(d, options.steps)
        found = [compare(d, layout, batches) for layout in LAYOUTS]
        for line in found:
            d.print(json.dumps(line))
        if d.is_global_zero:
            keep(options.output, {"found": [*others_in(options.output, options.ranks), *found]})


def others_in(output: Path | None, ranks: int) -> list[dict[str, Any]]:
    """Return what a file of results holds of other numbers of ranks."""
    known = json.loads(output.read_text())["found"] if output and output.exists() else []
    return [line for line in known if line["ranks"] != ranks]


if __name__ == "__main__":
    main()
