"""Checkpoints: exact round trips, damage noticed, failures that leave the old ones alone, retention."""

import errno
import json
import math
import os
import random
import struct
from collections import Counter, OrderedDict

import pytest
import safetensors.torch
import torch
import xxhash

from slurmddp import checkpoint
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs import checkpoints, durable, retry
from slurmddp.runs.checkpoints import checkpoint_folders


def save(root, step, state=None, keep_last=3, **meta):
    return checkpoint.write(root, step, state or {"step": step}, meta=meta, keep_last=keep_last)


def round_trip(tmp_path, state):
    return checkpoint.read(save(tmp_path / "root", 1, state)).state


def flip_bit(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(data)


def steps_in(root):
    return [int(path.name[5:]) for path in checkpoint_folders(root)]


def hidden_in(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def same(left, right):
    """Equal in values and in types, all the way down; NaN equals the same NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            type(a) is type(b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def bits(tensor):
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


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


def test_views_that_are_not_contiguous_come_back_by_value(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "sliced": base[1:3, ::2],
        "expanded": torch.tensor([7.0]).expand(3, 4),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)).detach(),
    }
    assert same(round_trip(tmp_path, state), state)


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.randn(50, 20)
    state = {"model": {"embed": weight, "head": weight, "view": weight.view(50, 20), "row": weight[0]}}
    path = save(tmp_path, 1, state)
    loaded = checkpoint.read(path).state["model"]
    assert loaded["embed"] is loaded["head"] is loaded["view"]
    assert torch.equal(loaded["row"], weight[0])
    size = (path / "state.safetensors").stat().st_size
    assert size < 1.2 * weight.numel() * 4 + 1000


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


def test_loaded_tensors_belong_to_the_caller(tmp_path):
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
        ({"a": torch.ones(2).numpy()}, "numpy.ndarray at a"),
        ({"a": torch.ones(2).numpy()[0]}, "numpy.float32 at a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_objects_are_refused_with_their_place_and_nothing_is_written(tmp_path, state, place):
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "root", 1, state)
    assert place in str(caught.value)
    assert not (tmp_path / "root").exists()


def test_a_container_that_holds_itself_is_refused(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested deeper"):
        save(tmp_path, 1, {"loop": loop})


def test_folder_layout_and_manifest(tmp_path):
    path = save(tmp_path / "deep" / "root", 1200, {"w": torch.ones(3)}, world_size=4, note=["x", None])
    assert path == tmp_path / "deep" / "root" / "step-0000001200"
    assert (path.parent / "latest").read_text() == "step-0000001200\n"
    assert {file.name for file in path.iterdir()} == {"manifest.json", "state.json", "state.safetensors"}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 1200
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["digest"] == "xxh3_128"
    loaded = checkpoint.read(path)
    assert (loaded.step, loaded.meta) == (1200, {"world_size": 4, "note": ["x", None]})


def test_a_state_of_many_chunks(tmp_path):
    state = {f"w{i}": torch.randn(3_000_000) for i in range(3)}  # 12 MB each: more than one chunk
    assert same(round_trip(tmp_path, state), state)


@pytest.mark.parametrize("held", [True, False])
def test_large_and_small_parts_are_hashed_in_their_order(tmp_path, held):
    sizes = [9 << 20, 10, 3, 1 << 18, 7, 20 << 20, 1]
    data = [bytes([index]) * size for index, size in enumerate(sizes)]
    record = durable.write_hashed(tmp_path / "file", [memoryview(part) for part in data], held=held)
    assert record == durable.record_of(tmp_path / "file")
    assert record.digest == xxhash.xxh3_128_hexdigest(b"".join(data))


@pytest.mark.parametrize("held", [True, False])
def test_a_flush_that_fails_fails_the_write(tmp_path, monkeypatch, held):
    def refuse(descriptor):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no"):
        durable.write_hashed(tmp_path / "file", [memoryview(b"x")], held=held)


def test_copies_are_not_held_in_memory_until_the_flush(tmp_path, monkeypatch):
    held = []
    real = durable.write_hashed

    def spy(path, parts, *, expected=0, held=False):
        asked[path.name] = held
        return real(path, parts, expected=expected, held=held)

    monkeypatch.setattr("slurmddp.checkpoint.writer.write_hashed", spy)
    plain, turned = torch.ones(4, 5), torch.ones(4, 5).t()
    conjugate = torch.ones(3, dtype=torch.complex64).conj()
    for state, expected in (([plain], True), ([plain, turned], False), ([plain, conjugate], False)):
        asked = {}
        save(tmp_path, len(held), {"tensors": state})
        held.append(asked["state.safetensors"])
        assert held[-1] is expected
        assert not asked["state.json"]


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json"])
def test_one_flipped_bit_anywhere_is_noticed(tmp_path, file):
    chance = random.Random(file)
    size = (save(tmp_path / "x", 2, {"w": torch.randn(20)}) / file).stat().st_size
    for position in [0, size - 2, *(chance.randrange(size) for _ in range(20))]:
        root = tmp_path / str(position)
        first = save(root, 1, {"w": torch.randn(20)})
        path = save(root, 2, {"w": torch.randn(20)})
        flip_bit(path / file, min(position, (path / file).stat().st_size - 2))
        with pytest.raises(CheckpointError):
            checkpoint.read(path)
        assert checkpoint.latest(root) == first
        assert steps_in(root) == [1]
        assert (root / "bad-step-0000000002").is_dir()
        assert (root / "latest").read_text() == "step-0000000001\n"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, lengthen, os.unlink, lambda path: path.write_bytes(b"")])
def test_files_cut_lengthened_emptied_or_missing(tmp_path, caplog, file, damage):
    first = save(tmp_path, 1)
    path = save(tmp_path, 2, {"w": torch.ones(9)})
    damage(path / file)
    if file == "manifest.json" and damage is cut:
        damage(path / file)  # the last byte is a line break, which JSON does not need
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert checkpoint.latest(tmp_path) == first
    assert "damaged" in caplog.text and "step-0000000002" in caplog.text


def test_a_manifest_of_another_checkpoint_is_noticed(tmp_path):
    first, second = save(tmp_path, 1, {"w": torch.ones(2)}), save(tmp_path, 2, {"w": torch.zeros(2)})
    (second / "manifest.json").write_bytes((first / "manifest.json").read_bytes())
    assert checkpoint.latest(tmp_path) == first


def test_nothing_there_or_nothing_whole_is_none(tmp_path, caplog):
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2):
        (save(tmp_path, step) / "state.json").unlink()
    assert checkpoint.latest(tmp_path) is None
    assert caplog.text.count("damaged") == 2


@pytest.mark.parametrize("pointer", [None, "step-0000000001\n", "step-0000009999\n", "", "\0garbage"])
def test_a_missing_or_stale_pointer_does_not_matter(tmp_path, pointer):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    assert checkpoint.latest(tmp_path) == newest


def test_a_second_bad_checkpoint_of_one_step_is_kept_too(tmp_path):
    for _ in range(2):
        (save(tmp_path, 1) / "state.json").unlink()
        assert checkpoint.latest(tmp_path) is None
    assert (tmp_path / "bad-step-0000000001").is_dir()
    assert (tmp_path / "bad-step-0000000001-2").is_dir()


def rewrite_manifest(path, **changes):
    """Write a manifest anew as another version would have: with other content and the hash that fits it."""
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    (path / "manifest.json").write_text(json.dumps({**content, "sha256": checkpoints._digest(content)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3, "digest": "blake9"}, "has format 3; this slurmddp reads format 2"),
        ({"format": 1, "digest": None}, "has format 1; this slurmddp reads format 2"),
        ({"digest": "blake9"}, "its files are hashed by 'blake9'; this slurmddp knows xxh3_128"),
        ({"digest": ["x"]}, "hashed by \\['x'\\]"),
    ],
    ids=["later", "earlier", "unknown digest", "strange digest"],
)
def test_one_that_another_version_wrote_is_refused_and_not_taken_for_damaged(tmp_path, changes, words):
    save(tmp_path, 1)
    other = save(tmp_path, 2)
    rewrite_manifest(other, **changes)
    for act in (lambda: checkpoint.latest(tmp_path), lambda: checkpoint.read(other)):
        with pytest.raises(CheckpointError, match=words) as caught:
            act()
        assert "slurmddp that wrote it" in caught.value.hint
    assert steps_in(tmp_path) == [2, 1]


def test_a_manifest_without_a_digests_name_is_damaged(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    rewrite_manifest(second, digest=None)
    assert checkpoint.latest(tmp_path) == first


def test_nothing_in_a_checkpoint_is_ever_unpickled(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    path = save(tmp_path / "root", 1, {"w": torch.ones(2)})
    for file in ("state.safetensors", "state.json", "manifest.json"):
        (path / file).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert checkpoint.latest(tmp_path / "root") is None
    assert not (tmp_path / "exploded").exists()


def test_retention_keeps_the_last(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, keep_last=3)
        assert steps_in(tmp_path) == list(range(step, max(0, step - 3), -1))
    assert hidden_in(tmp_path) == []


def test_two_always_stay(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step, keep_last=1)
    assert steps_in(tmp_path) == [4, 3]


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        path = save(tmp_path, step)
    flip_bit(path / "state.json")
    save(tmp_path, 4, keep_last=2)
    assert steps_in(tmp_path) == [4, 3, 2]
    assert checkpoint.latest(tmp_path).name.endswith("4")


def test_later_steps_of_another_try_are_left_alone(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_last=2)
    assert steps_in(tmp_path) == [30, 20, 10, 4, 3]


def test_the_same_step_again(tmp_path):
    first = save(tmp_path, 1, {"w": torch.ones(2)})
    inode = first.stat().st_ino
    assert save(tmp_path, 1, {"w": torch.ones(2)}) == first
    assert first.stat().st_ino == inode, "an equal checkpoint is not replaced"
    save(tmp_path, 1, {"w": torch.zeros(2)})
    assert torch.equal(checkpoint.read(first).state["w"], torch.zeros(2))
    flip_bit(first / "state.json")
    save(tmp_path, 1, {"w": torch.zeros(2)})
    assert torch.equal(checkpoint.read(checkpoint.latest(tmp_path)).state["w"], torch.zeros(2))
    assert hidden_in(tmp_path) == []


def test_leftovers_of_a_killed_writer_go_at_the_next_save(tmp_path):
    save(tmp_path, 1)
    for name in (".writing-step-0000000002-77", ".deleting-step-0000000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    (tmp_path / ".writing-latest-77").write_text("step")
    assert checkpoint.latest(tmp_path).name == "step-0000000001"
    save(tmp_path, 2)
    assert hidden_in(tmp_path) == []
    assert steps_in(tmp_path) == [2, 1]


def test_one_moved_aside_by_a_killed_writer_is_put_back(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / ".replaced-step-0000000001")
    assert checkpoint.latest(tmp_path) == path


class FailingCalls:
    """Lets the given number of file operations pass and then fails every writing one."""

    def __init__(self, monkeypatch, passing, code):
        self.left = passing
        self.code = code
        for name in ("fsync", "rename", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO], ids=errno.errorcode.get
)
def test_a_full_disk_at_any_moment_leaves_the_old_ones_alone(tmp_path, code, monkeypatch):
    monkeypatch.setattr(retry, "WAITS_S", (0, 0))
    for passing in range(40):
        root = tmp_path / str(passing)
        for step in (1, 2):
            save(root, step, keep_last=2)
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, passing, code)
            try:
                save(root, 3, {"w": torch.ones(5)}, keep_last=2)
            except CheckpointError as error:
                assert "step 3" in error.message and "untouched" in error.message and error.hint
                assert steps_in(root) in ([2, 1], [3, 2, 1])
        assert hidden_in(root) in ([], [".deleting-step-0000000001"])
        assert checkpoint.latest(root).name in ("step-0000000002", "step-0000000003")
        if calls.left >= 0:
            assert steps_in(root) == [3, 2]
            return
    raise AssertionError("the save never came to its end")


@pytest.mark.parametrize(
    ("keep_last", "step", "meta"), [(0, 1, {}), (3, -1, {}), (3, 1, {"a": (1,)}), (3, 1, {"x": math.nan})]
)
def test_impossible_arguments(tmp_path, keep_last, step, meta):
    with pytest.raises((CheckpointError, ConfigError)):
        checkpoint.write(tmp_path / "root", step, {}, meta=meta, keep_last=keep_last)
    assert not (tmp_path / "root").exists()


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("mine")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "root", 1)
    assert (tmp_path / "root").read_text() == "mine"


def test_reading_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.read(tmp_path / "nowhere")
