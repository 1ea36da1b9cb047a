"""The size of the configuration against the size of the step."""

import dataclasses

import pytest

from slurmddp.environments.detect import require
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError

STEP = RankInfo(
    environment="slurm",
    rank=3,
    local_rank=1,
    node_rank=1,
    world_size=4,
    local_world_size=2,
    nodes=2,
    hosts=("n1", "n2"),
    launch_id="100.0.0",
    gpus_on_node=2,
)


def refusal(info, **asked):
    """Return what `require` objects to, or None where it lets the step through."""
    try:
        require(info, **asked)
    except MismatchError as error:
        return error
    return None


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 2},
        {"gpus_per_node": 1},
        {"gpus_per_node": 2},
        {"gpus_per_node": 0},
    ],
    ids=str,
)
def test_what_fits_is_let_through(asked):
    assert refusal(STEP, **asked) is None


def test_a_number_of_gpus_that_slurm_does_not_tell_is_not_held_against_the_step():
    untold = dataclasses.replace(STEP, gpus_on_node=None)
    assert refusal(untold, gpus_per_node=8) is None


@pytest.mark.parametrize(
    ("asked", "found", "flag"),
    [
        ({"nodes": 3}, "nodes=3, but step 100.0.0 runs on 2", "--nodes=3"),
        ({"ranks_per_node": 4}, "4 task(s) on each of 2 node(s), 8 in all", "--ntasks-per-node=4"),
        ({"gpus_per_node": 8}, "granted 2 GPU(s)", "--gpus-per-node=8"),
    ],
)
def test_what_does_not_fit_is_named_with_its_flag(asked, found, flag):
    error = refusal(STEP, **asked)
    assert found in error.message
    assert flag in error.hint


def test_an_uneven_step_is_no_even_configuration():
    uneven = dataclasses.replace(STEP, world_size=3)
    assert "3 in all" in refusal(uneven, nodes=2, ranks_per_node=2).message
