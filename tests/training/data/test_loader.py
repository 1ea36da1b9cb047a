"""Loaders that resume: epochs, positions, devices, and the options of the user's loader."""

from __future__ import annotations

import itertools
from collections import Counter, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.errors import ConfigError, MismatchError, SlurmddpError
from slurmddp.settings.spec import GlobalBatch
from slurmddp.training.checkpointing import training_state
from slurmddp.training.data.distributed_loader import DistributedLoader, to_device
from slurmddp.training.data.whole_batches import stacks_tensors
from support.loaders import Augmented, epoch_of, loader_of


@pytest.mark.filterwarnings("default::DeprecationWarning")  # a fork beside threads
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("samples", [11, 12])
@pytest.mark.parametrize("stop_after", [0, 2, 4])
def test_d8_a_loaded_position_gives_the_rest_of_the_epoch(
    workers: int, samples: int, stop_after: int
) -> None:
    """Batches that workers fetched ahead do not count as trained."""
    options = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4} if workers else {}
    whole, stopped, resumed = (
        loader_of(Augmented(samples), batch_size=3, shuffle=True, **options) for _ in range(3)
    )
    epochs = [epoch_of(whole) for _ in range(3)]
    assert epoch_of(stopped) == epochs[0]
    walk = iter(stopped)
    assert [batch.tolist() for batch in itertools.islice(walk, stop_after)] == epochs[1][:stop_after]
    resumed.load_state_dict(stopped.state_dict())
    del walk
    assert resumed.epoch == 1
    assert epoch_of(resumed) == epochs[1][stop_after:]
    assert epoch_of(resumed) == epochs[2]


def test_after_a_break_the_next_loop_is_the_next_epoch() -> None:
    loader, other = (loader_of(range(12), batch_size=3, shuffle=True) for _ in range(2))
    for _ in loader:
        break
    epoch_of(other)
    assert epoch_of(loader) == epoch_of(other)


def test_d8_without_shuffle_every_epoch_is_in_order() -> None:
    loader = loader_of(range(5), batch_size=2)
    assert epoch_of(loader) == epoch_of(loader) == [[0, 1], [2, 3], [4]]
    assert loader.epoch == 2


def test_a_refused_load_leaves_all_loaders_at_their_positions() -> None:
    next(walk := iter(stopped := loader_of(range(12))))
    state = {"objects": {}, "loaders": [stopped.state_dict(), loader_of(range(13)).state_dict()]}
    loaders = [loader_of(range(12)) for _ in range(2)]
    before = [loader.state_dict() for loader in loaders]
    with pytest.raises(SlurmddpError, match="samples"):
        training_state.apply(state, {}, loaders, lambda module: module, frozenset())
    assert [loader.state_dict() for loader in loaders] == before
    del walk


class _OneByOne(TensorDataset):
    """Is no TensorDataset to the loader, which so reads it as torch does."""

    deterministic = True


@pytest.mark.filterwarnings("default::DeprecationWarning")  # a fork beside threads
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_tensors_that_is_read_at_once_is_the_batch_that_torch_stacks(workers: int) -> None:
    tensors = [torch.randn(11, 3, 2), torch.arange(11), torch.randn(2, 11).bool().T, torch.randn(11).half()]
    at_once, one_by_one = (
        loader_of(kind(*tensors), batch_size=4, shuffle=True, num_workers=workers)
        for kind in (TensorDataset, _OneByOne)
    )
    assert type(at_once.dataset) is TensorDataset and len(at_once) == 3
    pairs = list(zip(at_once, one_by_one, strict=True))
    for found, wanted in pairs:
        assert type(found) is type(wanted) is list
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype and one.stride() == other.stride()
    assert [len(found[0]) for found, _ in pairs] == [4, 4, 3]
    pairs[0][0][1].fill_(99)
    assert torch.equal(tensors[1], torch.arange(11)), "a batch is a copy"


@pytest.mark.parametrize("change", ["collate", "sparse", "subclass"])
def test_other_data_than_plain_tensors_is_read_sample_by_sample(change: str) -> None:
    kind = _OneByOne if change == "subclass" else TensorDataset
    data = kind(torch.eye(4).to_sparse() if change == "sparse" else torch.eye(4))
    options = {"collate_fn": len} if change == "collate" else {}
    loader = DataLoader(data, batch_size=2, **options)
    assert not stacks_tensors(loader) and stacks_tensors(
        DataLoader(TensorDataset(torch.eye(4)), batch_size=2)
    )


