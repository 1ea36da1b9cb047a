"""Strategies: equal weights, mean gradients, the same bucket layout after a resume."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.strategies import build
from support.distributed import strategy_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_t4_replicas_are_equal_after_every_step() -> None:
    first, second = run_ranks(strategy_jobs.replicas_after_each_step, 2)
    assert [equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 5
    assert not equal(first[0], first[1]), "the weights change"


def test_t5_two_ranks_have_the_gradient_of_the_joined_batch() -> None:
    joined = run_ranks(strategy_jobs.mean_gradient, 1, 8)[0]
    for halves in run_ranks(strategy_jobs.mean_gradient, 2, 4):
        for name, gradient in joined.items():
            torch.testing.assert_close(halves[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_resumed_run_reduces_in_the_same_order_on_four_ranks() -> None:
    assert run_ranks(strategy_jobs.resumed_with_stock_ddp, 4, True) == [True] * 4


def test_plain_ddp_reduces_in_another_order_after_a_resume() -> None:
    # When a newer torch passes without it, `fix_bucket_layout` can go.
    assert run_ranks(strategy_jobs.resumed_with_stock_ddp, 4, False) == [False] * 4


def test_fixing_the_layout_runs_no_hooks_and_no_optimizer_in_the_backward_pass() -> None:
    for found in run_ranks(strategy_jobs.layout_runs_no_hooks, 2):
        assert found == dict.fromkeys(("weights", "states", "hooks", "later", "stepped"), True)


def test_the_layout_is_fixed_where_torch_moves_the_arguments_to_a_device() -> None:
    assert run_ranks(strategy_jobs.layout_with_device_ids, 2) == [True] * 2


def test_fixing_the_layout_leaves_no_trace() -> None:
    for trace in run_ranks(strategy_jobs.layout_leaves_no_trace, 2):
        assert trace == dict.fromkeys(trace, True)


def test_d9_gradients_are_exchanged_in_the_last_of_several_passes_only() -> None:
    every_time = run_ranks(strategy_jobs.exchanges, 2, 3, 1)
    assert run_ranks(strategy_jobs.exchanges, 2, 3, 4) == every_time
    assert every_time[0] >= 3


def test_buckets_have_the_given_size() -> None:
    assert run_ranks(strategy_jobs.bucket_bytes, 2, 0.5) == [1 << 19] * 2


@pytest.mark.parametrize("size", [0, -1.0])
def test_a_bucket_size_of_zero_is_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.bucket_mb is"):
        build("ddp", bucket_mb=size)


@pytest.mark.parametrize(
    ("strategy", "trains", "said"),
    [
        ("ddp", False, "Net has no parameter that requires a gradient"),
        ("single", True, r"2 ranks are running.*strategy=ddp"),
    ],
)
def test_a_model_that_the_strategy_can_not_train_is_refused(strategy: str, trains: bool, said: str) -> None:
    for error in run_ranks(strategy_jobs.error_of_setup, 2, strategy, trains):
        assert re.search(said, error, re.DOTALL), error


@pytest.mark.parametrize(
    ("before", "after"), [("parameter_server", "local_sgd"), ("diloco", "parameter_server")]
)
def test_a_checkpoint_of_another_strategy_loads(before: str, after: str, tmp_path) -> None:
    run_ranks(strategy_jobs.trained_with, 2, {"name": before}, str(tmp_path))
    for found in run_ranks(strategy_jobs.resumed_with, 2, {"name": after}, str(tmp_path)):
        assert all(one.isfinite().all() for one in found.values())


@pytest.mark.parametrize(
    "options", [{"name": "ring"}, {"name": "fsdp"}, {"comm_hook": "post_local_sgd"}], ids=str
)
def test_groups_of_a_strategy_have_the_time_out_of_collectives(options) -> None:
    for found in run_ranks(strategy_jobs.timeouts_of_groups, 2, options):
        assert found == {timedelta(seconds=777)}


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"name": "local_sgd", "every": 1}],
    ids=str,
)
def test_an_embedding_with_sparse_gradients_trains_the_weights_of_one_process(options) -> None:
    whole = run_ranks(strategy_jobs.sparse_gradients, 1, {"name": "single"})[0]
    for found in run_ranks(strategy_jobs.sparse_gradients, 2, options):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "ring"}, "strategy=ring can't exchange the sparse gradients"),
        ({"name": "fsdp"}, "strategy=fsdp can't exchange the sparse gradients"),
        ({"comm_hook": "bf16"}, "strategy.comm_hook=bf16 can't exchange the sparse gradients"),
    ],
)
def test_sparse_gradients_that_a_strategy_can_not_exchange_are_refused(options, said: str) -> None:
    for error in run_ranks(strategy_jobs.sparse_gradients, 2, options):
        assert error.startswith(said) and "sparse=False" in error


def test_a_rank_without_a_state_of_its_strategy_gets_none_back(tmp_path) -> None:
    assert run_ranks(strategy_jobs.loaded_on_rank_zero, 2, str(tmp_path)) == [
        ["reset", {"value": 7}],
        ["reset"],
    ]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_size"):
        build("ddp", bucket_size=3)
