"""A copy in memory holds what was copied, however the tensors lie there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.checkpoint.snapshot import Snapshots, read_parts
from slurmddp.node import memory

LARGE = (300, 400)
TENSORS = {
    "small": torch.randn(7, 3),
    "large": torch.randn(LARGE),
    "one number": torch.tensor(4.5),
    "nothing": torch.empty(0, 5),
    "nothing of a column": torch.empty(5, 4)[:, 1:1],
    "column": torch.randn(9, 4)[:, 1],
    "large columns": torch.randn(LARGE).t(),
    "one element of a column": torch.randn(1, 8)[:, 3],
    "part": torch.arange(100)[10:20],
    "spread": torch.tensor([1.0]).expand(12),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "large conjugate": torch.randn(LARGE, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "words of 16 bits": torch.randn(11).bfloat16(),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "truths": torch.tensor([True, False, True]),
    "eight bits": torch.randn(6).to(torch.float8_e4m3fn),
    "trained": torch.nn.Parameter(torch.randn(5)),
    "trained and large": torch.nn.Parameter(torch.randn(LARGE)),
}


@pytest.fixture
def snapshots() -> Iterator[Snapshots]:
    made = Snapshots()
    yield made
    made.close()


def copied(snapshots: Snapshots, state: dict[str, Any]) -> dict[str, Any]:
    number = snapshots.take(Path("/root"), 3, 0, state, {})
    assert number is not None
    descriptor = snapshots.descriptors[number]
    sealed = memory.read_header(descriptor)
    assert sealed is not None
    with memory.mapped(descriptor, sealed) as parts:
        return dict(read_parts(3, parts).state)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, of which not every type can be compared, as one row of bytes."""
    values = tensor.detach().resolve_neg().resolve_conj()
    return torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1)).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_each_kind_of_tensor_between_two_others(snapshots: Snapshots, name: str) -> None:
    state = {"before": torch.arange(13, dtype=torch.int16), "it": TENSORS[name], "after": torch.arange(3.0)}
    found = copied(snapshots, state)
    for key, tensor in state.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].shape == tensor.shape
        assert torch.equal(bits(found[key]), bits(tensor))


def test_only_what_is_the_same_elements_is_one_tensor(snapshots: Snapshots) -> None:
    weight = torch.randn(4, 4)
    state = {
        "a": weight, "tied": weight.view(4, 4), "turned": weight.t(), "bits": weight.view(torch.int32),
        "row": weight[0], "nothing": weight[:0],
    }  # fmt: skip
    found = copied(snapshots, state)
    assert found["a"] is found["tied"]
    others = [found[name] for name in ("a", "turned", "bits", "row", "nothing")]
    assert len({id(tensor) for tensor in others}) == len(others)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
