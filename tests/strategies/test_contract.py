"""Each strategy, shipped or of docs/guides/extending.md, computes the steps of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.plugins import methods
from slurmddp.strategies import STRATEGIES, Strategy, build
from slurmddp.training.distributon import Distributon
from support.distributed import contract_jobs, strategy_jobs
from support.distributed.contract_jobs import ALONE, CASES, OWN
from support.distributed.ranks import run_ranks
from support.own import strategy as own

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

NAMES = [" ".join([name, *(f"{key}={one}" for key, one in options.items())]) for name, options in CASES]
TOLERANCE = 1e-4
"""Largest difference from one process, of weights below 1."""


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    """The weights of one process."""
    found: dict[str, torch.Tensor] = contract_jobs.trained(build("single"))["weights"]
    return found


@pytest.fixture(scope="module")
def ranks(rank_server: None) -> list[dict[str, Any]]:
    """Of each rank, the trainings of all cases, with and without their reductions; one start for all."""
    return [dict(zip(NAMES, found, strict=True)) for found in run_ranks(contract_jobs.contract, 2, CASES)]


def difference(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert weights.keys() == reference.keys(), "a strategy keeps the names of the parameters"
    return max(float((weights[name] - value).abs().max()) for name, value in reference.items())


def test_c5_no_registered_strategy_is_left_out() -> None:
    assert {name for name, _ in (*CASES, *ALONE)} == {*STRATEGIES, OWN}


@pytest.mark.parametrize("case", NAMES)
def test_c5_every_strategy_computes_the_steps_of_one_process(case: str, ranks, reference) -> None:
    for rank in ranks:
        found, without_reduction = rank[case]
        assert difference(found["weights"], reference) <= TOLERANCE
        assert difference(found["weights"], ranks[0][case][0]["weights"]) == 0, "replicas have equal bits"
        assert difference(without_reduction["weights"], reference) > 10 * TOLERANCE, "the control"
        assert found["unwrapped"], "`unwrap` returns the module that was given"


@pytest.mark.parametrize("name", [*STRATEGIES, OWN])
def test_c5_every_strategy_trains_one_process_without_a_group(name: str, reference) -> None:
    found = contract_jobs.trained(build(name))
    assert found["unwrapped"]
    if name != "diloco":  # Its outer optimizer is another algorithm.
        assert difference(found["weights"], reference) == 0


@pytest.mark.parametrize("name", ["ddp", OWN])
def test_d11_a_strategy_averages_gradients_and_keeps_replicas_equal(name: str) -> None:
    first, second = run_ranks(strategy_jobs.contract, 2, name)
    whole = run_ranks(strategy_jobs.contract, 1, "single")[0]
    for key in ("mean", "accumulated", "weights"):
        for parameter, value in first[key].items():
            assert torch.equal(value, second[key][parameter]), (key, parameter)
            torch.testing.assert_close(value, whole[key][parameter], rtol=1e-4, atol=1e-6)
    for found in (first, second):
        assert found["own part is local"]
        assert found["unwrapped"], "`unwrap` returns the module that was given"


@pytest.mark.parametrize("name", [*STRATEGIES, OWN])
def test_d11_no_strategy_changes_the_model_of_a_single_process(name: str) -> None:
    strategy, model = build(name), torch.nn.Linear(2, 2)
    wrapped = strategy.wrap(model, torch.device("cpu"))
    assert strategy.unwrap(wrapped) is model
    with strategy.no_sync(wrapped):
        wrapped(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_d11_a_strategy_is_given_as_path_class_or_object() -> None:
    assert len(methods(Strategy)) <= 6
    for given in (OWN, own.MeanOfEachGradient, own.MeanOfEachGradient()):
        assert type(Distributon(strategy=given)._strategy).__name__ == "MeanOfEachGradient"
    assert build(OWN, half=True).dtype == torch.float16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("dpp", "no strategy 'dpp'.*Did you mean ddp.*package.module.Name"),
        ("zero", "no strategy 'zero'.*Known: data_parallel, ddp"),
        (
            "support.own.strategy.MeanOfEachGradien",
            "has no 'MeanOfEachGradien'.*Did you mean MeanOfEachGradient",
        ),
        ("no_such_package.Strategy", "there is no module no_such_package"),
        ("torch.nn.Linear", "does not accept its options"),
        ("collections.OrderedDict", "no method wrap and no no_sync and no unwrap"),
        (object(), "no method wrap"),
    ],
)
def test_d11_another_strategy_is_refused_with_the_alternatives(given, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Distributon(strategy=given)
