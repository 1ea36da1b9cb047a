"""Random states survive a checkpoint exactly, half-used gaussian pairs included."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.errors import CheckpointError
from slurmddp.training import rng
from slurmddp.training.checkpointing import training_state


@pytest.fixture(autouse=True)
def generators_as_before():
    before = rng.capture()
    yield
    rng.restore(before)


def draw():
    return (
        [random.random(), random.gauss(0, 1), random.randrange(2**70)],
        [*np.random.rand(3).tolist(), np.random.standard_normal(), np.random.randint(1000)],
        torch.rand(3).tolist() + torch.randn(5).tolist() + torch.randperm(9).tolist(),
    )


def through_a_checkpoint(tmp_path, state):
    return checkpoint.read(checkpoint.write(tmp_path, 1, {"rng": state}, meta={}, keep_last=3)).state["rng"]


@pytest.mark.parametrize("warm_up", [0, 1, 2, 3, 1000])
def test_exact_round_trip(tmp_path, warm_up):
    rng.seed_everything(warm_up)
    for _ in range(warm_up):
        # An odd number of gaussians leaves the second half of a pair in each generator's cache.
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    rng.seed_everything(99)
    rng.restore(through_a_checkpoint(tmp_path, state))
    assert [draw() for _ in range(3)] == expected


def test_capture_draws_nothing():
    rng.seed_everything(5)
    first = draw()
    rng.seed_everything(5)
    rng.capture()
    assert draw() == first


def test_a_captured_state_is_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        state = rng.capture()
    assert state["python"]["words"].device.type == "cpu"
    assert state["python"]["words"].tolist() == list(random.getstate()[1])


def test_another_numpy_generator_round_trips(tmp_path):
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = rng.capture()
        expected = np.random.rand(4).tolist()
        rng.restore(through_a_checkpoint(tmp_path, state))
        assert np.random.rand(4).tolist() == expected
    finally:
        np.random.set_bit_generator(usual)


def test_seeds_differ_and_repeat():
    drawn = []
    for seed in (1, 2**63 - 1, 1, 2**63 - 1):
        rng.seed_everything(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


def test_derived_seeds_never_change_and_all_parts_count():
    assert rng.derive(0) == 7210762507766007076
    seeds = {rng.derive(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (0, "0"), (1, 0), (0, 0, 0)]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "state", [{}, {"python": 3}, {"python": {"version": 3, "words": torch.ones(2), "gauss": None}}]
)
def test_an_invalid_state_is_refused(state):
    with pytest.raises(CheckpointError, match="random state"):
        rng.restore(state)


def test_on_another_number_of_ranks_each_rank_seed_and_step_draws_anew(monkeypatch, caplog):
    def draws(seed, step, rank):
        monkeypatch.setattr(training_state.collectives, "world_size", lambda: 2)
        monkeypatch.setattr(training_state.collectives, "rank", lambda: rank)
        training_state.restore_randomness(SimpleNamespace(state={"rng": [{}] * 3}, step=step), seed)
        return str(draw())

    cases = list(itertools.product((1, 2), (5, 6), (0, 1)))
    found = [draws(*case) for case in cases]
    assert len(set(found)) == len(cases)
    assert [draws(*case) for case in cases] == found
    assert "saved by 3 rank(s), but this training has 2" in caplog.text


def test_a_cuda_state_without_a_gpu_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rng.restore({**rng.capture(), "cuda": torch.zeros(16, dtype=torch.uint8)})
    assert "CUDA random state" in caplog.text
