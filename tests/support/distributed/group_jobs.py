"""Jobs of ranks that call every collective of torch.distributed and compare it with a local reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurmddp.training.distributon import Distributon

OPS = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.PRODUCT: lambda stacked: stacked.prod(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
}
SHAPES = ((0,), (1,), (7,), (3, 5), (20001,))


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 7 * len(shape) + shape[0])
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def uneven(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor that is not contiguous."""
    wide = tensor.new_empty((*tensor.shape, 2))
    wide[..., 0] = tensor
    return wide[..., 0]


def rows_of(rank: int) -> torch.Tensor:
    """Return a sparse matrix: without elements on rank 0, else with a row that is given twice."""
    rows = [4, *range(rank), 4] if rank else []
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.long), torch.ones(len(rows), 3) + rank, (9, 3)
    )


def every_collective(backend: str) -> str:
    """Run all cases on the whole group and on a sub-group; raise if one differs; return the backend."""
    with Distributon(backend=backend, rendezvous_timeout_s=200) as d:
        d.launch()
        if d.world_size == 1:
            dist.init_process_group(_registered(backend), store=dist.HashStore(), rank=0, world_size=1)
        # All ranks but the first form a sub-group, so that group ranks differ from global ranks.
        size = dist.get_world_size()
        halves = [sorted(set(range(size)) - {0}), [0]] if size > 1 else [[0]]
        groups = [dist.new_group(ranks) for ranks in halves]
        subgroup = next(
            group for group, ranks in zip(groups, halves, strict=True) if dist.get_rank() in ranks
        )

        for group in (dist.group.WORLD, subgroup):
            ranks = dist.get_process_group_ranks(group)
            _reductions(group, ranks)
            _copies(group, ranks)
            _lists(group, ranks)
            _objects(group, ranks)
            _messages(group, ranks)

        name = dist.get_backend()
        dist.destroy_process_group(subgroup)
        if d.world_size == 1:
            dist.destroy_process_group()
        return name


def _registered(backend: str) -> str:
    from slurmddp.transports.registry import register

    return register(backend)


def _same(result: torch.Tensor, wanted: torch.Tensor, *case: object) -> None:
    assert torch.equal(result, wanted), (case, result, wanted)


def _inputs(ranks: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Yield this rank's tensor and the tensors of all ranks; a short tensor also as not contiguous."""
    for shape in SHAPES:
        everything = [tensor_of(rank, shape) for rank in ranks]
        tensor = everything[ranks.index(dist.get_rank())]
        yield tensor.clone(), torch.stack(everything), everything
        if tensor.numel() < 100:
            yield uneven(tensor), torch.stack(everything), everything


def _reductions(group: dist.ProcessGroup, ranks: list[int]) -> None:
    me = ranks.index(dist.get_rank())
    size = len(ranks)
    for tensor, stacked, _ in _inputs(ranks):
        for op, reference in OPS.items():
            reduced = tensor.clone(memory_format=torch.preserve_format)
            work = dist.all_reduce(reduced, op, group, async_op=True)
            work.wait()
            _same(reduced, reference(stacked), "all_reduce", op)

    for op, reference in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BXOR, torch.bitwise_xor)):
        whole = tensor_of(ranks[0], (9,), torch.int64)
        for rank in ranks[1:]:
            whole = reference(whole, tensor_of(rank, (9,), torch.int64))
        reduced = tensor_of(dist.get_rank(), (9,), torch.int64)
        dist.all_reduce(reduced, op, group)
        _same(reduced, whole, op)

    sparse = rows_of(me)
    dist.all_reduce(sparse, group=group)
    _same(sparse.to_dense(), sum(rows_of(rank).to_dense() for rank in range(size)), "sparse")

    for tensor, stacked, _ in _inputs(ranks):
        for root in range(size):
            reduced = tensor.contiguous().clone()
            dist.reduce(reduced, ranks[root], group=group)
            if me == root:
                _same(reduced, stacked.sum(0), "reduce", root)

    many = [tensor_of(dist.get_rank() + 10 * part, (5,)) for part in range(size)]
    output = torch.empty(5, dtype=torch.float64)
    dist.reduce_scatter(output, many, group=group)
    wanted = torch.stack([tensor_of(rank + 10 * me, (5,)) for rank in ranks]).sum(0)
    _same(output, wanted, "reduce_scatter")
    output.zero_()
    dist.reduce_scatter_tensor(output, torch.cat(many), group=group)
    _same(output, wanted, "reduce_scatter_tensor")