def test_unbatched_data_stays_unbatched() -> None:
    loader = loader_of([torch.tensor([1, 2]), torch.tensor([3, 4])], batch_size=None)
    assert epoch_of(loader) == [[1, 2], [3, 4]]


def test_a_loader_keeps_its_options() -> None:
    options = {
        "num_workers": 2, "collate_fn": list, "pin_memory": True, "timeout": 77, "prefetch_factor": 5,
        "persistent_workers": True, "multiprocessing_context": "spawn", "drop_last": True, "batch_size": 2,
    }  # fmt: skip
    for own in ({"shuffle": True}, {"sampler": [0, 1]}):
        given = DataLoader(range(4), **options, **own)
        made = loader_of(range(4), **options, **own)._loader
        assert {name: getattr(made, name) for name in options} == {
            name: getattr(given, name) for name in options
        }


@pytest.mark.parametrize(
    ("accumulate", "drop_last", "batches"),
    [(1, True, 6), (2, True, 6), (3, True, 6), (4, True, 4), (4, False, 7)],
)
def test_len_is_the_number_of_batches_of_an_epoch(accumulate: int, drop_last: bool, batches: int) -> None:
    loader = loader_of(range(20), batch_size=3, drop_last=drop_last, accumulate=accumulate)
    assert len(loader) == loader.remaining == len(epoch_of(loader)) == batches


@pytest.mark.parametrize("sampler", [None, list(range(20))], ids=["ordered", "own sampler"])
@pytest.mark.parametrize(("drop_last", "whole"), [(True, 6), (False, 7)])
def test_remaining_counts_the_batches_of_a_resumed_epoch(
    drop_last: bool, whole: int, sampler: list[int] | None
) -> None:
    first, second = (
        loader_of(range(20), batch_size=3, drop_last=drop_last, sampler=sampler) for _ in range(2)
    )
    left = [first.remaining, *(first.remaining for _ in itertools.islice(first, 4))]
    assert left == [whole - number for number in range(5)]
    second.load_state_dict(first.state_dict())
    assert second.remaining == whole - 4 == len(list(second))
    assert second.remaining == len(second) == whole


@pytest.mark.parametrize(("samples", "ranks"), [(1, 2), (3, 4)])
def test_fewer_samples_than_ranks_are_refused(samples: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"has {samples} sample\(s\), fewer than the {ranks} ranks"):
        loader_of(range(samples), ranks=ranks)
    assert len(epoch_of(loader_of(range(samples), ranks=ranks, even=False))) == 1
    assert len(loader_of(range(ranks), ranks=ranks)) == 1


# With more or fewer ranks: each sample once, and no size that can't share a step.

GLOBAL_BATCH = 24


def loaders(world_size: int, n: int, *, keep_global_batch: bool = True, **options: Any) -> list[Any]:
    """Return what each of `world_size` ranks would iterate over."""
    own = {"seed": 5, "shuffle": True, "even": False, "keep_global_batch": keep_global_batch, **options}
    return [loader_of(range(n), rank=rank, ranks=world_size, **own) for rank in range(world_size)]


def some_steps(ranks: list[DistributedLoader], steps: int) -> list[list[int]]:
    """Let all ranks take `steps` steps, or what is left of the epoch; return the samples of each step."""
    walks = [iter(loader) for loader in ranks]
    taken = []
    for _ in range(steps):
        step: list[int] = []
        for walk, loader in zip(walks, ranks, strict=True):
            for batch in itertools.islice(walk, loader.accumulate):
                step += batch.tolist()
        if not step:
            break
        taken.append(sorted(step))
    return taken


