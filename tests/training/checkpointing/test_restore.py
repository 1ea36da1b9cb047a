"""A checkpoint that does not fit: the error names the difference, and no object changes."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.memory.shared_buffer import StoredState
from slurmddp.checkpoint.state import config_match
from slurmddp.checkpoint.state.state_tree import flatten
from slurmddp.environments.names import MEMORY_VARIABLE
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.identity import part_of
from slurmddp.settings.schema import Identity
from slurmddp.training.checkpointing import async_writer, restore
from slurmddp.training.distributon import Distributon
from slurmddp.training.trainer.callbacks import Callbacks
from slurmddp.training.trainer.loop import Training
from support.distributed import load_jobs
from support.distributed.checkpoint_files import flip_bit, steps_in
from support.distributed.memory_jobs import copy_to_memory
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


class Counter:
    """A user's object that refuses some states."""

    def __init__(self, count: int = 0) -> None:
        self.count = torch.tensor(count)

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count = state["count"]
        if self.count > 5:
            raise ValueError("more than five")


def parts(width: int = 4, depth: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, width), *(nn.Linear(width, width) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def bits(*objects: object) -> str:
    return str([flatten({"it": one.state_dict()}).tree for one in objects]) + str(
        [value.tolist() for one in objects for value in flatten(one.state_dict()).tensors.values()]
    )


# Another model.


@pytest.mark.parametrize(
    ("width", "depth", "words"),
    [
        (6, 1, ["4 tensors of another shape (0.weight is 4x3 in the checkpoint, 6x3 here, ", ", ...)"]),
        (4, 3, ["4 keys missing from the checkpoint (2.weight, 2.bias, 3.weight, ...)"]),
        (4, 0, ["2 keys that this model does not have (1.weight, 1.bias)"]),
        (5, 0, ["2 keys that", "2 tensors of another shape (0.weight is 4x3 in the checkpoint, 5x3 here"]),
    ],
)
def test_another_model_is_explained_and_nothing_is_loaded(alone, tmp_path, width, depth, words) -> None:
    model, optimizer = parts()
    alone.save(9, root=tmp_path, model=model, optimizer=optimizer, progress={"at": 9}, mine=Counter(3))
    here, its = parts(width, depth)
    mine, progress = Counter(1), {"at": 0}
    before, draw = bits(here, its, mine), torch.get_rng_state()
    with pytest.raises(CheckpointError) as caught:
        alone.load(root=tmp_path, mine=mine, progress=progress, optimizer=its, model=here)
    assert "does not fit this" in caught.value.message and caught.value.message.count("\n") == 0
    with pytest.raises(CheckpointError) as caught:
        alone.load(root=tmp_path, mine=mine, progress=progress, model=here)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "does not fit this Sequential" in caught.value.message
    assert "Nothing was loaded" in caught.value.message
    assert (bits(here, its, mine), progress) == (before, {"at": 0})
    assert torch.equal(torch.get_rng_state(), draw)


def test_an_optimizer_over_other_groups(alone, tmp_path) -> None:
    model, optimizer = parts()
    alone.save(9, root=tmp_path, model=model, optimizer=optimizer)
    halves = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    other = torch.optim.AdamW(halves, lr=0.5)
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(
        CheckpointError, match=r"4 parameters in 1 group in the checkpoint, .* in 2 groups here"
    ):
        alone.load(root=tmp_path, model=model, optimizer=other)
    assert not model[0].weight.any()
    with pytest.raises(CheckpointError, match="holds no optimizer's state"):
        alone.load(root=tmp_path, model=optimizer)


def test_a_refused_state_changes_no_object(alone, tmp_path) -> None:
    model, _ = parts()
    alone.save(9, root=tmp_path, first=Counter(2), model=model, second=Counter(7))
    with torch.no_grad():
        model[0].weight.zero_()
    first, second = Counter(1), Counter(0)
    with pytest.raises(
        CheckpointError, match="checkpoint's second does not fit this Counter: more than five"
    ):
        alone.load(root=tmp_path, first=first, model=model, second=second)
    assert (int(first.count), int(second.count)) == (1, 0)
    assert not model[0].weight.any()


class Renamed(nn.Linear):
    """A model that accepts keys of an older version."""

    def _load_from_state_dict(self, state: dict, prefix: str, *args: object) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, *args)