def _copies(group: dist.ProcessGroup, ranks: list[int]) -> None:
    for tensor, _, everything in _inputs(ranks):
        for root, rank in enumerate(ranks):
            received = tensor.contiguous().clone()
            dist.broadcast(received, rank, group)
            _same(received, everything[root], "broadcast")

        gathered = torch.zeros(len(ranks) * tensor.numel(), dtype=tensor.dtype)
        dist.all_gather_into_tensor(gathered, tensor.contiguous().view(-1), group=group)
        _same(gathered, torch.cat(everything).view(-1), "all_gather_into_tensor")
        lists = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in ranks]
        work = dist.all_gather(lists, tensor.contiguous(), group=group, async_op=True)
        work.wait()
        for copy, wanted in zip(lists, everything, strict=True):
            _same(copy, wanted, "all_gather")


def _lists(group: dist.ProcessGroup, ranks: list[int]) -> None:
    me = ranks.index(dist.get_rank())
    size = len(ranks)
    for root, rank in enumerate(ranks):
        tensor = tensor_of(dist.get_rank(), (3, 5))
        lists = [torch.zeros_like(tensor) for _ in ranks] if me == root else None
        dist.gather(tensor, lists, rank, group)
        for copy, source in zip(lists or (), ranks, strict=False):
            _same(copy, tensor_of(source, (3, 5)), "gather")
        received = torch.zeros_like(tensor)
        dist.scatter(
            received, [tensor_of(50 + n, (3, 5)) for n in range(size)] if me == root else None, rank, group
        )
        _same(received, tensor_of(50 + me, (3, 5)), "scatter")

    # Rank s sends s + r rows to rank r: uneven, and none from the first to itself.
    rows = [torch.full((me + to, 2), 10.0 * me + to) for to in range(size)]
    wanted = torch.cat([torch.full((source + me, 2), 10.0 * source + me) for source in range(size)])
    output = torch.empty(sum(source + me for source in range(size)), 2)
    splits = [source + me for source in range(size)]
    dist.all_to_all_single(output, torch.cat(rows), splits, [len(part) for part in rows], group=group)
    _same(output, wanted, "all_to_all_single")


def _objects(group: dist.ProcessGroup, ranks: list[int]) -> None:
    me = ranks.index(dist.get_rank())
    size = len(ranks)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": dist.get_rank()}, group)
    assert objects == [{"rank": rank} for rank in ranks]
    objects = ["from", ranks[-1]] if me == size - 1 else [None, None]
    dist.broadcast_object_list(objects, ranks[-1], group)
    assert objects == ["from", ranks[-1]]
    gathered: list[object] | None = [None] * size if me == 0 else None
    dist.gather_object("x" * dist.get_rank(), gathered, ranks[0], group)
    assert gathered in (None, ["x" * rank for rank in ranks])
    dist.barrier(group)


def _messages(group: dist.ProcessGroup, ranks: list[int]) -> None:
    me = ranks.index(dist.get_rank())
    size = len(ranks)
    if size == 1:
        return

    received = torch.zeros(5, dtype=torch.float64)
    # All ranks start the receive before the send: a send must not wait for an earlier receive of its rank.
    works = [
        dist.irecv(received, ranks[(me - 1) % size], group),
        dist.isend(uneven(tensor_of(ranks[me], (5,))).contiguous(), ranks[(me + 1) % size], group),
    ]
    totals = [torch.full((3,), float(number)) for number in range(3)]
    for work in works:
        work.wait()
    if dist.get_backend(group) not in ("gloo", "undefined"):
        for call in (dist.isend, dist.irecv):
            with pytest.raises(NotImplementedError, match=r"supports no tags.* Leave out tag=1"):
                call(received.clone(), ranks[(me + 1) % size], group, tag=1)

    works = [dist.all_reduce(total, group=group, async_op=True) for total in totals]
    for work in reversed(works):
        work.wait()
    _same(received, tensor_of(ranks[(me - 1) % size], (5,)), "irecv")
    for number, total in enumerate(totals):
        _same(total, torch.full((3,), float(number * size)), "three in a row")


def weights_after_steps(model: DistributedDataParallel, rank: int) -> list[float]:
    """Train on this rank's data; return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=generator)).square().mean().backward()
        optimizer.step()

    vector: list[float] = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    return vector


def trained(backend: str) -> tuple[str, list[float]]:
    """Train unmodified DistributedDataParallel; return the backend and the weights."""
    with Distributon(backend=backend, seed=0, rendezvous_timeout_s=200) as d:
        d.launch()
        torch.manual_seed(d.rank)
        net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 3))
        model = DistributedDataParallel(net, bucket_cap_mb=0.0002)
        return dist.get_backend(), weights_after_steps(model, d.rank)


def fails(backend: str) -> str:
    """Return the error of a start with this backend."""
    try:
        with Distributon(backend=backend, rendezvous_timeout_s=200) as d:
            d.launch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

    return ""


def meets(init_method: str, timeout_s: float) -> float | str:
    """Return the sum of all ranks after a start by `init_method`, or its error."""
    try:
        with Distributon(init_method=init_method, rendezvous_timeout_s=timeout_s) as d:
            d.launch()
            return float(d.all_reduce(torch.tensor(float(d.rank)), "sum"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
