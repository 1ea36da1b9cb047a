"""The API on one process and on several: order of calls, equal numbers, common checkpoints."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slurmddp.errors import CheckpointError, ConfigError, MismatchError, SlurmddpError, StoppedAtCheckpoint
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.runs.status.metrics import latest
from slurmddp.training.distributon import Distributon
from slurmddp.training.loggers import MemoryLogger
from support.distributed import rank_jobs
from support.distributed.ranks import node_environments, place_environments, run_ranks
from support.runs.slurm_environs import FOUR_ON_TWO

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}

# Order of calls.


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.setup_model(nn.Linear(1, 1)),
        lambda d: d.setup_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())),
        lambda d: d.setup_dataloader(DataLoader([1, 2])),
        lambda d: d.backward(torch.ones(())),
        lambda d: d.save(1, root="x"),
        lambda d: d.load(root="x"),
        lambda d: d.should_stop(),
        lambda d: d.barrier(),
        lambda d: d.all_reduce(torch.ones(1)),
        lambda d: d.all_gather(1),
        lambda d: d.log_metrics({}, 1),
        lambda d: d.broadcast(1),
        lambda d: d.rank_zero_first().__enter__(),
        lambda d: d.nodes,
        lambda d: d.print("x"),
        lambda d: d.stop(),
        lambda d: d.rank,
        lambda d: d.device,
    ],
)
def test_d3_everything_before_launch_says_to_launch(call) -> None:
    with pytest.raises(SlurmddpError, match=r"not been launched.*launch\(\) first"):
        call(Distributon())


def test_d3_a_second_launch_is_refused(alone: Distributon) -> None:
    for again in (alone.launch, lambda: alone.launch(lambda d: d.rank)):
        with pytest.raises(SlurmddpError, match=r"launch\(\) was called a second time") as caught:
            again()
        assert "once, before any setup_ method" in caught.value.hint


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "variables", [{}, {"WORLD_SIZE": "2"}, {"SLURMDDP_ENVIRONMENT": "single", "RANK": "1"}]
)
def test_d3_a_launch_with_a_local_rank_above_zero_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch, devices: int, variables: dict[str, str]
) -> None:
    for name, value in {**variables, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    if devices == 1 and "SLURMDDP_ENVIRONMENT" in variables:
        with Distributon(1).launch() as d:
            assert d.world_size == 1, "it was asked for"
        return
    for launch in (Distributon(devices).launch, lambda: Distributon(devices).launch(lambda d: d.rank)):
        with pytest.raises(MismatchError, match="LOCAL_RANK=1 whose rank is unknown") as caught:
            launch()
        assert "torchrun or srun" in caught.value.hint


@pytest.mark.parametrize("devices", [1, 2, 4, "auto"])
@pytest.mark.parametrize(
    "environ",
    [FOUR_ON_TWO, {**FOUR_ON_TWO, "LOCAL_RANK": "1"}, TORCHRUN, {**FOUR_ON_TWO, **TORCHRUN}],
    ids=["srun", "srun with LOCAL_RANK", "torchrun", "torchrun in a step"],
)
def test_d4_launch_under_a_launcher_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], devices: int | str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert Distributon()._session.ranks_to_start(devices) == 0


def test_d4_ranks_under_srun_and_torchrun_have_the_schedulers_numbers(tmp_path: Path) -> None:
    of_torch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
    tasks = [
        {name: value for name, value in environ.items() if name not in of_torch}
        for environ in node_environments(2, 2, tmp_path)
    ]
    for rank, found in enumerate(run_ranks(rank_jobs.place, 4, environments=tasks)):
        assert found == {"numbers": [rank, rank % 2, rank // 2, 4, 2, 2], "children": "", "sum": 4}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    started = [
        {**{name: place[name] for name in of_torch}, **port, "TORCHELASTIC_RUN_ID": "x"}
        for place in place_environments(2)
    ]
    for rank, found in enumerate(run_ranks(rank_jobs.place, 2, environments=started)):
        assert found == {"numbers": [rank, rank, 0, 2, 2, 1], "children": "", "sum": 2}


def test_a_second_distributon_at_once_is_refused() -> None:
    refused = run_ranks(rank_jobs.second_launch, 2)
    assert refused == ["Another Distributon of this process has not been closed."] * 2


def test_calls_after_close_are_refused() -> None:
    d = Distributon(1).launch()
    d.close()
    d.close()
    with pytest.raises(SlurmddpError, match="closed"):
        d.barrier()


@pytest.mark.parametrize("number", [0, -1, 1.5, "four"])
def test_impossible_numbers_of_devices_are_refused(number) -> None:
    with pytest.raises(ConfigError, match="num_devices"):
        Distributon(number)


def _launch_two(end) -> None:
    try:
        Distributon(2).launch()
    except SlurmddpError as error:
        end.send(str(error))


def test_d3_launch_in_a_process_of_multiprocessing_is_refused() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_launch_two, args=(theirs,))
    child.start()
    assert ours.poll(60)
    assert "multiprocessing" in ours.recv()
    child.join()


def test_d3_a_launched_child_without_its_variables_starts_no_more_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMDDP_LAUNCHER", "local")
    monkeypatch.setenv("SLURMDDP_ENVIRONMENT", "single")
    with pytest.raises(SlurmddpError, match="SLURMDDP_ENVIRONMENT"):
        Distributon(2).launch()


class Forgetful:
    """A strategy without return statements."""

    def __init__(self, wraps: bool) -> None:
        self.wraps = wraps

    def wrap(self, model, device):
        return model if self.wraps else None

    def unwrap(self, model):
        return model

    def no_sync(self, model):
        return nullcontext()

    def setup_optimizer(self, optimizer, model):
        pass


def test_d11_a_strategy_that_returns_nothing_is_refused_by_the_methods_name() -> None:
    with Distributon(strategy=Forgetful(wraps=False)) as d:
        d.launch()
        with pytest.raises(ConfigError, match=r"Forgetful\.wrap returned a NoneType.*the module to call"):
            d.setup_model(nn.Linear(1, 1))
    with Distributon(strategy=Forgetful(wraps=True)) as d:
        model = d.launch().setup_model(nn.Linear(1, 1))
        with pytest.raises(ConfigError, match=r"Forgetful\.setup_optimizer returned a NoneType.*to step"):
            d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_d11_ranks_find_their_numbers_by_an_environment_of_ones_own(tmp_path: Path) -> None:
    pods = [
        {
            "JOB_COMPLETION_INDEX": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "JOB_NAME": f"{tmp_path}",
        }
        for rank in range(2)
    ]
    by_variable = [{**pod, "SLURMDDP_ENVIRONMENT": "support.own.environment.kubernetes"} for pod in pods]
    for environments, given in ((pods, ["support.own.environment.kubernetes"]), (by_variable, [])):
        for rank, found in enumerate(run_ranks(rank_jobs.place, 2, *given, environments=environments)):
            assert found == {"numbers": [rank, 0, rank, 2, 1, 2], "children": "", "sum": 2}


@pytest.mark.parametrize(
    ("environ", "flag"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "--nproc-per-node=3"),
        ({"SLURMDDP_LAUNCHER": "local", "SLURMDDP_LAUNCH_ID": "x"}, "num_devices"),
        ({"SLURMDDP_RUN_DIR": "/a", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "slurmddp run -n 3"),
    ],
)
def test_another_number_of_ranks_than_asked_for(monkeypatch: pytest.MonkeyPatch, environ, flag: str) -> None:
    place = place_environments(2)[0]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        monkeypatch.setenv(name, place[name])
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MismatchError, match=r"num_devices is 3.*started 2") as caught:
        Distributon(3).launch()
    assert flag in caught.value.hint


def test_a_function_runs_on_ranks_of_its_own_and_gives_rank_zeros_result(
    forked_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forked_python)

    def train(d: Distributon, lr: float, *, scale: int) -> tuple[int, float, str]:
        return d.world_size, d.all_reduce(torch.tensor(float(d.rank)), "sum").item(), f"{lr} {scale}"

    assert Distributon(2).launch(train, 0.5, scale=3) == (2, 1.0, "0.5 3")
    alone = Distributon(1)
    assert alone.launch(train, 0.5, scale=3) == (1, 0.0, "0.5 3")
    with pytest.raises(SlurmddpError, match="closed already"):
        alone.barrier()
    with pytest.raises(SlurmddpError, match=r"Rank \d failed: ConfigError"):
        Distributon(2).launch(lambda d: d.setup_dataloader(data_loader(), accumulate=0))


def test_ranks_of_a_launcher_call_one_function_after_the_other() -> None:
    assert run_ranks(rank_jobs.two_functions, 2) == [[1, "second"], [1, "second"]]


# On one process it is plain PyTorch.


def data_loader(shuffle: bool = False) -> DataLoader:
    x, y = rank_jobs.batch_of(0, 30)
    # Without a generator, plain torch draws its workers' seed from the global one, even without workers.
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=shuffle, generator=torch.Generator())


def test_d1_one_process_computes_what_plain_pytorch_does() -> None:
    torch.manual_seed(3)
    plain = rank_jobs.Net(dropout=0.3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for inputs, targets in data_loader():
        rank_jobs.step_on(plain, optimizer, inputs, targets)

    with Distributon(1, seed=3) as d:
        d.launch()
        model = d.setup_model(rank_jobs.Net(dropout=0.3))
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for inputs, targets in d.setup_dataloader(data_loader()):
            d.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_setup_loader_draws_nothing_from_the_global_generator(alone: Distributon) -> None:
    loader = alone.setup_dataloader(data_loader(shuffle=True))
    before = torch.get_rng_state()
    assert len(list(loader)) == 8
    assert torch.equal(before, torch.get_rng_state())


def test_the_last_moment_to_stop_allows_for_a_save_in_the_background(
    alone: Distributon, tmp_path: Path
) -> None:
    alone.save(1, root=tmp_path, wait=False, progress={"at": 1})
    stop = alone._session.stop
    assert (stop.is_writing(), stop._pace.measured.save_s) == (True, None)
    alone.finish_saving()
    assert not stop.is_writing()
    assert stop._pace.measured.save_s is not None, "the next save may take as long"


def test_an_optimizer_of_another_model_is_refused(alone: Distributon) -> None:
    alone.setup_model(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="2 of the 2 parameters of this SGD"):
        alone.setup_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))


def test_a_model_is_set_up_once() -> None:
    """On several ranks, two wrappers would average the gradients twice."""
    assert run_ranks(rank_jobs.set_up_again, 2) == [["refused"] * 3] * 2


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda d: Distributon(precision=16), "There is no precision 16"),
        (lambda d: Distributon(config=[1]), "config was given a list"),
        (lambda d: d.setup_model([nn.Linear(1, 1)]), "setup_model was given a list"),
        (lambda d: d.setup_optimizer(nn.Linear(1, 1)), "setup_optimizer was given a Linear"),
        (lambda d: d.setup_dataloader([1, 2]), "setup_dataloader was given a list"),
        (lambda d: d.setup_dataloader(d.setup_dataloader(data_loader())), "was given a SampledLoader"),
        (lambda d: d.backward(torch.ones((), requires_grad=True), accumulate=0), "accumulate is 0"),
        (
            lambda d: d.clip_gradients(nn.Linear(1, 1).parameters(), 1.0),
            "clip_gradients was given a generator",
        ),
        (lambda d: d.all_reduce(1.0), "all_reduce was given a float"),
        (lambda d: d.load(step="3", root="x"), "step='3'"),
        (lambda d: d.load(root=3), "root was given a int"),
        (lambda d: d.load(root=Path("s3://bucket/fit")), "`root` is s3:/bucket/fit, an address"),
        (lambda d: Distributon(backend=3), "backend was given a int"),
        (lambda d: Distributon(init_method=3), "init_method is 3"),
        (lambda d: Distributon(seed="1"), "seed is '1'"),
        (lambda d: Distributon(seed=1 << 64), "seed is 18446744073709551616"),
        (lambda d: Distributon(collective_timeout_s="9"), "collective_timeout_s is '9'"),
        (lambda d: Distributon(1).launch("train"), "launch was given 'train', which is not a function"),
        (lambda d: d.backward(1.0), "backward was given a float"),
        (lambda d: d.backward(torch.ones(4, 2)), "backward was given a tensor of shape (4, 2)"),
        (lambda d: d.backward(torch.ones(())), "a loss that depends on no parameter which takes gradients"),
        (lambda d: d.backward(torch.ones((), requires_grad=True), accumulate="2"), "accumulate is '2'"),
        (lambda d: d.setup_dataloader(data_loader(), accumulate="2"), "accumulate is '2'"),
        (lambda d: d.clip_gradients(nn.Linear(1, 1), "1"), "max_norm is '1'"),
        (lambda d: d.log_metrics([1], 1), "[1] is not a mapping from names to numbers"),
        (lambda d: d.log_metrics({"loss": 1}, "1"), "step is '1'"),
        (lambda d: d.memory_save_is_due("3"), "every is '3'"),
    ],
)
def test_arguments_of_another_kind_are_refused(alone: Distributon, call, found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)):
        call(alone)


def test_accumulated_batches_give_the_mean(alone: Distributon) -> None:
    whole, parts = rank_jobs.Net(), rank_jobs.Net()
    parts.load_state_dict(whole.state_dict())
    x, y = rank_jobs.batch_of(0, 8)
    alone.backward(nn.functional.cross_entropy(whole(x), y))
    for part in range(4):
        own = slice(2 * part, 2 * part + 2)
        with alone.accumulating(parts, last=part == 3):
            alone.backward(nn.functional.cross_entropy(parts(x[own]), y[own]), accumulate=4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# Several processes.


def test_d6_equal_first_weights_and_different_draws() -> None:
    (built, *draws), (built_too, *draws_too) = run_ranks(rank_jobs.own_draws, 2)
    assert torch.equal(built, built_too)
    assert len({tuple(draw.tolist()) for draw in (*draws, *draws_too)}) == 4, "draws repeat"


def test_d6_loader_workers_differ_by_rank_if_asked() -> None:
    (asked, not_asked), (asked_too, not_asked_too) = run_ranks(rank_jobs.worker_seeds, 2)
    assert len(asked | asked_too) == 4
    assert not_asked == not_asked_too and len(not_asked) == 2


def test_a_mean_is_the_same_alone_and_among_others() -> None:
    found = run_ranks(rank_jobs.means, 4)
    for together, one_by_one in found:
        assert torch.equal(together, one_by_one)
        assert torch.equal(together, found[0][0])
    values = [torch.randn(37, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    torch.testing.assert_close(found[0][0], torch.stack(values).mean(dim=0))


def test_a_mean_is_finite_although_the_sum_is_not() -> None:
    for found in run_ranks(rank_jobs.large_means, 2):
        assert len(found) == 5 and all(found.values()), found


@pytest.mark.parametrize(
    ("count", "batch_size", "drop_last", "even", "missing"),
    [(26, 3, True, True, 2), (26, 3, False, True, 0), (27, 3, False, True, 1), (27, 3, False, False, 0)],
)
def test_each_sample_once_in_every_epoch(count, batch_size, drop_last, even, missing) -> None:
    ranks = run_ranks(rank_jobs.samples_seen, 2, count, batch_size, drop_last, even, 2)
    orders = []
    for epoch in range(2):
        batches = [rank[epoch] for rank in ranks]
        seen = Counter(sample for rank in batches for batch in rank for sample in batch)
        assert set(seen.values()) == {1}
        assert len(seen) == count - missing
        assert not even or len(batches[0]) == len(batches[1])
        orders.append(batches)
    assert orders[0] != orders[1], "every epoch has an order of its own"


# Checkpoints.


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(rank_jobs.errors_of_save_and_load, 2, str(tmp_path))
    assert "could not be written" in first["no folder"]
    assert second["no folder"].startswith("CheckpointError: Rank 0 on ")
    assert "can't be saved" in first["no state"]
    assert "can't be saved" in second["no state"]
    assert "Did you mean optimizer" in first["not saved"]
    assert "does not fit this Net" in first["other model"]
    assert "Rank 1 on" in first["one rank"]
    assert "does not fit this Net" in second["one rank"]
    assert first["none"] == second["none"] == "None"


def test_a_loader_missing_before_load_is_an_error(alone: Distributon, tmp_path: Path) -> None:
    alone.setup_dataloader(data_loader())
    alone.save(1, root=tmp_path)
    with Distributon(1) as other:
        other._session._context = alone._session._context
        with pytest.raises(
            SlurmddpError, match=r"positions of 1 data loader\(s\), but 0 data loader\(s\) were"
        ):
            other.load(root=tmp_path)
        other._session._context = None


def test_d12_signal_handlers_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    with pytest.raises(StoppedAtCheckpoint), Distributon(1) as d:
        assert [d.launch().should_stop(), d.should_stop(), d.stop_requested] == [False] * 3
        assert d.stop_reason is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert d.stop_requested
        assert d.should_stop()
        assert str(d.stop_reason).startswith("SIGUSR2 on rank 0")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)] == before


def test_a_stop_closes_the_distributon() -> None:
    with pytest.raises(StoppedAtCheckpoint), Distributon(1) as d:
        d.launch()
        raise StoppedAtCheckpoint("Enough.")
    with pytest.raises(SlurmddpError, match="closed"):
        d.barrier()


def test_save_and_load_find_the_checkpoints_of_the_run(
    alone: Distributon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert alone.load(progress={"at": 0}) is None
    assert alone.save(3, progress={"at": 3}).parent == tmp_path / "checkpoints"
    assert alone.save(4, {"progress": {"at": 4}}).parent == tmp_path / "checkpoints"
    monkeypatch.setattr(alone._session, "run", RunContext(RunFolder(tmp_path / "run")))
    assert alone.load(progress={"at": 0}) is None
    assert alone.save(5, wait=False, progress={"at": 5}).parent == tmp_path / "run/checkpoints"
    alone.finish_saving()
    progress = {"at": 0}
    assert (alone.load(progress=progress), progress) == (5, {"at": 5})
    assert (alone.load(root="checkpoints", progress=progress), progress) == (4, {"at": 4})
    assert alone.check_can_save(progress={"at": 0}) > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d: d.save("folder", progress={}), r"save\(step, model=model, root=folder\)"),
        (lambda d: d.save("folder", 3, progress={}), r"save\(step, \{...\}, root=folder\)"),
        (lambda d: d.save(None, progress={}), r"save\(\) was given step=None"),
        (lambda d: d.save(3, 4, progress={}), "4 is not a mapping"),
        (
            lambda d: d.save(3, {"progress": {}}, progress={}),
            "Given twice, in the mapping and as a keyword: progress",
        ),
        (lambda d: d.save(3, {1: {}}), "not a mapping from names"),
        (lambda d: d.save(3, keep_best="loss"), r'\("eval_loss", "min"\)'),
        (lambda d: d.save(3, keep_best=("loss", "least")), "'least'"),
        (lambda d: d.save(3, metrics={"loss": "low"}), "not one number"),
        (lambda d: d.save(3, metrics=[1]), "not a mapping from names to numbers"),
        (lambda d: d.save(3, keep_last="3"), "keep_last is '3'"),
        (lambda d: d.memory_save("folder", 3), r"memory_save\(step, \{...\}, root=folder\)"),
        (lambda d: d.check_can_save("folder"), r"check_can_save\(\{...\}, root=folder\)"),
        (lambda d: d.load("folder"), r"load\(\{...\}, root=folder\)"),
        (lambda d: d.load(best="loss"), r'\("eval_loss", "min"\)'),
        (lambda d: d.load(step=1, best=("loss", "min")), "`step` or `best`"),
    ],
)
def test_arguments_of_saves_and_loads_are_checked(
    alone: Distributon, call: Callable[[Distributon], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call(alone)


@pytest.mark.parametrize("debug", ["", "1"])
def test_the_traceback_of_a_refusal_ends_where_the_program_has_called(
    alone: Distributon, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv("SLURMDDP_DEBUG", debug)
    with pytest.raises(ConfigError) as refused:
        alone.load(best="loss")
    files = [Path(frame.path).name for frame in refused.traceback]
    assert files[:2] == ["test_distributon.py", "heartbeat.py"]
    assert (len(files) > 2) is (debug == "1")


def test_values_go_between_ranks_whatever_their_shape(tmp_path: Path) -> None:
    found = run_ranks(rank_jobs.exchanges, 3, str(tmp_path))
    for rank, one in enumerate(found):
        assert [one[op] for op in ("sum", "product", "max", "min")] == [[6, -3], [6, 0], [3, 0], [1, -2]]
        assert one["ragged"] == [[], [[1, 1]], [[2, 2], [2, 2]]]
        assert one["values"] == [{"rank": r, "name": "x" * r} for r in range(3)]
        assert one["first"] == ("from", 0, torch.tensor([0]))
        assert one["places"] == (1, 3, None)
        assert (one["prepared"], one["prepared on the node"]) == (rank > 0, rank > 0)
        assert "no space" in one["failed"]
    assert [one.get("entered", False) for one in found] == [True, False, False]


def test_values_of_one_rank_come_back(alone: Distributon) -> None:
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    for op in ("mean", "sum", "product", "max", "min"):
        reduced = alone.all_reduce(given, op)
        assert torch.equal(reduced, given) and reduced is not given and not reduced.requires_grad
    assert alone.all_gather("x") == ["x"]
    assert alone.broadcast({"a": 1}) == {"a": 1}
    for share in (alone.all_gather, alone.broadcast):
        with pytest.raises(CheckpointError, match=r"value at value/a is a builtins\.set"):
            share({"a": {1}})  # Several ranks could not send it.
    with alone.rank_zero_first():
        pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda d: d.all_reduce(torch.ones(1), "maximum"), "no operation 'maximum'.*max"),
        (lambda d: d.all_reduce(torch.ones(1), 3), "no operation 3.*Known"),
        (lambda d: d.all_reduce(torch.ones(1, dtype=torch.int64)), "mean over ranks.*int64.*float"),
        (
            lambda d: d.all_reduce(torch.ones(1, dtype=torch.complex64), "max"),
            '"max" over.*complex64.*no order',
        ),
        (lambda d: d.clip_gradients(nn.Linear(1, 1), 0.0), "max_norm is 0.0"),
        (lambda d: d.clip_gradients(nn.Linear(1, 1), float("nan")), "max_norm is nan"),
    ],
)
def test_a_call_with_a_wrong_value_is_refused(alone: Distributon, call, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call(alone)


def test_all_ranks_clip_the_averaged_gradients_alike() -> None:
    found = run_ranks(rank_jobs.clipped, 2)
    for gradients, norm, left in found:
        assert norm == found[0][1] > 0.01
        assert left == pytest.approx(0.01, rel=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][0], strict=True))


def test_several_models_and_optimizers_are_set_up_in_one_call(alone: Distributon) -> None:
    first, second, third = alone.setup_model(nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(1, 1))
    assert (second.out_features, third.out_features) == (3, 1)
    sgd, adam = torch.optim.SGD(first.parameters()), torch.optim.Adam(second.parameters())
    assert alone.setup_optimizer(sgd, adam) == (sgd, adam)
    stray = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ConfigError, match="of this SGD belong to no model"):
        alone.setup_optimizer(adam, stray)


def test_the_run_folder_is_known_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "0")
    with Distributon().launch() as d:
        assert d.run_folder == tmp_path


def test_several_loaders_are_those_of_several_calls() -> None:
    with Distributon(1, seed=3).launch() as d:
        train, test = d.setup_dataloader(data_loader(shuffle=True), data_loader(), accumulate=2)
        one = d.setup_dataloader(data_loader(shuffle=True))
        assert (train.accumulate, test.accumulate, one.accumulate) == (2, 2, 1)
        assert [x.tolist() for x, _ in train] == [x.tolist() for x, _ in one]
        assert [x.tolist() for x, _ in test] == [x.tolist() for x, _ in data_loader()]
        assert d._loaders == [train, test, one], "all of them are saved and restored"


# Events of a program that never calls `load`.


def test_the_first_step_is_recorded_once_without_load(run_folder: RunFolder) -> None:
    for _ in range(2):
        with Distributon(1).launch() as d:
            optimizer = d.setup_optimizer(torch.optim.SGD(d.setup_model(nn.Linear(2, 1)).parameters()))
            for _ in range(2):
                optimizer.step()
    [event] = run_folder.events()
    assert (event["event"], event["step"], event["attempt"], event["loads"]) == ("first_step", 1, 2, False)
    assert list(event["phases"])[-1] == "first_step"


# Metrics.


@pytest.fixture
def run_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("SLURMDDP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMDDP_ATTEMPT", "2")
    return RunFolder(tmp_path)


def test_logged_metrics_stand_in_the_run_folder(run_folder: RunFolder) -> None:
    with Distributon(1).launch() as d:
        d.log_metrics({"loss": torch.tensor([0.5]), "val/f1": 0.25, "seen": 3, "bad": float("nan")}, 7)
    [record] = map(json.loads, run_folder.metrics_file.read_text().splitlines())
    assert abs(record.pop("time") - time.time()) < 600
    assert math.isnan(record.pop("bad"))
    assert record == {"step": 7, "attempt": 2, "loss": 0.5, "val/f1": 0.25, "seen": 3}
    assert latest(run_folder).own["val/f1"] == 0.25


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"loss": torch.zeros(2)}, r"'loss' is a Tensor of shape \(2,\)"),
        ({"name": "x"}, "'name' is a str, not one number"),
        ({"step": 3}, "named 'step'"),
    ],
)
def test_a_metric_that_is_not_one_number_is_refused(run_folder: RunFolder, metrics, problem: str) -> None:
    with Distributon(1).launch() as d, pytest.raises(ConfigError, match=problem):
        d.log_metrics({"fine": 1.0, **metrics}, 1)
    assert not run_folder.metrics_file.exists()


def test_only_rank_zero_records_metrics_and_loggers_alone_without_a_run_folder(tmp_path, monkeypatch) -> None:
    assert run_ranks(rank_jobs.logged_metrics, 2, str(tmp_path)) == [None, None]
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rank"] == 0
    assert (tmp_path / "loggers" / "metrics.csv").read_text() == "step,rank\n1,0\n"
    monkeypatch.chdir(tmp_path)
    memory = MemoryLogger()
    for loggers in ((), memory, [memory]):
        with Distributon(1, loggers=loggers, config={"lr": 0.1}).launch() as d:
            d.log_metrics({"loss": torch.tensor(1.0)}, 1)
    assert memory.values == {"loss": {1: 1.0}} and memory.run is not None
    assert (memory.run.folder, memory.run.config) == (tmp_path / "loggers", {"lr": 0.1})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_loggers_of_the_configuration_see_no_secrets_and_a_failure_is_recorded(run_folder) -> None:
    class Failing(MemoryLogger):
        def close(self, finished: bool) -> None:
            raise OSError("no route")

    expressions = {"data": {"token": "${oc.env:TOKEN}"}}
    settings = {"loggers": "csv", "data": {"token": "12345"}, "from_environment": expressions}
    run_folder.config_file.write_text(json.dumps(settings))
    failing = Failing()
    with Distributon(1, loggers=[failing, "csv"]).launch() as d:
        d.log_metrics({"loss": 0.5}, 3)
    assert failing.run is not None and failing.run.config["data"] == {"token": "${oc.env:TOKEN}"}
    assert (run_folder.loggers_dir / "metrics.csv").read_text() == "step,loss\n3,0.5\n"
    [event] = run_folder.events()
    assert (event["event"], event["about"]) == ("warned", "logger") and "no route" in event["text"]


def test_a_step_may_be_an_integer_of_numpy(alone: Distributon, tmp_path: Path) -> None:
    alone.save(numpy.int64(3), root=tmp_path, progress={})
    assert alone.load(root=tmp_path, progress={}) == 3


def test_loggers_replace_the_steps_after_the_loaded_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = MemoryLogger()
    with Distributon(1, loggers=[memory]).launch() as d:
        model = d.setup_model(nn.Linear(2, 1))
        d.save(5, model=model)
        assert d.load(model=model) == 5
        d.log_metrics({"eval_loss": 0.5}, 5)
    assert memory.run is not None and memory.run.first_step == 6 and memory.run.is_continued


def test_a_logger_that_is_not_installed_ends_the_start(run_folder: RunFolder, monkeypatch) -> None:
    monkeypatch.setattr("slurmddp.settings.loggers.is_installed", lambda library: False)
    run_folder.config_file.write_text("loggers: [wandb]")
    with pytest.raises(ConfigError, match=r"pip install 'slurmddp\[wandb\]'"), Distributon(1) as d:
        d.launch()