def test_a_model_that_translates_old_names_may(alone, tmp_path) -> None:
    old = nn.Module()
    old.kernel, old.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    alone.save(9, root=tmp_path, model=old)
    model = Renamed(2, 2)
    assert alone.load(root=tmp_path, model=model) == 9
    assert torch.equal(model.weight, torch.ones(2, 2))
    wider = Renamed(3, 2)  # The bias fits, and is written before the weight is refused.
    before = bits(wider)
    with pytest.raises(CheckpointError, match="size mismatch"):
        alone.load(root=tmp_path, model=wider)
    assert bits(wider) == before


class Unpacking(nn.Linear):
    """A model that accepts a state of another form."""

    def load_state_dict(self, state: dict, *args: object, **options: object) -> object:
        return super().load_state_dict({"weight": state["kernel"]}, *args, **options)


class Regrouping(torch.optim.SGD):
    """An optimizer that accepts the state of other groups."""

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state if len(state["param_groups"]) == 2 else self.state_dict())


def test_an_optimizer_that_translates_other_groups_may(alone, tmp_path) -> None:
    model, optimizer = parts()
    alone.save(9, root=tmp_path, optimizer=optimizer)
    halves = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    assert alone.load(root=tmp_path, optimizer=Regrouping(halves, lr=0.5)) == 9


def test_a_model_whose_hooks_or_methods_translate_old_names_may(alone, tmp_path) -> None:
    old = nn.Module()
    old.kernel = nn.Parameter(torch.ones(2, 2))
    alone.save(9, root=tmp_path, model=old)

    def rename(state: dict, prefix: str, *_: object) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    def forgive(module: nn.Module, found: SimpleNamespace) -> None:
        found.missing_keys.clear()
        found.unexpected_keys.clear()

    renaming, forgiving = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    renaming._register_load_state_dict_pre_hook(rename)
    forgiving.register_load_state_dict_post_hook(forgive)
    unpacking = Unpacking(2, 2, bias=False)
    for model in (renaming, forgiving, unpacking):
        assert alone.load(root=tmp_path, model=model) == 9
    for model in (renaming, unpacking):
        assert torch.equal(model.weight, torch.ones(2, 2))


def test_a_misfit_on_one_rank_changes_no_rank(tmp_path: Path) -> None:
    first, second = run_ranks(load_jobs.load_that_one_rank_refuses, 2, str(tmp_path))
    assert "Rank 1 on" in first["said"]
    assert "does not fit this Net" in second["said"]
    assert first["unchanged"] and second["unchanged"]


def test_a_rank_that_never_sees_the_checkpoint_names_its_host(tmp_path: Path) -> None:
    first, second = run_ranks(load_jobs.load_from_an_own_folder, 2, str(tmp_path))
    assert "Rank 1 on" in first and "does not exist on" in first
    assert "does not exist on" in second


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "state.safetensors"])
def test_a_checkpoint_that_is_damaged_on_one_host_is_skipped_on_all_ranks(tmp_path: Path, file: str) -> None:
    results = run_ranks(load_jobs.load_checkpoints_damaged_on_one_host, 2, str(tmp_path), {3: file})
    for result in results:
        assert (result["error"], result["loaded"], result["progress"]) == ("", [2], {"at": 2})
    # The save replaces step 3, which the training has repeated. Nothing was renamed to `bad-...`.
    assert results[0]["steps"] == [3, 2, 1]
    assert [path.name for path in Path(tmp_path, "0").glob("*-step-*")] == ["abandoned-step-0000000003"]


