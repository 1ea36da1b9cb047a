"""Strategy `parameter_server` on ranks: equal to one process, bounded, counted, exact after a resume."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from slurmddp.errors import ConfigError
from slurmddp.strategies import build, parameter_server
from slurmddp.strategies.parameter_server import ServedOptimizer
from support.distributed import server_jobs, strategy_jobs
from support.distributed.rank_jobs import Net
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


class Rateless(torch.optim.Optimizer):
    """An optimizer without a learning rate."""


def message_bytes(net: torch.nn.Module) -> int:
    """Return the size of a message: all values, a byte for each parameter, and eight bytes."""
    return sum(4 * one.numel() + 1 for one in net.parameters()) + 8


def test_c4_a_synchronous_server_equals_one_process_and_resumes_bit_for_bit(tmp_path) -> None:
    options = {"name": "parameter_server"}
    whole = run_ranks(strategy_jobs.trained_with, 1, {}, str(tmp_path / "one"))[0]["whole"]
    found = run_ranks(strategy_jobs.trained_with, 4, options, str(tmp_path))
    again = run_ranks(strategy_jobs.resumed_with, 4, options, str(tmp_path))
    for one, resumed in zip(found, again, strict=True):
        for name, value in one["whole"].items():
            assert torch.equal(value, found[0]["whole"][name]) and torch.equal(resumed[name], value), name
            torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-4)
    # Any other strategy loads its checkpoint.
    for name, value in run_ranks(strategy_jobs.resumed_with, 1, {}, str(tmp_path))[0].items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-4)


def test_c4_gradients_are_never_staler_than_the_bound_and_messages_are_counted(tmp_path) -> None:
    steps, ranks = 6, 3
    found = run_ranks(server_jobs.beside_a_slow_rank, ranks, 2, steps, str(tmp_path))
    size = message_bytes(Net())
    for rank, one in enumerate(found):
        messages = 2 * steps * (ranks - 1 if rank == 0 else 1)
        assert (one["counts"]["messages"], one["counts"]["bytes"]) == (messages, messages * size)
    stale = found[0]["counts"]["staleness"]
    assert sum(stale) == 2 * steps * ranks
    assert len(stale) == 3, "fast ranks run ahead as far as the bound, and no farther"
    assert sum(found[0]["losses"][-4:]) < sum(found[0]["losses"][:4])
    for saves in zip(*(one["saved"] for one in found), strict=True):
        for weights, state in saves:
            assert all(torch.equal(value, saves[0][0][name]) for name, value in weights.items())
            assert state.keys() == saves[0][1].keys()
            for number, values in state.items():
                assert torch.equal(values["momentum_buffer"], saves[0][1][number]["momentum_buffer"])
    for counts, moves_little in run_ranks(server_jobs.resumed_counts, ranks, 2, str(tmp_path)):
        assert counts in (stale, []) and moves_little


def test_accumulation_clipping_fp16_two_models_and_unused_parameters() -> None:
    first, second = run_ranks(server_jobs.options_of_a_step, 2)
    assert first["unused stays"] and first["finite"]
    for one, other in zip(first["models"], second["models"], strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_c4_a_dead_rank_is_named_on_all_others() -> None:
    first, dead, last = run_ranks(server_jobs.after_a_rank_has_died, 3, 1)
    assert dead == "died"
    assert "Rank 1 has left the training" in first
    assert last == "The parameter server has stopped, because of rank 1. The log of that rank shows why."


def test_the_state_that_an_optimizer_has_before_the_setup_goes_to_the_server(monkeypatch) -> None:
    for name, value in {"get_rank": 0, "get_world_size": 1, "new_group": None}.items():
        monkeypatch.setattr(distributed, name, lambda value=value, **_: value)
    monkeypatch.setattr(parameter_server, "collective_timeout", lambda: timedelta(seconds=60))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    weight.grad = torch.ones(1)
    optimizer.step()
    ServedOptimizer(optimizer, 0).step()
    assert weight.item() == -1 - 1.5


def test_what_the_server_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.staleness is -1.*Give 0"):
        build("parameter_server", staleness=-1)
    weights = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match=r"staleness=1 divides learning rates.*this Rateless has none"):
        ServedOptimizer(Rateless(weights, {}), 1)
    with pytest.raises(ConfigError, match=r"divides learning rates.*Rprop is the size of its first step"):
        ServedOptimizer(torch.optim.Rprop(weights), 1)
    with pytest.raises(ConfigError, match=r"can't step a SimpleNamespace"):
        ServedOptimizer(SimpleNamespace(param_groups=[]), 0)  # type: ignore[arg-type]
