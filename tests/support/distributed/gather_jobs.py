"""Rank programs that send each other values, one of them hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slurmddp.collectives import values as collectives
from slurmddp.errors import CheckpointError, MismatchError, SlurmddpError
from slurmddp.training.distributon import Distributon


class Hostile:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.mark),)


def values() -> list[Any]:
    with Distributon() as d:
        d.launch()
        value = {
            "rank": d.rank, 7: (None, True, 1.5, float("inf"), 1 << 80, "ü"), "list": [[], {}],
            "state": torch.get_rng_state(), "words": torch.tensor([d.rank], dtype=torch.int64),
            "long": "x" * 100_000 * d.rank,
        }  # fmt: skip
        return [
            [_plain(gathered) for gathered in collectives.gather(value)],
            [_plain(gathered) for gathered in collectives.gather_to_zero(value) or []],
            _plain(collectives.from_zero(value)),
        ]


def _plain(value: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in value.items()}


class OwnError(MismatchError):
    def __init__(self, nodes: int) -> None:
        super().__init__(f"{nodes} nodes", hint="Look there.")
        self.exit_code = 76


def errors() -> list[Any]:
    """Return the errors that failures of rank 1 raise on this rank."""
    raised = []
    with Distributon() as d:
        d.launch()
        for share in (collectives.gather, collectives.gather_to_zero):
            raised.append(_raised(share, object() if d.rank == 1 else 1))
        raised.append(_raised(collectives.from_zero, object() if d.rank == 0 else 1))
        raised.append(
            _raised(lambda value: collectives.gather(value, OwnError(3) if d.rank == 1 else None), 1)
        )
        raised.append(collectives.gather(d.rank))

    return raised


def _raised(share: Any, value: Any) -> tuple[str, str, int]:
    try:
        share(value)
    except SlurmddpError as error:
        return type(error).__name__, error.message, error.exit_code

    return "", "", 0


def with_a_hostile_rank(mark: str) -> str:
    with Distributon() as d:
        d.launch()
        if d.rank == 1:
            _send(mark)
            return ""

        try:
            collectives.gather(0)
        except CheckpointError as error:
            return error.message

    return "nothing"


def _send(mark: str) -> None:
    """Send a pickle, as torch's collective does."""
    pickled, size = distributed.distributed_c10d._object_to_tensor(
        Hostile(mark), torch.device("cpu"), distributed.group.WORLD
    )
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    distributed.all_gather(sizes, size)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(pickled)] = pickled
    distributed.all_gather([torch.zeros_like(padded) for _ in range(2)], padded)