def test_a_host_that_sees_every_checkpoint_damaged_does_not_start_at_step_0(tmp_path: Path) -> None:
    damaged = dict.fromkeys((1, 2, 3), "state.safetensors")
    first, second = run_ranks(load_jobs.load_checkpoints_damaged_on_one_host, 2, str(tmp_path), damaged)
    for result in (first, second):
        assert "Rank 1 on" in result["error"] and "state.safetensors does not match" in result["error"]
        assert (result["loaded"], result["progress"]) == ([], {})
    assert first["steps"] == [3, 2, 1]


# Another configuration.

CONFIG = {"seed": 1, "model": {"width": 4, "path": Path("data")}, "betas": (0.9, 0.95), "none": None}


def saved_under(config: dict, root: Path) -> None:
    with Distributon(1, config=config) as d:
        d.launch().save(3, root=root, progress={"at": 3})


def load_under(config: dict | None, root: Path, **options: bool) -> int | None:
    with Distributon(1, config=config) as d:
        return d.launch().load(root=root, progress={}, **options)


def test_a_configuration_is_kept_with_its_hash(tmp_path) -> None:
    saved_under(CONFIG, tmp_path)
    meta = checkpoint.read(checkpoint.latest(tmp_path)).meta
    assert meta["config"] == {
        "seed": 1, "model": {"width": 4, "path": "data"}, "betas": [0.9, 0.95], "none": None,
    }  # fmt: skip
    assert len(meta["config_hash"]) == 16
    reordered = {key: CONFIG[key] for key in reversed(CONFIG)}
    assert load_under(reordered, tmp_path) == 3