chains = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 6]), st.integers(0, 20)),
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(2 * GLOBAL_BATCH, 700), drop_last=st.booleans(), chain=chains)
def test_each_sample_is_trained_once_over_any_chain_of_world_sizes(
    n: int, drop_last: bool, chain: list[tuple[int, int, int]]
) -> None:
    """Stop anywhere, on the real loaders; the steps equal the steps of an undisturbed run on one rank."""
    options = {"drop_last": drop_last}
    expected = some_steps(loaders(1, n, batch_size=GLOBAL_BATCH, **options), n)
    state, seen = None, []
    for world_size, batch_size, stop in [(4, 6, 2), (2, 6, 2), (3, 6, 1), *chain, (1, 6, n)]:
        accumulate = GLOBAL_BATCH // 4 // 6 if state is None else 1
        ranks = loaders(world_size, n, batch_size=batch_size, accumulate=accumulate, **options)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        steps_left = len(expected) - len(seen)
        # A step past the end would begin the next epoch.
        seen += some_steps(ranks, min(stop, max(0, steps_left - 1)) if stop < n else n)
        state = ranks[0].state_dict()
    assert seen == expected
    whole = Counter(itertools.chain(*seen))
    assert set(whole.values()) == {1}
    assert len(whole) == (n // GLOBAL_BATCH * GLOBAL_BATCH if drop_last else n)


@given(samples=st.integers(1, 3000), world_size=st.integers(1, 64), most=st.integers(1, 100))
def test_a_step_is_shared_evenly_or_refused(samples: int, world_size: int, most: int) -> None:
    if samples % world_size:
        with pytest.raises(MismatchError, match=f"{samples} samples.*{world_size} ranks") as caught:
            GlobalBatch(samples).share(world_size, most)
        shown = caught.value.hint.rpartition("work: ")[2].rstrip(".").split(", ")
        assert all(samples % int(size) == 0 for size in shown if size)
        return
    size, batches = GlobalBatch(samples).share(world_size, most)
    assert size * batches * world_size == samples and size <= most
    fewer = [count for count in range(1, batches) if (samples // world_size) % count == 0]
    assert all(samples // world_size // count > most for count in fewer)


def test_a_loader_that_does_not_keep_the_global_batch_says_so(caplog: pytest.LogCaptureFixture) -> None:
    state = loaders(4, 100, batch_size=2)[0].state_dict()
    (loader,) = loaders(1, 100, batch_size=2, keep_global_batch=False)
    loader.load_state_dict(state)
    assert (loader.accumulate, loader.batch_size) == (1, 2)
    assert "had 8 samples when the checkpoint was written, and has 2 now" in caplog.text


def test_a_number_of_ranks_that_cannot_share_is_refused() -> None:
    state = loaders(4, 100, batch_size=2)[0].state_dict()
    with pytest.raises(MismatchError, match="World sizes that work: 1, 2, 4, 8"):
        loaders(3, 100, batch_size=2)[0].load_state_dict(state)


Pair = namedtuple("Pair", "x y")


def test_nested_tensors_are_moved() -> None:
    batch = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": Pair(torch.ones(3), 4)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.is_meta
    assert moved["b"].y == 4


def test_an_object_that_can_move_itself_does_so() -> None:
    (packed,) = to_device([nn.utils.rnn.pack_sequence([torch.ones(2)])], torch.device("meta"))
    assert packed.data.is_meta and not packed.batch_sizes.is_meta


def test_a_step_that_is_too_large_for_the_data_may_shrink_by_a_load() -> None:
    options = {"batch_size": 6, "accumulate": 2, "drop_last": True}
    state = loaders(1, 41, **options)[0].state_dict()
    four = loaders(4, 41, **options)
    with pytest.raises(ConfigError, match="41 samples; one step of 4 ranks with 12 samples each needs 48"):
        next(iter(four[0]))
    with pytest.raises(ConfigError, match="41 samples; one step of 4 ranks"):
        loaders(4, 41, keep_global_batch=False, **options)
    for loader in four:
        loader.load_state_dict(state)
    assert some_steps(four, 3) == some_steps(loaders(1, 41, **options), 3)


@pytest.mark.parametrize(
    ("samples", "options", "left"),
    [
        (31, {"accumulate": 2}, 6),  # One more is left out, because there are two ranks.
        (31, {"accumulate": 2, "even": False}, 7),
        (25, {"accumulate": 2}, 0),
        (30, {"accumulate": 2, "drop_last": True}, 0),
        (30, {"accumulate": 1}, 0),
    ],
)
def test_an_epoch_that_ends_within_a_step_is_named(
    samples: int, options: dict[str, Any], left: int, caplog: pytest.LogCaptureFixture
) -> None:
    loaders(2, samples, batch_size=3, **{"even": True, **options})
    assert ("samples is no multiple of a step of 12" in caplog.text) == (left > 0)
    assert (f": {left} are left" in caplog.text) == (left > 0)
