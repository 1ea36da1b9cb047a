"""Options of strategy ddp: equal to one process, exact after a resume, refused in wrong combinations."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from slurmddp.errors import ConfigError
from slurmddp.strategies import build, comm_hooks
from support.distributed import strategy_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

PLAIN = {}
LOCAL = {"comm_hook": "post_local_sgd", "hook_start_step": 2, "average_every": 4, "group_ranks": 1}


@pytest.fixture(scope="module")
def reference(rank_server, tmp_path_factory):
    """The weights of one process after ten steps."""
    return run_ranks(strategy_jobs.trained_with, 1, PLAIN, str(tmp_path_factory.mktemp("one")))[0]["whole"]


@pytest.mark.parametrize(
    ("options", "ranks", "tolerance"),
    [
        ({"static_graph": True, "bucket_mb": 0.01}, 4, 1e-4),
        ({"comm_hook": "fp16"}, 2, 2e-3),
        ({"comm_hook": "bf16"}, 2, 1e-1),
        ({"comm_hook": "powersgd", "hook_start_step": 2, "powersgd_rank": 2, "bucket_mb": 0.01}, 2, 2e-1),
        ({"zero_optimizer": True}, 2, 1e-4),
        ({"zero_optimizer": True, "comm_hook": "powersgd", "hook_start_step": 2}, 2, 2e-1),
        (LOCAL, 2, 2e-1),
    ],
    ids=lambda value: "+".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_each_option_follows_one_process_and_resume_bit_for_bit(
    options, ranks, tolerance, reference, tmp_path
):
    found = run_ranks(strategy_jobs.trained_with, ranks, options, str(tmp_path))
    again = run_ranks(strategy_jobs.resumed_with, ranks, options, str(tmp_path))
    for whole, resumed in zip(found, again, strict=True):
        for name, value in whole["whole"].items():
            assert torch.equal(resumed[name], value), name
            torch.testing.assert_close(value, reference[name], rtol=0, atol=tolerance)
    equal = [torch.equal(one, found[1]["whole"][name]) for name, one in found[0]["whole"].items()]
    assert all(equal) == (options is not LOCAL)
    if "zero_optimizer" in options:
        assert found[0]["share"] + found[1]["share"] < 1.1 * (
            2 * sum(one.numel() for one in reference.values())
        )


@pytest.mark.parametrize(("group_ranks", "blocks"), [(2, [[0, 1], [2, 3]]), (None, [[0, 2], [1, 3]])])
def test_gradients_are_averaged_within_neighbouring_ranks_or_within_nodes(group_ranks, blocks, monkeypatch):
    made = []

    monkeypatch.setattr(comm_hooks, "collective_timeout", lambda: None)
    monkeypatch.setattr(comm_hooks, "gather", lambda name: ["a", "b", "a", "b"])
    monkeypatch.setattr(
        distributed, "new_subgroups_by_enumeration", lambda found, timeout: (made.extend(found), found)
    )
    comm_hooks._group_of_rank(comm_hooks._groups(group_ranks))
    assert made == blocks


def test_each_of_two_models_is_averaged_after_the_steps_of_its_own_optimizer():
    options = {**LOCAL, "hook_start_step": 0, "average_every": 2}
    assert run_ranks(strategy_jobs.two_models, 2, options) == [[True, False, True, False]] * 2


@pytest.mark.parametrize(
    "options",
    [
        {**LOCAL, "hook_start_step": 1, "average_every": 3},
        {"name": "local_sgd", "every": 5},
        {"name": "diloco", "every": 5},
    ],
    ids=["post_local_sgd", "local_sgd", "diloco"],
)
def test_one_optimizer_of_two_models_averages_both_and_resumes_both(options, tmp_path):
    found = run_ranks(strategy_jobs.one_optimizer_of_two_models, 2, options, str(tmp_path))
    assert found == [{"averaged": True, "apart": True, "repeated": True}] * 2


STATEFUL = [
    {"comm_hook": "powersgd", "hook_start_step": 2, "powersgd_rank": 2},
    {**LOCAL, "average_every": 2},
    {"zero_optimizer": True},
    {"name": "local_sgd", "every": 2},
    {"name": "diloco", "every": 2},
    {"name": "parameter_server"},
]
STATEFUL_IDS = ["powersgd", "post_local_sgd", "zero", "local_sgd", "diloco", "parameter_server"]


@pytest.mark.parametrize("options", STATEFUL, ids=STATEFUL_IDS)
def test_a_load_of_the_state_before_the_first_step_forgets_all_later_steps(options, tmp_path):
    assert run_ranks(strategy_jobs.repeated_after_a_load, 2, options, str(tmp_path)) == [True] * 2


@pytest.fixture(scope="module")
def saved_by_others(rank_server, tmp_path_factory):
    """Return the roots of checkpoints without a state that another strategy can use."""
    writers = [(2, PLAIN), (2, {"name": "diloco"}), (2, STATEFUL[0]), (1, {"name": "local_sgd"})]
    roots = [str(tmp_path_factory.mktemp("saved")) for _ in writers]
    for (ranks, options), root in zip(writers, roots, strict=True):
        run_ranks(strategy_jobs.saved_at_step_0, ranks, options, root)
    return roots


@pytest.mark.parametrize("options", STATEFUL, ids=STATEFUL_IDS)
def test_a_load_without_a_state_of_the_strategy_forgets_all_later_steps(options, saved_by_others):
    assert run_ranks(strategy_jobs.repeated_after_loads, 2, options, saved_by_others) == [[True] * 4] * 2


@pytest.mark.parametrize(
    "options",
    [
        {**LOCAL, "hook_start_step": 0, "average_every": 4},
        {"name": "local_sgd", "every": 4},
        {"name": "diloco", "every": 4},
    ],
    ids=["post_local_sgd", "local_sgd", "diloco"],
)
def test_a_state_that_does_not_fit_the_strategy_is_refused_before_a_change_or_left_out(options, tmp_path):
    for loads in run_ranks(strategy_jobs.loads_that_do_not_fit, 2, options, str(tmp_path)):
        for (error, is_unchanged, is_left_out), said in zip(loads, ("optimizer", "2x4"), strict=True):
            assert "does not fit this" in error and said in error
            assert is_unchanged and is_left_out


POWERSGD = {"comm_hook": "powersgd", "hook_start_step": 2, "powersgd_rank": 1}
LOCAL_SGD = {"name": "local_sgd", "every": 3}
ALWAYS = [True] * 6
OTHER_SETTINGS = [
    (LOCAL_SGD, PLAIN, ALWAYS),
    (LOCAL_SGD, {"name": "diloco", "every": 3}, [False, False, True] * 2),
    (LOCAL, PLAIN, ALWAYS),
    (LOCAL, {**LOCAL, "hook_start_step": 100}, ALWAYS),
    (LOCAL, {**LOCAL, "group_ranks": 2}, ALWAYS),
    (LOCAL, {**LOCAL, "average_every": 3}, [True, False, False] * 2),
    (POWERSGD, {**POWERSGD, "powersgd_rank": 2}, ALWAYS),
    (POWERSGD, {**POWERSGD, "bucket_mb": 0.0001}, ALWAYS),
    ({"name": "parameter_server"}, PLAIN, ALWAYS),
]
"""Strategies before and after a resume, and after which steps the weights of all ranks must be equal."""


def test_replicas_and_loss_scales_agree_after_a_resume_with_other_settings(tmp_path):
    cases = [(before, after) for before, after, _ in OTHER_SETTINGS]
    found = run_ranks(strategy_jobs.equal_under_other_settings, 2, cases, str(tmp_path))
    assert found == [[equal for _, _, equal in OTHER_SETTINGS]] * 2


def test_gradients_that_the_ranks_do_not_average_are_refused():
    for errors in run_ranks(strategy_jobs.gradients_that_nobody_averages, 2):
        assert all("don't average the gradients of 1 parameters" in error for error in errors), errors


def test_zero_is_bit_for_bit_the_optimizer_that_it_spreads(tmp_path):
    zero, plain = (
        run_ranks(strategy_jobs.trained_with, 2, options, str(tmp_path / name))[0]
        for name, options in (("zero", {"zero_optimizer": True}), ("plain", {}))
    )
    assert zero["losses"] == plain["losses"]
    assert all(torch.equal(one, plain["whole"][name]) for name, one in zero["whole"].items())


def test_a_state_that_zero_has_spread_loads_on_another_number_of_ranks(tmp_path):
    options = {"zero_optimizer": True}
    whole = run_ranks(strategy_jobs.trained_with, 4, options, str(tmp_path))[0]["whole"]
    for name, value in run_ranks(strategy_jobs.resumed_with, 1, options, str(tmp_path))[0].items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-4)


def test_a_static_graph_permits_layers_that_run_twice_under_checkpointing():
    assert run_ranks(strategy_jobs.reused_layer, 2, True) == [""] * 2
    assert all(
        "ready" in error or "reduction" in error for error in run_ranks(strategy_jobs.reused_layer, 2, False)
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"comm_hook": "fp8"}, "comm_hook is 'fp8'"),
        ({"powersgd_rank": 2}, "powersgd_rank=2 has no effect with comm_hook=None"),
        ({"comm_hook": "fp16", "hook_start_step": 5}, "hook_start_step=5 has no effect with comm_hook=fp16"),
        ({"comm_hook": "powersgd", "hook_start_step": 1}, "hook_start_step is 1"),
        ({"comm_hook": "powersgd", "powersgd_rank": 0}, "powersgd_rank is 0"),
        (
            {"comm_hook": "powersgd", "average_every": 4},
            "average_every=4 has no effect with comm_hook=powersgd",
        ),
        ({"comm_hook": "post_local_sgd", "average_every": 1}, "average_every is 1"),
        ({"comm_hook": "post_local_sgd", "zero_optimizer": True}, "zero_optimizer does not work"),
        ({"static_graph": True, "find_unused_parameters": True}, "both true"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        build("ddp", **options)


def test_zero_spreads_an_adagrad_whose_state_is_there_from_its_beginning() -> None:
    plain, zero = (
        run_ranks(strategy_jobs.trained_by, 2, "Adagrad", options)
        for options in ({}, {"zero_optimizer": True})
    )
    for weights in (*zero, *plain):
        for weight, other in zip(weights, plain[0], strict=True):
            assert torch.equal(weight, other)
    for error in run_ranks(strategy_jobs.resharded_adagrad, 2):
        assert "has a state from earlier steps" in error and "before the first step" in error
