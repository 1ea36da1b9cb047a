"""Runs that resume with more or fewer ranks: each sample once, and no size that can't share a step."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError
from slurmddp.runs.folder.jsonl import read_lines
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.spec import GlobalBatch
from slurmddp.training.data.loader import DistributedLoader, distribute
from support.distributed import elastic_jobs, trainer_jobs
from support.distributed.ranks import run_ranks
from support.distributed.trainer_runs import trainer_config

GLOBAL_BATCH = 24


def loaders(world_size: int, n: int, *, batch_size: int, accumulate: int = 1, **options: Any) -> list[Any]:
    """Return what each of `world_size` ranks would iterate over."""
    keep = options.pop("keep_global_batch", True)
    return [
        distribute(
            DataLoader(TensorDataset(torch.arange(n)), batch_size=batch_size, shuffle=True, **options),
            device=torch.device("cpu"),
            info=RankInfo(environment="local", rank=rank, world_size=world_size, local_world_size=world_size),
            seed=5,
            accumulate=accumulate,
            even=False,
            keep_global_batch=keep,
        )
        for rank in range(world_size)
    ]


def some_steps(ranks: list[DistributedLoader], steps: int) -> list[list[int]]:
    """Let all ranks take `steps` steps, or what is left of the epoch; return the samples of each step."""
    walks = [iter(loader) for loader in ranks]
    taken = []
    for _ in range(steps):
        step: list[int] = []
        for walk, loader in zip(walks, ranks, strict=True):
            for batch in itertools.islice(walk, loader.accumulate):
                step += batch[0].tolist()
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


# On gloo, with the default program.


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    train = {
        "steps": 8,
        "batch_size": 2,
        "log_every": 2,
        "eval_every": 4,
        "eval_batches": 5,
        "save_every": 0,
    }
    scheduler = {"_target_": "slurmddp.training.builtin.schedules.cosine", "steps": 8, "warmup_steps": 2}
    return trainer_config(
        {"_target_": "support.distributed.elastic_jobs.Noted", "blur": 0.5}, train, scheduler=scheduler
    )


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_ranks_that_cannot_share_a_step_leave_the_run_as_it_is(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_ranks(elastic_jobs.train, 4, config, str(tmp_path / "notes"), str(folder), 3)
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    config["data"]["notes"] = str(tmp_path / "none")
    for error in run_ranks(trainer_jobs.error_of_training, 3, config, str(folder)):
        assert "A step of 8 samples can't be shared evenly by 3 ranks" in error
        assert "World sizes that work: 1, 2, 4, 8" in error
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_an_evaluation_reads_each_heldout_sample_once(tmp_path: Path, config: dict[str, Any]) -> None:
    """On any number of ranks; what a sample draws at random is the same everywhere, too."""
    config["train"] |= {"steps": 1, "batch_size": 7, "eval_every": 0}
    losses = []
    for ranks in (1, 2, 3, 4):
        folder = tmp_path / f"run-{ranks}"
        folder.mkdir()
        run_ranks(elastic_jobs.train, ranks, config, str(folder / "notes"), str(folder), None)
        notes = [folder / "notes" / "heldout" / f"rank-{rank}" for rank in range(ranks)]
        read = Counter(int(line) for file in notes for line in file.read_text().split())
        # Before the first step and after the last: 30 samples, of which 5 batches of 7 would be 35.
        assert read == Counter(dict.fromkeys(range(30), 2))
        lines = read_lines(RunFolder(folder).metrics_file)
        losses.append(next(line["eval_loss"] for line in lines if line["step"] == 0))
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-6)


@pytest.mark.distributed
@pytest.mark.usefixtures("rank_server")
def test_iterable_data_goes_on_on_each_rank(tmp_path: Path) -> None:
    first = run_ranks(elastic_jobs.read_stream, 2, str(tmp_path), 2)
    then = run_ranks(elastic_jobs.read_stream, 2, str(tmp_path), 1)
    assert first == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]
    assert then == [[[12, 14, 16]], [[13, 15, 17]]]
