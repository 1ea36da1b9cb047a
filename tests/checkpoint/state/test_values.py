"""Exact round trips of states through a checkpoint, and the values that it refuses."""

import json
import math
from collections import Counter, OrderedDict

import pytest
import safetensors.torch
import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.state.safetensors_stream import Bytes, decode, encode
from slurmddp.checkpoint.state.shards import mapped
from slurmddp.errors import CheckpointError
from support.distributed.checkpoint_files import round_trip, same, save

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
def test_tensors_of_every_type_and_shape_come_back_bit_for_bit(tmp_path, dtype, shape):
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) * 37
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).copy_(raw)
    state = {"before": torch.tensor([1], dtype=torch.int8), "it": tensor, "after": torch.tensor(2.5)}
    assert same(round_trip(tmp_path, state), state)


@pytest.mark.parametrize("change", [reversed, lambda entries: [*entries][1:]], ids=["order", "gap"])
def test_a_header_that_does_not_list_adjoining_tensors_is_refused(change):
    data = b"".join(encode({"a": torch.ones(3), "b": torch.zeros(2)}))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert [*decode(Bytes(memoryview(data)), len(data))] == ["a", "b"]
    text = json.dumps(dict(change(header.items()))).encode().ljust(length)
    damaged = data[:8] + text + data[8 + length :]
    with pytest.raises(CheckpointError, match="does not list adjoining tensors"):
        decode(Bytes(memoryview(damaged)), len(damaged))


def test_plain_values_keep_value_and_type(tmp_path):
    floats = [0.1, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 1.7976931348623157e308]
    state = {
        "floats": floats,
        "ints": [0, -1, 2**62, 2**63, -(2**200), True, False, None],
        "text": ["", "a\nb\x00", "\ud800", "smørrebrød", '{"tensor": "x"}'],
        "nested": {1: {"1": [(), ((1,), [2])], 1: {}}, -5: (), "1": []},
        "tags": {"tensor": "x", "dict": [], "tuple": {"float": "7ff8"}},
        "counter": Counter({3: 2, 7: 1}),
    }
    assert same(round_trip(tmp_path, state), state)


def test_only_tensors_with_the_same_elements_are_stored_once(tmp_path):
    weight = torch.randn(4, 4)
    others = {"turned": weight.t(), "bits": weight.view(torch.int32), "row": weight[0], "nothing": weight[:0]}
    state = {"embed": weight, "head": weight, "view": weight.view(4, 4), **others}
    path = save(tmp_path, 1, state)
    loaded = checkpoint.read(path).state
    assert loaded["embed"] is loaded["head"] is loaded["view"]
    assert same(loaded, state)
    assert safetensors.torch.load_file(path / "state.safetensors").keys() == {"embed", *others}


def test_names_that_collide_are_kept_apart(tmp_path):
    state = {
        "a": {"b": torch.tensor(1), "b/c": torch.tensor(2)},
        "a/b": {"c": torch.tensor(3)},
        "x": {0: torch.tensor(4), "0": torch.tensor(5)},
        "__metadata__": torch.tensor(6),
    }
    assert same(round_trip(tmp_path, state), state)


def schedulers(optimizer):
    lr = torch.optim.lr_scheduler
    yield lr.LambdaLR(optimizer, lambda step: 0.9**step)
    yield lr.StepLR(optimizer, 2)
    yield lr.MultiStepLR(optimizer, [1, 3, 3])
    yield lr.CosineAnnealingWarmRestarts(optimizer, 2)
    yield lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    yield lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False)
    yield lr.ReduceLROnPlateau(optimizer)
    yield lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2])


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_states_of_torch_modules_optimizers_and_schedulers(tmp_path, monkeypatch, optimizer_class):
    # The first optimizer step of a process makes torch set this variable; take it back afterwards.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = optimizer_class(model.parameters(), lr=torch.tensor(0.1).item())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers(optimizer)],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    loaded = round_trip(tmp_path, state)
    assert same(loaded, state)
    assert type(loaded["model"]) is OrderedDict
    assert loaded["model"]._metadata == state["model"]._metadata
    optimizer.load_state_dict(loaded["optimizer"])
    model.load_state_dict(loaded["model"])


def test_loaded_tensors_share_no_memory(tmp_path):
    path = save(tmp_path, 1, {"w": torch.zeros(4)})
    checkpoint.read(path).state["w"].add_(1)
    assert torch.equal(checkpoint.read(path).state["w"], torch.zeros(4))


def test_the_tensor_file_is_an_ordinary_safetensors_file(tmp_path):
    state = {"model": {"w": torch.randn(3, 4), "half": torch.ones(5, dtype=torch.bfloat16)}, "flag": True}
    loaded = safetensors.torch.load_file(save(tmp_path, 1, state) / "state.safetensors")
    assert set(loaded) == {"model/w", "model/half"}
    assert torch.equal(loaded["model/w"], state["model"]["w"])
    assert torch.equal(loaded["model/half"], state["model"]["half"])


class Local:
    pass


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"model": {"fn": [1, Local()]}}, "model/fn/1"),
        ({"a": {"b": {1, 2}}}, "a/b"),
        ({"a": b"bytes"}, "at a"),
        ({"a": torch.float32}, "at a"),
        ({"a": {(1, 2): 3}}, "(1, 2)"),
        ({"a": {True: 3}}, "True"),
        ({"a": torch.eye(2).to_sparse()}, "at a"),
        ({"a": torch.empty(2, device="meta")}, "meta device"),
        ({"a": torch.ones(2).numpy()}, "at a is a numpy.ndarray"),
        ({"a": torch.ones(2).numpy()[0]}, "at a is a numpy.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_objects_are_refused_with_their_key_path_and_nothing_is_written(tmp_path, state, place):
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "root", 1, state)
    assert place in str(caught.value)
    assert not (tmp_path / "root").exists()


def test_a_container_that_holds_itself_is_refused(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested deeper"):
        save(tmp_path, 1, {"loop": loop})


def test_a_state_of_many_chunks(tmp_path):
    state = {f"w{i}": torch.randn(3_000_000) for i in range(3)}  # 12 MB each: more than one chunk
    assert same(round_trip(tmp_path, state), state)


def test_a_changed_copy_of_a_state_keeps_the_versions_of_modules():
    state = torch.nn.BatchNorm1d(2).state_dict()
    copy = mapped(state, lambda tensor: tensor + 1)
    assert copy["weight"].tolist() == [2, 2] and state["weight"].tolist() == [1, 1]
    assert copy._metadata == state._metadata and type(copy) is type(state)
