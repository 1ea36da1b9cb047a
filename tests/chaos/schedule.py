"""Draw faults and their moments from a seed alone, so that a run of faults can be repeated. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Planned:
    """One fault to come: its kind, the steps to let pass before it, and where its own luck starts."""

    number: int
    kind: str
    after_steps: int
    seed: str

    def luck(self) -> random.Random:
        """Return the random numbers of this fault; the same ones at every call."""
        return random.Random(self.seed)


def draw(kinds: Sequence[str], faults: int, seed: int, most_steps: int) -> list[Planned]:
    """Return `faults` planned faults: every kind once in each round, rounds in random order.

    `most_steps` is the largest number of steps to let pass between progress and the next fault.
    """
    luck = random.Random(seed)
    order: list[str] = []
    while len(order) < faults:
        order += luck.sample(kinds, len(kinds))
    return [
        Planned(number, kind, luck.randint(1, most_steps), f"{seed}/{number}")
        for number, kind in enumerate(order[:faults])
    ]
