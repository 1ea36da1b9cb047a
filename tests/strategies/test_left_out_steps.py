"""A step that is left out for infinite gradients leaves no trace in what strategies keep between steps."""

from __future__ import annotations

import pytest
import torch

from support.distributed import left_out_jobs
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]

POWERSGD = {"comm_hook": "powersgd", "hook_start_step": 2, "bucket_mb": 0.0001}
POST_LOCAL = {"comm_hook": "post_local_sgd", "hook_start_step": 2, "average_every": 3, "group_ranks": 1}
STRATEGIES = [
    {},
    {"comm_hook": "fp16"},
    {"comm_hook": "bf16"},
    POWERSGD,
    POST_LOCAL,
    {"zero_optimizer": True},
    {**POWERSGD, "zero_optimizer": True},
    {"name": "ring"},
    {"name": "fsdp"},
    {"name": "local_sgd", "every": 3},
    {"name": "diloco", "every": 3},
    {"name": "parameter_server"},
]


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: "+".join(map(str, options.values())))
def test_training_goes_on_as_if_the_step_had_no_gradients(options) -> None:
    expected = run_ranks(left_out_jobs.history, 2, options, "absent")
    found = run_ranks(left_out_jobs.history, 2, options, "cleared")
    for rank in range(2):
        for step, (weights, others) in enumerate(zip(found[rank], expected[rank], strict=True)):
            for weight, other in zip(weights, others, strict=True):
                torch.testing.assert_close(weight, other, rtol=0, atol=0, msg=f"rank {rank}, step {step}")


def test_powersgd_forgets_gradients_that_the_program_has_thrown_away_itself() -> None:
    expected = run_ranks(left_out_jobs.history, 2, POWERSGD, "absent")
    found = run_ranks(left_out_jobs.history, 2, POWERSGD, "skipped")
    for weight, other in zip(found[0][-1], expected[0][-1], strict=True):
        assert torch.isfinite(weight).all()
        torch.testing.assert_close(weight, other, rtol=0, atol=0.1)


def test_powersgd_restores_the_errors_of_the_optimizer_alone_whose_step_was_left_out() -> None:
    for error, is_unchanged in run_ranks(left_out_jobs.one_of_two_optimizers_left_out, 2):
        assert torch.isfinite(error).all()
        assert is_unchanged == [False, True]


@pytest.mark.parametrize(("growth_interval", "bad_step"), [(1000, None), (3, None), (1000, 6), (3, 6)])
def test_powersgd_loses_no_gradient_when_the_loss_scale_changes(growth_interval, bad_step) -> None:
    for missing, scale in run_ranks(left_out_jobs.lost_gradient, 2, growth_interval, bad_step):
        assert missing < 5e-3
        assert (scale == 4) == (growth_interval == 1000 and bad_step is None)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_post_local_sgd_averages_as_often_with_several_optimizers(optimizers) -> None:
    """Steps 1 to 4 average gradients over all ranks, step 5 is the first local one."""
    expected = [step in (1, 2, 3, 4, 5, 9, 13) for step in range(1, 14)]
    assert run_ranks(left_out_jobs.equal_after_each_step, 2, optimizers) == [expected] * 2
