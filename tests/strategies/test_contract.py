"""Each strategy, shipped or of docs/extending.md, keeps the replicas equal."""

from __future__ import annotations

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.plugins import methods
from slurmddp.strategies import STRATEGIES, Strategy, build
from slurmddp.training.distributon import Distributon
from support.distributed import strategy_jobs
from support.distributed.ranks import run_ranks
from support.own import strategy as own

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

OWN = "support.own.strategy.MeanOfEachGradient"


@pytest.mark.parametrize("name", ["ddp", "ring", OWN])
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
        ("torch.nn.Linear", "refused its options"),
        ("collections.OrderedDict", "no method wrap and no no_sync and no unwrap"),
        (object(), "no method wrap"),
    ],
)
def test_d11_another_strategy_is_refused_with_the_alternatives(given, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Distributon(strategy=given)
