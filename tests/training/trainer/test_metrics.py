"""Metrics of the held-out data: the shipped accuracy, sums over batches and ranks, refused values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.training.trainer.metrics import Sums, accuracy, add, means


def test_accuracy_counts_right_targets_of_any_shape_and_leaves_out_ignored_ones() -> None:
    scores = torch.eye(3)[torch.tensor([[0, 1], [2, 2]])]
    assert accuracy(scores, torch.tensor([[0, 1], [2, 0]])) == (3, 4)
    assert accuracy(scores, torch.tensor([[0, -100], [2, 0]])) == (2, 3)
    assert accuracy(scores, torch.tensor([[0, 1], [2, 0]]), ignore_index=0) == (2, 2)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.zeros(4)),
        ({"logits": torch.zeros(4, 3)}, torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_accuracy_refuses_data_that_is_not_classified(outputs: Any, targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"accuracy got outputs that are .* and targets that are"):
        accuracy(outputs, targets)


def test_a_mean_is_weighted_by_its_samples_and_a_pair_by_its_count() -> None:
    ranks: list[Sums] = [{}, {}, {}]
    for sums, value, pair, samples in [
        (ranks[0], 1.0, (1, 4), 4),
        (ranks[0], torch.tensor([3.0]), (torch.tensor(1), 1), 2),
        (ranks[2], 5, (0, 3), 1),
    ]:
        add(sums, "mean", value, samples)
        add(sums, "share", pair, samples)
        add(sums, "empty", (0, 0), samples)
    found = means(ranks)
    assert found["mean"] == (4 * 1 + 2 * 3 + 5) / 7 and found["share"] == 2 / 8
    assert math.isnan(found["empty"])


@pytest.mark.parametrize("value", [torch.zeros(3), "high", None, (1, 2, 3), (torch.zeros(2), 1)])
def test_a_value_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="The metric f1 gives a value that is"):
        add({}, "f1", value, 1)
