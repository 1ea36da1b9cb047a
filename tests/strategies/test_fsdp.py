"""fsdp computes the numbers of one process, and each rank holds its part of them only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.errors import ConfigError
from slurmddp.strategies import build
from slurmddp.strategies.fsdp import units_of
from support.distributed import fsdp_jobs, strategy_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.mark.parametrize(
    "parameter",
    [torch.ones(()), torch.ones(3, 2).t(), torch.ones(0, 5)],
    ids=["scalar", "transposed", "empty"],
)
def test_a_parameter_that_torch_can_not_shard_is_refused(parameter: torch.Tensor) -> None:
    for error in run_ranks(strategy_jobs.error_of_a_parameter, 2, parameter):
        assert "can't shard" in error and "ParameterDict" in error and "strategy=ddp" in error


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(fsdp_jobs.train, 1, "single", {})[0]
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (3, {"activation_checkpointing": True, "reshard_after_forward": False}),
        (2, {"wrap": ["Linear"]}),
    ],
)
def test_d11_fsdp_equals_one_process_and_holds_a_part(
    ranks: int, options: dict[str, Any], reference: dict[str, Any]
) -> None:
    found = run_ranks(fsdp_jobs.train, ranks, "fsdp", options)
    for one in found:
        torch.testing.assert_close(one["norms"], reference["norms"], rtol=1e-5, atol=1e-6)
        assert one["state"].keys() == reference["state"].keys(), "plain names"
        for name, value in reference["state"].items():
            torch.testing.assert_close(one["state"][name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert one["unwrapped"]
        # Rows that the ranks can't share evenly cost at most one row of each tensor.
        assert one["numbers held"] < reference["numbers held"] / ranks * 1.35
    for name, value in found[0]["state"].items():
        assert torch.equal(value, found[1]["state"][name]), name


@pytest.mark.parametrize(
    "options", [{"param_dtype": "bfloat16", "reduce_dtype": "float32"}, {"reduce_dtype": "bfloat16"}], ids=str
)
def test_mixed_precision_gathers_and_reduces_in_the_given_types(
    options: dict[str, str], reference: dict[str, Any]
) -> None:
    first = run_ranks(fsdp_jobs.train, 2, "fsdp", options)[0]
    assert all(value.dtype == torch.float32 for value in first["state"].values())
    assert first["norms"] != pytest.approx(reference["norms"], rel=1e-5)
    assert first["norms"] == pytest.approx(reference["norms"], rel=0.05)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        self.mixed = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])])


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (None, ["stack.0", "stack.1", "lists.0.0", "lists.1.0"]),
        (["LayerNorm"], ["mixed.1"]),
        (["Sequential", "Linear"], ["stack.0", "stack.1", "mixed", "lists.0.0", "lists.1.0"]),
    ],
)
def test_units_are_the_outermost_modules_of_the_chosen_classes(
    classes: list[str] | None, names: list[str]
) -> None:
    model = _Model()
    assert units_of(model, classes) == [model.get_submodule(name) for name in names]


def test_modules_that_share_a_parameter_are_no_units_but_a_repeated_module_is_one() -> None:
    model = _Model()
    model.stack[1][0].weight = model.mixed[0].weight
    model.stack.append(model.stack[0])
    assert units_of(model) == [model.get_submodule(name) for name in ("stack.0", "lists.0.0", "lists.1.0")]


def test_unknown_classes_and_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linaer.*Did you mean Linear"):
        units_of(_Model(), ["Linaer"])
    with pytest.raises(ConfigError, match=r"strategy.param_dtype is 'bf16'.*Choose one of float32"):
        build("fsdp", param_dtype="bf16")


@pytest.mark.parametrize("optimizer", ["Adafactor", "LBFGS", "Rprop"])
def test_an_optimizer_that_torch_can_not_step_on_shards_is_refused(optimizer: str) -> None:
    for error in run_ranks(strategy_jobs.trained_by, 2, optimizer, {"name": "fsdp"}):
        assert f"torch's {optimizer} can't step the sharded parameters" in error and "AdamW" in error


@pytest.mark.parametrize(("optimizer", "exact"), [("Muon", True), ("Adagrad", False), ("NAdam", False)])
def test_other_optimizers_step_shards_as_they_step_whole_tensors(optimizer: str, exact: bool) -> None:
    """Muon, in float64, orthogonalises the whole matrix of each shard."""
    whole, sharded = (
        run_ranks(strategy_jobs.trained_by, 2, optimizer, {"name": name}, exact) for name in ("ddp", "fsdp")
    )
    for weights in sharded:
        for weight, other in zip(weights, whole[0], strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=1e-12)
