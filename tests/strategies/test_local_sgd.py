"""Replicas that train apart: when they agree, on what, and how they resume."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from slurmddp.errors import ConfigError
from slurmddp.strategies import build
from slurmddp.strategies.local_sgd import DiLoCo
from support.distributed import strategy_jobs
from support.distributed.ranks import run_ranks

WIDTH = 5


def sgd_step(weights: torch.Tensor, data: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return the weights after one step on the data, as `strategy_jobs.local_steps` takes it."""
    layer = nn.Linear(WIDTH, 1)
    nn.utils.vector_to_parameters(weights, layer.parameters())
    layer(torch.tensor(data)).square().mean().backward()
    gradient = torch.cat([one.grad.flatten() for one in layer.parameters() if one.grad is not None])
    return weights - 0.1 * gradient


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
class TestOnRanks:
    def test_weights_are_averaged_after_each_warmup_step_and_then_every_few_steps(self) -> None:
        ranks = run_ranks(
            strategy_jobs.local_steps, 3, {"name": "local_sgd", "every": 3, "warmup_steps": 2}, 9, WIDTH
        )
        equal = [one == two == three for one, two, three in zip(*(r["weights"] for r in ranks), strict=True)]
        assert equal == [True, True, True, False, False, True, False, False, True, False]
        assert ranks[0]["sent"] == [WIDTH + 1] * 4, "one message for all weights"
        at = [torch.tensor(rank["weights"][2]) for rank in ranks]
        for step in range(2, 5):
            at = [sgd_step(own, rank["data"][step]) for own, rank in zip(at, ranks, strict=True)]
        torch.testing.assert_close(torch.tensor(ranks[0]["weights"][5]), torch.stack(at).mean(dim=0))

    def test_the_outer_optimizer_is_sgd_with_momentum_on_the_mean_change(self) -> None:
        options = {"name": "diloco", "every": 2, "outer_lr": 0.5, "outer_momentum": 0.8}
        ranks = run_ranks(strategy_jobs.local_steps, 2, options, 6, WIDTH)
        agreed = torch.tensor(ranks[0]["weights"][0])
        velocity = torch.zeros_like(agreed)
        for first in (0, 2, 4):
            ends = []
            for rank in ranks:
                assert rank["weights"][first] == ranks[0]["weights"][first]
                own = agreed
                for step in (first, first + 1):
                    own = sgd_step(own, rank["data"][step])
                ends.append(own)
            change = agreed - torch.stack(ends).mean(dim=0)
            velocity = 0.8 * velocity + change
            agreed = agreed - 0.5 * (change + 0.8 * velocity)
            torch.testing.assert_close(torch.tensor(ranks[0]["weights"][first + 2]), agreed)
        assert ranks[0]["sent"] == [WIDTH + 1] * 3

    @pytest.mark.parametrize(
        "options",
        [
            {"name": "local_sgd", "every": 4},
            {"name": "local_sgd", "every": 3},
            {"name": "diloco", "every": 4, "outer_lr": 0.7},
        ],
        ids=["apart", "equal", "outer"],
    )
    def test_a_resume_between_and_at_an_average_keeps_every_bit(self, options, tmp_path) -> None:
        found = run_ranks(strategy_jobs.trained_with, 2, options, str(tmp_path))
        again = run_ranks(strategy_jobs.resumed_with, 2, options, str(tmp_path))
        for whole, resumed in zip(found, again, strict=True):
            for name, value in whole["whole"].items():
                assert torch.equal(resumed[name], value), name
        # On other numbers of ranks, all begin with rank 0's replica.
        assert len(run_ranks(strategy_jobs.resumed_with, 1, options, str(tmp_path))) == 1

    def test_a_resume_takes_changed_settings_of_the_outer_optimizer(self) -> None:
        before, after = (DiLoCo(every=4, outer_lr=outer_lr) for outer_lr in (0.7, 0.5))
        for strategy in (before, after):
            model = strategy.wrap(nn.Linear(2, 1), torch.device("cpu"))
            strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).step()
        assert after.load_state_dict(before.state_dict())
        (group,) = after.state_dict()["replicas"][0]["outer"]["param_groups"]
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.9, True)

    def test_a_resume_keeps_each_ranks_loss_scale(self, tmp_path) -> None:
        high, low = 2.0**16, 2.0**15
        found = run_ranks(strategy_jobs.loss_scales, 2, str(tmp_path))
        assert found == [[high, low, high], [low, low, low]]

    @pytest.mark.parametrize("name", ["local_sgd", "diloco"])
    def test_groups_that_an_optimizer_gets_later_are_averaged_too(self, name: str) -> None:
        assert run_ranks(strategy_jobs.groups_added_later, 2, {"name": name, "every": 2}) == [True, True]

    def test_a_resume_keeps_the_outer_steps_of_groups_that_were_added_later(self, tmp_path) -> None:
        assert run_ranks(strategy_jobs.group_added_before_a_save, 2, str(tmp_path)) == [True, True]

    def test_averages_of_every_step_are_the_training_of_one_process(self, tmp_path) -> None:
        ranks = run_ranks(strategy_jobs.local_steps, 2, {"name": "local_sgd", "every": 1}, 5, WIDTH)
        own = torch.tensor(ranks[0]["weights"][0])
        for step in range(5):
            own = sgd_step(own, [*ranks[0]["data"][step], *ranks[1]["data"][step]])
        torch.testing.assert_close(torch.tensor(ranks[1]["weights"][5]), own)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("local_sgd", {"every": 0}, r"strategy\.every is 0.*Give 1 or more"),
        ("local_sgd", {"warmup_steps": -1}, r"strategy\.warmup_steps is -1"),
        ("diloco", {"outer_lr": 0}, r"strategy\.outer_lr is 0.*above 0"),
        ("diloco", {"outer_momentum": 1}, r"strategy\.outer_momentum is 1.*below 1"),
    ],
)
def test_wrong_numbers_are_refused(name: str, options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(name, **options)