def test_a_value_of_the_environment_is_not_in_the_manifest_and_still_compared(tmp_path) -> None:
    def bound(token: str) -> dict[str, object]:
        marks = {"data": {"token": "${oc.env:TOKEN}"}}
        return config_match.bound_to({"seed": 1, "data": {"token": token}, "from_environment": marks})

    saved_under(bound("s3cret"), tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    assert load_under(bound("s3cret"), tmp_path) == 3
    with pytest.raises(ConfigError, match=r"data\.token: .*oc\.env:TOKEN.* in the checkpoint"):
        load_under(bound("0ther"), tmp_path)


def test_t8_another_configuration_is_explained_key_by_key(tmp_path) -> None:
    saved_under(CONFIG, tmp_path)
    other = {"seed": 1, "model": {"width": 8, "path": Path("data"), "new": "x"}, "betas": (0.9, 0.99)}
    with pytest.raises(ConfigError) as caught:
        load_under(other, tmp_path)
    assert caught.value.message.splitlines() == [
        "Checkpoint step-0000000003 was written with another configuration; 4 keys differ:",
        "  betas: [0.9, 0.95] in the checkpoint, [0.9, 0.99] here",
        '  model.new: not set in the checkpoint, "x" here',
        "  model.width: 4 in the checkpoint, 8 here",
        "  none: null in the checkpoint, not set here",
    ]
    assert "allow_other_config=True" in caught.value.hint
    assert config_match.ALLOW_OTHER_CONFIG_VARIABLE in caught.value.hint


def test_many_differences_are_cut_short(tmp_path) -> None:
    saved_under({str(key): 0 for key in range(30)}, tmp_path)
    with pytest.raises(ConfigError, match="30 keys differ") as caught:
        load_under({str(key): 1 for key in range(30)}, tmp_path)
    assert caught.value.message.endswith("and 20 more")
    assert len(caught.value.message.splitlines()) == 12


def test_another_configuration_is_loaded_on_request(tmp_path, monkeypatch, caplog) -> None:
    saved_under(CONFIG, tmp_path)
    other = {**CONFIG, "seed": 2}
    assert load_under(other, tmp_path, allow_other_config=True) == 3
    assert "seed: 1 in the checkpoint, 2 here" in caplog.text
    monkeypatch.setenv(config_match.ALLOW_OTHER_CONFIG_VARIABLE, "1")
    assert load_under(other, tmp_path) == 3


def test_without_a_configuration_there_is_nothing_to_compare(tmp_path) -> None:
    saved_under(CONFIG, tmp_path / "with")
    assert load_under(None, tmp_path / "with") == 3
    with Distributon(1) as d:
        d.launch().save(3, root=tmp_path / "without", progress={})
    assert load_under(CONFIG, tmp_path / "without") == 3


def test_checkpoints_are_bound_to_the_keys_that_name_a_run() -> None:
    train = {"batch_size": 4, "log_every": 5, "steps": 9}
    whole = {"seed": 1, "train": train, "nodes": 3, "time_limit": 5}
    named = part_of(whole, Identity.COMPUTED, Identity.EXTENT)
    assert named == {"seed": 1, "train": {"batch_size": 4, "steps": 9}, "nodes": 3}
    assert config_match.bound_to(whole) == {"seed": 1, "train": {"batch_size": 4}}


def loaded(d: Distributon, root: Path) -> tuple[int | None, str | None, dict[str, int]]:
    progress = {"left": 1}
    return d.load(root=root, progress=progress), d.resumed_from, progress


def test_the_newer_state_of_memory_and_disk_is_loaded(alone: Distributon, tmp_path: Path) -> None:
    copy_to_memory(alone, tmp_path, 2, progress={"at": 2})
    assert loaded(alone, tmp_path) == (2, "memory", {"at": 2})
    alone.save(5, root=tmp_path, progress={"at": 5})
    assert loaded(alone, tmp_path) == (5, "disk", {"at": 5})
    copy_to_memory(alone, tmp_path, 7, progress={"at": 7})
    assert loaded(alone, tmp_path) == (7, "memory", {"at": 7})


def test_a_state_in_memory_is_loaded_if_a_newer_checkpoint_is_damaged(
    alone: Distributon, tmp_path: Path
) -> None:
    alone.save(5, root=tmp_path, progress={"at": 5})
    copy_to_memory(alone, tmp_path, 7, progress={"at": 7})
    flip_bit(alone.save(9, root=tmp_path, progress={"at": 9}) / "state.json")
    assert loaded(alone, tmp_path) == (7, "memory", {"at": 7})


def test_states_in_memory_that_are_newer_than_the_loaded_one_are_discarded(
    alone: Distributon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training repeats these steps, and would later resume from a state of the abandoned ones."""

    def fail(*_: object) -> None:
        raise CheckpointError("can't be read")

    alone.save(5, root=tmp_path, progress={"at": 5})
    copy_to_memory(alone, tmp_path, 7, progress={"at": 7})
    with monkeypatch.context() as patch:
        patch.setattr(restore, "_read", fail)
        assert loaded(alone, tmp_path) == (5, "disk", {"at": 5})
    assert loaded(alone, tmp_path) == (5, "disk", {"at": 5})

    copy_to_memory(alone, tmp_path / "other", 7, progress={"at": 7})
    with monkeypatch.context() as patch:
        patch.setattr(restore, "_read", fail)
        assert loaded(alone, tmp_path / "other") == (None, None, {"left": 1})
    assert loaded(alone, tmp_path / "other") == (None, None, {"left": 1}), "training has begun at step 0"


def test_a_state_in_memory_of_another_configuration_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Distributon(1, config=CONFIG) as d:
        copy_to_memory(d.launch(), tmp_path, 3, progress={"at": 3})
        held = [os.dup(number) for number in d._checkpointer.saves._buffers.descriptors]
    monkeypatch.setenv(MEMORY_VARIABLE, ",".join(map(str, held)))
    assert load_under(CONFIG, tmp_path) == 3
    assert load_under({**CONFIG, "seed": 2}, tmp_path) is None
    assert "of step 3 in memory was written with another configuration" in caplog.text
    for number in held:
        os.close(number)


# A chosen checkpoint.


def test_a_chosen_or_the_best_checkpoint_is_loaded(alone: Distributon, tmp_path: Path) -> None:
    best = ("eval_loss", "min")
    for step, loss in ((1, 0.5), (2, 0.2), (3, 0.2), (4, 0.9), (5, math.nan), (6, 0.4)):
        metrics = {"eval_loss": torch.tensor(loss), "steps": step}
        best = ("eval_loss", "min")
        alone.save(
            step, {"progress": {"at": step}}, root=tmp_path, keep_last=2, keep_best=best, metrics=metrics
        )
    assert steps_in(tmp_path) == [6, 5, 3]
    progress: dict[str, int] = {}
    assert (alone.load(root=tmp_path, step=5, progress=progress), progress) == (5, {"at": 5})
    assert (alone.load(root=tmp_path, best=best, progress=progress), progress) == (3, {"at": 3})
    assert alone.load(root=tmp_path, best=("steps", "max"), progress=progress) == 6
    copy_to_memory(alone, tmp_path, 3, progress={"at": 33})
    flip_bit(tmp_path / "step-0000000003" / "state.json")
    assert alone.load(root=tmp_path, best=best, progress=progress) == 6, (
        "the next best, if the best is damaged"
    )
    for chosen, words in (
        (
            {"step": 3},
            "step 3 .* is damaged.*steps 3, 5, 6, with the metrics: eval_loss, steps",
        ),
        ({"step": 7}, "checkpoint of step 7 .*steps 3, 5, 6"),
        ({"best": ("accuracy", "max")}, "with the metric 'accuracy'.*metrics: eval_loss, steps"),
    ):
        with pytest.raises(CheckpointError, match=words):
            alone.load(root=tmp_path, progress=progress, **chosen)
    assert progress == {"at": 6}
    assert steps_in(tmp_path) == [6, 5, 3]
    with pytest.raises(CheckpointError, match="contains no checkpoints"):
        alone.load(root=tmp_path / "none", step=1)


def test_a_metric_of_keep_best_that_no_checkpoint_has_is_logged_once(
    alone: Distributon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(step: int, name: str, **metrics: float) -> int:
        caplog.clear()
        alone.save(step, root=tmp_path, progress={}, keep_best=(name, "min"), metrics=metrics, wait=step != 3)
        return len(caplog.records)

    assert save(1, "eval_los", eval_loss=0.5) == 1
    assert "'eval_los', but no checkpoint has it so far (metrics of this save: eval_loss)" in (caplog.text)
    assert save(2, "eval_los", eval_loss=0.5) == 0
    assert save(3, "other", other=1.0) == save(4, "other") == 0, "another save had it"
    assert save(5, "eval_loss") == 0
    with Distributon() as later:
        later.launch()
        later.save(6, root=tmp_path, progress={}, keep_best=("eval_loss", "min"))
    assert not caplog.records, "a checkpoint on the disk has it"


def test_a_checkpoint_that_is_still_being_written_can_be_chosen(alone: Distributon, tmp_path: Path) -> None:
    alone.save(1, root=tmp_path, progress={"at": 1}, metrics={"loss": 2.0})
    alone.save(2, root=tmp_path, progress={"at": 2}, metrics={"loss": 1.0}, wait=False)
    assert alone.load(root=tmp_path, best=("loss", "min"), progress={}) == 2


def test_a_save_after_the_load_of_an_older_checkpoint_abandons_the_newer_ones(
    alone: Distributon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume would use them instead, with the steps that the training has left."""

    def names() -> list[str]:
        return sorted(path.name.replace("step-00000000", "") for path in tmp_path.glob("*step-*"))

    for step in (5, 8, 9):
        alone.save(step, root=tmp_path, progress={"at": step})
    copy_to_memory(alone, tmp_path, 9, progress={"at": 90})
    assert alone.load(root=tmp_path, step=5, progress={}) == 5
    assert loaded(alone, tmp_path) == (9, "memory", {"at": 90}), "a load changes nothing on its own"
    alone.save(9, root=tmp_path, progress={"at": 9})
    assert names() == ["05", "08", "09"]

    assert alone.load(root=tmp_path, step=5, progress={}) == 5
    copy_to_memory(alone, tmp_path, 6, progress={"at": 66})
    assert names() == ["05", "abandoned-08", "abandoned-09"]
    assert (tmp_path / "latest").read_text() == "step-0000000005\n"
    assert caplog.text.count("continues from the older step 5") == 1
    assert loaded(alone, tmp_path) == (6, "memory", {"at": 66})

    alone.save(8, root=tmp_path, progress={"at": 88})
    copy_to_memory(alone, tmp_path, 8, progress={"at": 89})
    alone.load(root=tmp_path, step=5, progress={})
    alone.save(8, root=tmp_path, progress={"at": 808})
    assert names() == ["05", "08", "abandoned-08", "abandoned-08-2", "abandoned-09"]
    alone.load(root=tmp_path, step=5, progress={})
    alone.save(11, root=tmp_path, progress={"at": 11})
    assert names()[:3] == ["05", "08", "11"], "a resume finds step 11"
    assert loaded(alone, tmp_path) == (11, "disk", {"at": 11})


def test_a_write_that_a_dead_rank_requested_ends_before_newer_checkpoints_are_abandoned(
    alone: Distributon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.save(5, root=tmp_path, progress={"at": 5})
    copy_to_memory(alone, tmp_path, 9, progress={"at": 9})
    alone.load(root=tmp_path, step=5, progress={})
    buffers = alone._checkpointer.saves._buffers
    buffers.set_writing(0, True)

    def finish_write(seconds: float) -> None:
        checkpoint.write(tmp_path, 9, {}, meta={}, keep_last=3)
        buffers.set_writing(0, False)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=finish_write)
    monkeypatch.setattr(async_writer, "time", clock)
    alone.save(6, root=tmp_path, progress={"at": 6})
    assert steps_in(tmp_path) == [6, 5]
    assert (tmp_path / "abandoned-step-0000000009").is_dir()


def test_a_load_that_is_not_strict_leaves_out_what_has_no_counterpart(
    alone: Distributon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = parts()
    alone.save(9, root=tmp_path, model=model, mine=Counter(3))
    alone.setup_dataloader(DataLoader([1, 2]))
    deeper, later, custom = parts(depth=3)[0], Counter(1), Renamed(3, 4)
    kept = bits(deeper[2], later)
    assert alone.load(root=tmp_path, model=deeper, later=later, strict=False) == 9
    assert bits(deeper[:2]) == bits(model[:2])
    assert bits(deeper[2], later) == kept
    for words in ("model: 4 keys missing", "later: not in the checkpoint", "data: 0 positions"):
        assert words in caplog.text
    assert alone.load(root=tmp_path, model=custom, strict=False) == 9, "none of its keys is there"
    before = bits(later)
    with pytest.raises(CheckpointError, match="4 tensors of another shape"):
        alone.load(root=tmp_path, mine=later, model=parts(6)[0], strict=False)
    assert bits(later) == before


# The test save.


def test_check_can_save_includes_the_states_of_the_optimizer(alone, tmp_path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        checkpoint, "check_can_write", lambda root, state, **options: asked.append(options["growth"])
    )
    model = nn.Linear(99, 10, bias=False)
    frozen = nn.Parameter(torch.ones(50), requires_grad=False)
    params = [*model.parameters(), frozen]
    for optimizer in (
        torch.optim.AdamW(params), torch.optim.SGD(params), torch.optim.SGD(params, momentum=0.9), parts()[1],
    ):  # fmt: skip
        assert alone.check_can_save(root=tmp_path, model=model, optimizer=optimizer) >= 0
    assert asked == [2 * 3960, 0, 3960, 0]


# A damaged one.


@pytest.mark.parametrize(
    ("damaged", "step", "consequence"),
    [
        ((), 30, None),
        ((30,), 20, "can't be used. The training resumes from step 20, the newest that verifies."),
        ((30, 20, 10), None, "can't be used, nor can any before it. The training starts at step 0."),
    ],
)
def test_a_run_records_that_its_newest_checkpoint_is_damaged(
    request, tmp_path, monkeypatch, damaged, step, consequence
) -> None:
    folder = RunFolder(tmp_path)
    model = nn.Linear(2, 2)
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "0")
    alone = request.getfixturevalue("alone")
    for saved in (10, 20, 30):
        progress = {"evaluated_at": -1, "losses": []}
        path = alone.save(saved, root=folder.checkpoints_dir, progress=progress, model=model)
        if saved in damaged:
            (path / "state.json").unlink()

    settings = SimpleNamespace(steps=100, max_time=None, best=None, keep_last=3, on_spike="fail")
    parts = SimpleNamespace(
        settings=settings,
        saved_objects={"model": model},
        unit="samples",
        bare_model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        scheduler=None,
    )
    training = Training(alone, parts, Callbacks({}), folder)
    training.resume()
    assert training.step == (step or 0)

    warnings = []
    if consequence:
        text = f"Checkpoint step-0000000030 {consequence} "
        warnings = [text + "`slurmddp checkpoints RUN` lists the checkpoints, the log contains the reason."]
    events = list(read_lines(folder.attempts_file))
    assert [event["text"] for event in events if event["event"] == "warned"] == warnings
    assert [event["step"] for event in events if event["event"] == "resumed"] == ([step] if step else [])


@pytest.mark.parametrize("where", ["its run", "another folder", "no attempt", "no run"])
def test_only_checkpoints_of_the_run_give_events(request, tmp_path, monkeypatch, where) -> None:
    folder, model = RunFolder(tmp_path), nn.Linear(2, 2)
    if where != "no run":
        monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    if where in ("its run", "another folder"):
        monkeypatch.setenv("SLURMDDP_ATTEMPT", "3")
    alone = request.getfixturevalue("alone")
    root = tmp_path / "elsewhere" if where == "another folder" else folder.checkpoints_dir
    alone.save(10, root=root, model=model)
    alone.load(root=root, model=model)
    optimizer = alone.setup_optimizer(torch.optim.SGD(alone.setup_model(model).parameters()))
    for _ in range(2):
        optimizer.step()
    events = [(event["event"], event["step"], event["attempt"]) for event in read_lines(folder.attempts_file)]
    wanted = {
        "its run": [("saved", 10, 3), ("resumed", 10, 3), ("first_step", 11, 3)],
        "another folder": [("first_step", 11, 3)],
    }
    assert events == wanted.get(where, [])


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([{}, {}], (None, 0, False)),
        ([{4: False}, {5: False}], (5, 1, True)),
        ([{4: False, 5: False}, {4: False, 5: False}], (5, 0, False)),
        ([{4: True, 5: True}, {4: True}], (4, 0, False)),
        ([{5: True}, {}], (None, 0, False)),
        ([{5: True}, {4: False}], (4, 1, True)),
    ],
)
def test_a_part_in_memory_is_used_if_all_nodes_have_theirs(
    held: list[dict[int, bool]], expected: tuple[int | None, int, bool]
) -> None:
    """Each rank's node holds states of these steps, which are parts or not."""
    offers = [[(StoredState(step, step, 0, 0, 0, 0), part) for step, part in one.items()] for one in held]
    best, source, is_missing = restore._newest(offers)
    assert (None if best is None else best.step, source, is_missing) == expected
