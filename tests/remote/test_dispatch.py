"""Operations on remote tensors: placement, order, errors, memory; the results are those of torch."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading

import pytest
import torch

from slurmddp import remote
from slurmddp.errors import ConfigError

FUNCTIONS = "support.distributed.remote_functions"
pytestmark = pytest.mark.distributed


def bits(tensor):
    dense = tensor.detach().resolve_conj().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist()


def test_g6_results_are_where_the_operands_are(w):
    x = remote.full((20, 20), 4.0, node=1)
    y = torch.randn(20, 20).dist_send(node=1)
    z = x + y
    with remote.node(2):
        a, b = torch.zeros(10), torch.tensor([1.0, 2.0])
        local = torch.ones(3)
        follows = z.sum()
        assert type(z.fetch()) is torch.Tensor and z[0, 0].item() == z.fetch()[0, 0].item()
        assert torch.ones(3).dist_send(node=0).fetch().sum() == z[:1, :3].fetch().numel() == 3
    assert [one.get_node() for one in (x, y, z, z * 2, a, b, local, follows)] == [1, 1, 1, 1, 2, 2, 2, 1]
    assert (z.get_device(), z.device, z.shape, z.dtype) == (
        "cpu",
        torch.device("cpu"),
        (20, 20),
        torch.float32,
    )
    assert torch.equal(z.fetch(), 4.0 + y.fetch())
    moved = z.dist_send(node=2)
    assert moved.get_node() == 2 and torch.equal(moved.cpu(), z.cpu())
    assert remote.arange(0, 1, 0.25, node=0).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_g6_operands_in_two_places_are_refused_with_both_and_the_remedy(w):
    x, y = remote.ones(2, 3, node=1), remote.ones(2, 3, node=2)
    for other, place in ((y, "node 2"), (torch.ones(3), "in this process")):
        with pytest.raises(
            ConfigError, match=rf"aten.add.Tensor got .*\(2, 3\) on node 1 and .* {place}"
        ) as told:
            x + other
        assert "remote.send(x, NODE)" in told.value.hint
    assert (x + torch.tensor(2.0)).tolist() == [[3.0] * 3] * 2, "a local number goes along"
    local = torch.zeros(2, 3)
    local.copy_(x)
    y.copy_(local * 5)
    assert y.tolist() == [[5.0] * 3] * 2, "a copy crosses places"
    with pytest.raises(ConfigError, match="no node 7"):
        remote.zeros(2, node=7)
    with pytest.raises(ConfigError, match="has no data in this process"):
        torch.save(x, "/dev/null")
    with pytest.raises(ConfigError, match="no GPU"):
        x.cuda()
    with pytest.raises(ConfigError, match="in place"):
        x.resize_(3)


def test_a_number_that_stays_here_is_never_written_silently(w):
    x, total = remote.ones(3, node=1), torch.tensor(0.0)
    for write in (
        lambda: total.add_(x.sum()),
        lambda: torch.add(x.sum(), 1, out=total),
        lambda: torch._foreach_add_([total], [x.sum()]),
    ):
        with pytest.raises(ConfigError, match=r"shape \(\) in this process and .* on node 1"):
            write()
    assert total.item() == 0.0 and (total + x.sum()).item() == 3.0


def test_a_copy_has_memory_of_its_own_and_the_strides_of_torch(w):
    local = torch.arange(24.0).reshape(2, 3, 4)
    for source in (local.transpose(0, 2), local[:, ::2], local[0, 0, 0].expand(1), local[0, 0, 0]):
        there = remote.send(source, 1)
        for copied in (there, remote.send(there, 1), remote.send(there, 2), there.to("cpu", copy=True)):
            on_worker = remote.call("torch.Tensor.stride", copied, node=copied.get_node()).fetch()
            for strides in (on_worker, copied.stride(), copied.fetch().stride()):
                for size, found, wanted in zip(source.shape, strides, source.clone().stride(), strict=True):
                    assert size == 1 or found == wanted
            assert bits(copied.fetch()) == bits(source)
    for copied in (remote.send(there, 1), there.to("cpu", copy=True), there.to(torch.float32, copy=True)):
        copied.add_(1)
    assert torch.equal(there.fetch(), source), "the copies share no memory with it"


def test_a_shape_may_change_in_place(w):
    local = torch.arange(6.0).reshape(2, 3).requires_grad_()
    there = remote.send(local, 1)
    found = []
    for x in (local, there):
        y = x * 2
        alias = y.detach()
        assert y.t_() is y and y.shape == (3, 2)
        y.unsqueeze_(0).transpose_(0, 1).squeeze_(1).mul_(3)
        (gradient,) = torch.autograd.grad((y * y).sum(), x)
        vector = x[0] @ x.t().expand(4, 3, 2)  # torch squeezes in place.
        found.append([one.tolist() for one in (y, alias, gradient, vector)])
    assert found[0] == found[1]


def test_an_index_may_be_here_as_for_a_gpu(w):
    local = torch.randn(4, 6)
    there = remote.send(local, 1)
    for index in ([0, 2], [True, False, True, False], torch.tensor([1, 1]), (slice(None), [3, 0]), local > 0):
        assert torch.equal(there[index].fetch(), local[index])
    for one in (local, there):
        one[[0, 1], [2, 3]] = 5.0
    assert torch.equal(there.fetch(), local)


def test_what_needs_the_data_here_is_refused_with_the_remedy(w):
    x = remote.ones(3, node=1)
    uses = [x.data_ptr, x.untyped_storage, x.share_memory_, lambda: torch.from_dlpack(x)]
    for use in (*uses, lambda: x.apply_(lambda value: value + 1)):
        with pytest.raises(ConfigError, match="has no data in this process") as told:
            use()
        assert "x.fetch()" in told.value.hint
    for make in (lambda: remote.send(torch.eye(3).to_sparse(), 1), lambda: remote.eye(3, node=1).to_sparse()):
        with pytest.raises((ConfigError, remote.RemoteError), match="sparse"):
            make()


CASES = {
    "arithmetic": lambda x, i: 2 - x * 3 + x.exp() / 7,
    "matrix": lambda x, i: x @ x.t(),
    "views": lambda x, i: x[1:, ::2].t().reshape(-1)[3:],
    "a view": lambda x, i: x[1:, 2:4],
    "in place on a view": lambda x, i: x.clone()[0].add_(1.5).mul_(x[1]),
    "two results": lambda x, i: x.max(dim=1)[1] + x.topk(2, dim=1).indices[:, 0],
    "many results": lambda x, i: torch.cat([one * n for n, one in enumerate(x.split(2, dim=1))]),
    "indices": lambda x, i: x[i].index_fill(0, i[:1], 9.0),
    "a mask": lambda x, i: x[x > 0],
    "values": lambda x, i: torch.nonzero(x > 0.5),
    "unique": lambda x, i: torch.unique(i, return_counts=True)[1],
    "dtypes": lambda x, i: (x.to(torch.bfloat16).float() + x.double()) > True,
    "like": lambda x, i: torch.zeros_like(x).add_(i[0]) + x.new_ones(6),
    "attention": lambda x, i: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "convolution": lambda x, i: torch.nn.functional.conv2d(x[None, None], x[None, None, :2, :2], padding=1),
    "out": lambda x, i: torch.add(x, 1, out=torch.empty_like(x)),
    "complex": lambda x, i: torch.view_as_real(torch.complex(x, x) * (1 + 2j)),
    "a conjugate": lambda x, i: torch.complex(x, x).conj(),
    "parts of a conjugate": lambda x, i: torch.complex(x, x + 1).conj()[1:].imag * x.t()[0, 0],
    "a product with a conjugate": lambda x, i: torch.complex(x, x).conj().t() @ torch.complex(x, -x),
    "in place on a conjugate": lambda x, i: torch.view_as_real(
        torch.complex(x, x).conj().mul_(2j).resolve_conj()
    ),
    "a scalar": lambda x, i: torch.linspace(0, 1, 3).sum() * 0 + x.sum().item(),
    "no dimension": lambda x, i: x.sum().clone().reshape(1, 1),
    "empty": lambda x, i: x[:0].sum(dim=0),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_give_the_bits_of_torch(w, case):
    torch.manual_seed(5)
    x, i = torch.randn(4, 6), torch.tensor([2, 0, 2])
    for _ in range(2):  # The second time finds the shapes in the table.
        found = CASES[case](remote.send(x, 1), remote.send(i, 1))
        wanted = CASES[case](x, i)
        if isinstance(found, remote.RemoteTensor):
            for fact in ("shape", "dtype"):
                assert getattr(found, fact) == getattr(wanted, fact)
            assert (found.stride(), found.storage_offset()) == (wanted.stride(), wanted.storage_offset())
            found = found.fetch()
        assert bits(found) == bits(wanted)


def test_the_table_of_shapes_keeps_apart_what_gives_other_results(w):
    flags, x = remote.tensor([True, False], node=1), remote.ones(4, node=1)
    assert [(flags * one).dtype for one in (True, 1, 1.0)] == [torch.bool, torch.int64, torch.float32]
    assert [len(remote.arange(0, 1, step, node=1)) for step in (0.5, 0.25)] == [2, 4]
    assert [tuple(x.reshape(shape).shape) for shape in ([2, 2], [4, 1])] == [(2, 2), (4, 1)]
    assert [(x[at:].sum() * factor).item() for at, factor in ((1, 2.0), (2, 3.0))] == [6.0, 6.0]
    assert x.add(x, alpha=2).tolist() == [3.0] * 4 and x.add(x, alpha=3).tolist() == [4.0] * 4
    assert x.mul_(1) is x, "facts are compared by value"
    y = x.clone()
    assert torch.add(x, y, out=x) is x and torch.add(x, y, out=y) is y and y.tolist() == [3.0] * 4
    made = [remote.full((2,), value, node=1) for value in (1, 1.0, True, 1 + 0j)]
    assert [one.dtype for one in made] == [one.fetch().dtype for one in made]
    assert [one.dtype for one in made] == [torch.int64, torch.float32, torch.bool, torch.complex64]
    i = remote.arange(3, node=1)
    halves = [(i / 2).fetch().dtype]
    torch.set_default_dtype(torch.float64)
    try:
        assert remote.ones(2, node=1).fetch().dtype == torch.float64
        halves += [(i / 2).dtype, (i / 2).fetch().dtype]
        assert halves == [torch.float32, torch.float64, torch.float64], "workers follow the script's default"
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_copy_reads_the_value_so_python_may_branch_on_it(w):
    x = remote.tensor([1.0, 2.0, 3.0], node=1)
    assert x.sum() > 5 and not x.sum() > 7
    assert (x.mean().item(), int(x[2]), x.tolist(), x.numpy().tolist()) == (2.0, 3, [1, 2, 3], [1, 2, 3])
    assert torch.equal(x, x.clone()) and x.allclose(x + 1e-9)
    assert "node=1, shape=(3,)" in repr(x) == f"{x}" and f"{x.sum():.2f}" == "6.00"
    assert x.to("cpu") is x and x.to(torch.float64).get_node() == 1
    x.data = x.double()
    assert x.fetch().dtype == torch.float64


def test_a_wrong_shape_is_an_error_here_and_nothing_is_sent(w):
    x = remote.ones(2, 3, node=1)
    with pytest.raises(RuntimeError):
        x @ x
    assert (x + x).tolist() == [[2.0] * 3] * 2


def test_g7_commands_return_at_once_and_run_in_their_order(w, tmp_path):
    gate, x = tmp_path / "gate", remote.zeros(3, node=1)
    remote.call(f"{FUNCTIONS}.wait_for", str(gate), node=1)
    for step in range(50):  # None of them can run before the gate is open, which is the last line.
        x = x * 2 + step
        x.add_(1)
    other = remote.ones(2, node=2).sum().item()
    gate.touch()
    wanted = 0.0
    for step in range(50):
        wanted = float(torch.tensor(wanted) * 2 + step + 1)
    assert x.tolist() == [wanted] * 3 and other == 2.0


def test_ctrl_c_ends_a_wait_and_later_waits_get_their_own_answers(w, tmp_path):
    gate, x = tmp_path / "gate", remote.ones(3, node=1)
    blocked = remote.call(f"{FUNCTIONS}.wait_for", str(gate), node=1)
    press = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        press.start()
        blocked.fetch()
    press.join()
    gate.touch()
    assert x.tolist() == [1.0] * 3 and blocked.fetch() is None


def test_g7_an_event_lets_one_worker_wait_for_another(w, tmp_path):
    gate, log = tmp_path / "gate", tmp_path / "log"
    remote.call(f"{FUNCTIONS}.wait_for", str(gate), node=2)
    remote.call(f"{FUNCTIONS}.append", str(log), "second ", node=2)
    event = remote.record_event(node=2)
    event.wait(node=1)
    event.wait(node=2)
    remote.call(f"{FUNCTIONS}.append", str(log), "first", node=1)
    gate.touch()
    event.synchronize()
    w.synchronize()
    assert log.read_text() == "second first"


def test_g8_an_error_is_told_at_the_next_copy_and_all_goes_on(w):
    x = remote.arange(4, node=1)
    wrong = x[remote.tensor([9], node=1)]
    after = wrong + 1
    x.add_(wrong)
    good = remote.ones(2, node=1) * 3
    with pytest.raises(remote.RemoteError, match=r"aten\.index\.Tensor") as told:
        good.fetch()
    assert (told.value.node, told.value.host) == (1, socket.gethostname())
    assert f"Worker 1 on {socket.gethostname()}" in str(told.value)
    assert "Traceback" in told.value.hint and "IndexError" in told.value.hint
    assert good.tolist() == [3.0, 3.0], "told once"
    for spoilt in (after, x):
        with pytest.raises(remote.RemoteError, match=r"aten\.index\.Tensor"):
            spoilt.fetch()
    assert remote.ones(1, node=2).item() == 1.0


def test_g9_memory_is_freed_with_the_last_use(w):
    gc.collect()
    before = w.live_objects(1)
    x = remote.ones(4, node=1)
    y, view = x * 2, x[:2]
    alias = x.detach()
    assert w.live_objects(1) == before + 3
    del x, y
    assert w.live_objects(1) == before + 2
    del view, alias
    gc.collect()
    assert w.live_objects(1) == before
