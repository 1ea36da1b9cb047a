"""Calls of functions on workers: by import path, with objects that stay there."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from slurmddp import remote
from slurmddp.errors import ConfigError

FUNCTIONS = "support.distributed.remote_functions"
pytestmark = pytest.mark.distributed


def test_a_call_keeps_its_result_on_the_worker_as_an_operand_of_further_calls(w):
    counter = remote.call(f"{FUNCTIONS}.Counter", 5, node=1)
    found = remote.call(f"{FUNCTIONS}.add", counter, remote.ones(3, node=1), more={"a": 1}, node=1).fetch()
    assert (found["value"], found["pid"]) == (9, w.node(1).pid) and w.node(1).pid != os.getpid()
    assert found["tensor"].get_node() == 1 and found["tensor"].tolist() == [2.0] * 3
    told = remote.call(f"{FUNCTIONS}.values", node=1).fetch()
    assert told == [None, True, 1.5, float("inf"), "text", {"a": [1, 2]}, torch.bfloat16, 1j]
    assert remote.call("torch.conj", remote.tensor([1 + 2j], node=1), node=1).fetch().imag.tolist() == [-2]
    with pytest.raises(ConfigError, match="a result on node 1 and others on node 2"):
        remote.call(f"{FUNCTIONS}.add", counter, 1, node=2)
    with pytest.raises(ConfigError, match=r"a tensor of shape \(3,\) in this process"):
        remote.call(f"{FUNCTIONS}.add", counter, torch.ones(3), node=1)
    with pytest.raises(ConfigError, match="type object can't go"):
        remote.call(f"{FUNCTIONS}.add", object(), node=1)


def test_only_import_paths_go_to_a_worker_and_a_factory_names_itself(w):
    for function in (lambda: 1, os.getpid, 3):
        with pytest.raises(ConfigError, match=r"remote\.call takes an import path"):
            remote.call(function, node=1)
    with pytest.raises(TypeError, match=r"remote.zeros\(\) missing .* 'node'"):
        remote.zeros(3)
    with pytest.raises(ConfigError, match=r"no node \[1\]"):
        remote.zeros(3, node=[1])
    with pytest.raises(ConfigError, match=r"remote\.send takes a tensor"):
        remote.send([1.0], 1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{FUNCTIONS}.unknown", "PosixPath can't go"),
        (f"{FUNCTIONS}.nothing", "nothing"),
        ("no_such_package.f", "no_such_package"),
        ("sys.exit", "SystemExit"),
    ],
)
def test_a_result_or_a_path_that_cant_be_is_an_error_of_the_worker(w, name, told):
    with pytest.raises(remote.RemoteError, match=told):
        remote.call(name, node=1).fetch()


def test_seeds_are_those_of_each_worker(w):
    drawn = [remote.randn(4, node=node).fetch() for node in (1, 2)]
    assert not torch.equal(*drawn), "no two workers begin with the same numbers"
    assert len({remote.call("numpy.random.random", node=node).fetch() for node in range(3)}) == 3
    drawn = []
    for node in (1, 2):
        remote.call("torch.manual_seed", 3, node=node)
        drawn.append(remote.randn(4, node=node).fetch())
    assert torch.equal(*drawn) and torch.equal(
        drawn[0], torch.randn(4, generator=torch.Generator().manual_seed(3))
    )


def test_all_tensors_of_a_factory_come_to_its_worker(w):
    found = remote.stack([torch.ones(2), torch.zeros(2)], node=1)
    assert found.get_node() == 1 and found.tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ConfigError, match=r"torch\.get_num_threads returns no tensor"):
        remote.get_num_threads(node=1)


class Net(torch.nn.Module):
    """A model with a tied weight, a buffer, and a factory in its forward pass."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, tokens):
        x = self.embedding(tokens) + torch.arange(tokens.shape[1])[None, :, None] * self.scale
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.head(self.norm(torch.nn.functional.gelu(x)))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.fixture
def equal_threads(w):
    """Compute here with as many threads as a worker: some sums are made of one part per thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(remote.call("torch.get_num_threads", node=1).fetch())
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("equal_threads")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_g10_gradients_and_steps_of_an_optimizer_equal_local_ones_bit_for_bit(w, name):
    torch.manual_seed(1)
    local = Net()
    there = remote.module(local, node=1)
    assert there.head.weight is there.embedding.weight and there.scale.get_node() == 1
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (local, there)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 5) for one in optimizers]
    for _ in range(3):
        tokens = torch.randint(11, (4, 6))
        losses = []
        places = ((local, tokens), (there, tokens.dist_send(node=1)))
        for (model, x), optimizer, schedule in zip(places, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses.append((loss.item(), norm.item()))
        assert losses[0] == losses[1]
    for (key, wanted), found in zip(local.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(found.grad.fetch(), wanted.grad) and torch.equal(found.fetch(), wanted), key
    back = Net()
    back.load_state_dict(there.state_dict())
    assert all(torch.equal(one, local.state_dict()[key]) for key, one in back.state_dict().items())


def test_g10_gradients_cross_copies_between_places(w):
    x = torch.randn(3, requires_grad=True)
    y = (x * 2).dist_send(node=1)
    z = (y.exp()).dist_send(node=2) * remote.arange(3, node=2)
    (z.fetch() ** 2).sum().backward()
    wanted = x.detach().clone().requires_grad_()
    (((wanted * 2).exp() * torch.arange(3)) ** 2).sum().backward()
    assert not isinstance(x.grad, remote.RemoteTensor) and torch.equal(x.grad, wanted.grad)


def test_second_gradients_cross_copies_too(w):
    x = torch.tensor([2.0], requires_grad=True)
    y = (x.dist_send(node=1) ** 3).fetch() + x**3
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (first.item(), second.item()) == (24.0, 24.0)


def test_a_gradient_may_make_tensors_on_its_way(w):
    local = torch.arange(4.0, requires_grad=True)
    local.prod().backward()
    there = remote.arange(4.0, node=1).requires_grad_()
    with pytest.raises(ConfigError, match="cat") as refused:
        there.prod().backward()
    assert "call backward() there too" in refused.value.hint
    with remote.node(1):
        there.prod().backward()
    assert torch.equal(there.grad.fetch(), local.grad)


def test_a_deep_copy_has_the_gradient_as_torch_copies_it(w):
    there = remote.module(torch.nn.Linear(2, 1), node=1)
    there(remote.ones(1, 2, node=1)).sum().backward()
    copied = copy.deepcopy(there)
    there.weight.grad.zero_()
    assert copied.weight.grad.tolist() == [[1.0, 1.0]] and copied.weight.grad.get_node() == 1


def test_a_model_that_is_made_on_a_worker_trains_there(w):
    remote.call("torch.manual_seed", 0, node=1)
    with remote.node(1):
        model = torch.nn.Linear(3, 1)
    assert {one.get_node() for one in model.parameters()} == {1}
    torch.manual_seed(0)
    assert torch.equal(model.weight.fetch(), torch.nn.Linear(3, 1).weight)


MODELS = {
    "lstm": lambda: (torch.nn.LSTM(4, 3), (2, 1, 4)),
    "transformer": lambda: (
        torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        (2, 3, 4),
    ),
    "images": lambda: (
        torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.MaxPool2d(2)),
        (2, 1, 8, 8),
    ),
}


@pytest.mark.usefixtures("equal_threads")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_torch_and_their_copies_compute_as_local_ones(w, name):
    torch.manual_seed(2)
    model, shape = MODELS[name]()
    x = torch.randn(shape)
    there = remote.module(model, node=1)
    copied = copy.deepcopy(there)
    for local, distant in ((model, there), (copy.deepcopy(model), copied)):
        out, found = local(x), distant(x.dist_send(node=1))
        out, found = (one[0] if isinstance(one, tuple) else one for one in (out, found))
        assert torch.equal(found.fetch(), out)
        out.sum().backward()
        found.sum().backward()
        for own, other in zip(local.parameters(), distant.parameters(), strict=True):
            assert torch.equal(other.grad.fetch(), own.grad)
    model.eval(), there.eval()
    # Without gradients, oneDNN computes a local LSTM as a whole, with other last bits on some processors.
    with torch.set_grad_enabled(name == "lstm"):
        out = model(x)
    with torch.no_grad():
        found = there(x.dist_send(node=1))
    assert torch.equal(found[0].fetch(), out[0])
    first, second = next(there.parameters()), next(copied.parameters())
    with torch.no_grad():
        second.zero_()
    assert first.abs().sum() > 0 and type(second) is type(first)
    assert there.double()(x.double().dist_send(node=1))[0].fetch().dtype == torch.float64
