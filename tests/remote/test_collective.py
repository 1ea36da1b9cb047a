"""Collectives between tensors of workers, on CPUs; data-parallel training from the controller."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slurmddp import remote
from slurmddp.errors import ConfigError
from slurmddp.remote import collective
from support.distributed import remote_functions
from support.distributed.ranks import run_ranks

FUNCTIONS = "support.distributed.remote_functions"
pytestmark = pytest.mark.distributed


def parts(*nodes):
    return [remote.arange(1, 4, node=node) * 10**node for node in nodes]


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("sum", [111.0, 222.0, 333.0]),
        ("mean", [37.0, 74.0, 111.0]),
        ("max", [100.0, 200.0, 300.0]),
        ("min", [1.0, 2.0, 3.0]),
        ("product", [1000.0, 8000.0, 27000.0]),
    ],
)
def test_g11_all_workers_get_the_reduction(w, op, wanted):
    tensors = [one.double() for one in parts(0, 1, 2)]
    w.all_reduce(tensors, op)
    for one in tensors:
        torch.testing.assert_close(one.fetch(), torch.tensor(wanted).double())


def test_g11_collectives_between_all_or_some_workers(w):
    two = parts(2, 0)
    w.all_reduce(two)
    assert [one.tolist() for one in two] == [[101, 202, 303]] * 2

    lists = [[one, one[:2] * 2, one.reshape(3, 1).t()] for one in parts(0, 1, 2)]
    w.all_reduce(lists)
    assert [one.tolist() for one in lists[1]] == [[111, 222, 333], [222, 444], [[111, 222, 333]]]

    reduced = parts(0, 1, 2)
    w.reduce(reduced, node=1)
    assert [one.tolist() for one in reduced] == [[1, 2, 3], [111, 222, 333], [100, 200, 300]]

    shown = parts(0, 1, 2)
    w.broadcast(shown, node=2)
    assert [one.tolist() for one in shown] == [[100, 200, 300]] * 3

    gathered = w.all_gather(parts(0, 1, 2))
    assert [[one.get_node() for one in row] for row in gathered] == [[0] * 3, [1] * 3, [2] * 3]
    assert [one.tolist() for one in gathered[1]] == [[1, 2, 3], [10, 20, 30], [100, 200, 300]]


def test_g11_a_failed_operand_fails_the_collective_on_all_workers_and_none_waits(w):
    tensors = parts(0, 1, 2)
    tensors[1] = tensors[1][remote.tensor([0, 1, 99], node=1)]
    w.all_reduce(tensors)
    for one in tensors:
        with pytest.raises(
            remote.RemoteError, match="99 is out of bounds" if one is tensors[1] else "worker 1"
        ):
            one.fetch()
    lost = tensors[1].dist_send(node=2)
    with pytest.raises(remote.RemoteError, match="worker 1 failed before the exchange"):
        lost.fetch()
    again = parts(0, 1, 2)
    w.all_reduce(again)
    assert again[0].tolist() == [111, 222, 333]


def test_g11_a_worker_without_memory_for_its_part_fails_the_collective_on_all_and_none_waits(w):
    w.all_reduce(parts(0, 1))  # Starts the threads of the group, which need memory too.
    tensors = [remote.empty(100 << 20, dtype=torch.uint8, node=node) for node in (0, 1)]
    remote.call(f"{FUNCTIONS}.limit_memory", 20 << 20, node=1)
    w.all_reduce(tensors)
    remote.call(f"{FUNCTIONS}.limit_memory", None, node=1)
    for one, told in zip(tensors, ("worker 1 failed before the exchange", "allocate memory"), strict=True):
        with pytest.raises(remote.RemoteError, match=told):
            one.fetch()
    again = parts(0, 1)
    w.all_reduce(again)
    assert again[0].tolist() == [11, 22, 33]


def test_tensors_that_dont_fit_together_are_refused_before_anything_is_sent(w):
    one, other = parts(0, 1)
    for wrong in ([one, one], [one, other.double()], [one, other[:2]]):
        with pytest.raises(ConfigError, match="same shapes and dtypes"):
            w.all_reduce(wrong)
    with pytest.raises(ConfigError, match="in this process"):
        w.all_reduce([one, torch.ones(3)])
    with pytest.raises(ConfigError, match="no reduction 'average'"):
        w.all_reduce([one, other], "average")
    with pytest.raises(ConfigError, match="node=2 holds none of the tensors"):
        w.broadcast([one, other], node=2)
    for nothing in ([], [[], []]):
        with pytest.raises(ConfigError, match="no tensors"):
            w.all_reduce(nothing)
    with pytest.raises(ConfigError, match="no tensors"):
        w.average_gradients([remote.module(torch.nn.Linear(1, 1), node=node) for node in (0, 1)])
    w.all_reduce([one])
    assert one.tolist() == w.all_gather([one])[0][0].tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x = remote.ones(3, node=0).requires_grad_()
        y = x.exp()
        w.all_reduce([y.detach(), remote.ones(3, node=1)])
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.complex64, torch.bfloat16])
def test_copies_between_workers_take_every_dtype_and_layout(w, dtype):
    local = torch.arange(6).reshape(2, 3).to(dtype)
    there = local.dist_send(node=1)
    for tensor, wanted in ((there.t(), local.t()), (there[0, 0], local[0, 0]), (there[:0], local[:0])):
        assert torch.equal(tensor.dist_send(node=2).fetch(), wanted)
    assert torch.equal(there.conj().dist_send(node=0).fetch(), local.conj().resolve_conj())
    rows = w.all_gather([there, remote.zeros(2, 3, dtype=dtype, node=2)])
    assert torch.equal(rows[1][0].fetch(), local)
    shown = [remote.zeros(2, 3, dtype=dtype, node=0), there]
    w.broadcast(shown, node=1)
    assert torch.equal(shown[0].fetch(), local)


def test_g7_an_event_is_reached_once_the_gpu_of_its_worker_has_run_what_came_before(monkeypatch):
    """Python runs ahead of a GPU."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("kernels"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(collective, "_store", lambda: SimpleNamespace(set=lambda *_: done.append("reached")))
    collective.reach("event")
    assert done == ["kernels", "reached"]


@pytest.mark.usefixtures("rank_server")
def test_g10_g11_data_parallel_training_equals_ddp_bit_for_bit(w):
    model, data = remote_functions.model_and_data()
    replicas = [remote.module(model, node=node) for node in (0, 2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in replicas]
    for step in range(3):
        for replica, optimizer, batch, node in zip(replicas, optimizers, data[step], (0, 2), strict=True):
            optimizer.zero_grad()
            (replica(batch.dist_send(node=node)) ** 2).mean().backward()
        w.average_gradients(replicas)
        for optimizer in optimizers:
            optimizer.step()
    wanted = run_ranks(remote_functions.trained_by_ddp, 2)
    assert [[one.tolist() for one in replica.parameters()] for replica in replicas] == wanted
