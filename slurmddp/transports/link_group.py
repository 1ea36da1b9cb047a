"""Run all collectives of torch.distributed over a link, as a process group in Python.

`DistributedDataParallel` and every function of torch.distributed work on a `LinkGroup` as they do on gloo.
The module implements torch's interface of a group; `operations`, `ring` and `halving_doubling` do the work.
"""

# torch's stub declares overloads of these methods that only its C++ code accepts, so mypy reports overrides.
# mypy: disable-error-code="override"
from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import distributed
from torch.distributed import ReduceOp

from slurmddp.collectives import operations
from slurmddp.collectives.halving_doubling import halving_doubling
from slurmddp.collectives.link import Link
from slurmddp.collectives.operations import Combine
from slurmddp.collectives.ring import ring
from slurmddp.transports.named_group import NamedGroup
from slurmddp.transports.operation_queue import Finished, Operation, OperationQueue

_RING_BYTES = 64 * 1024
"""Tensors of this size or more are reduced on a ring.

On other than 2^k ranks, a ring sends fewer bytes than halving and doubling.
"""

COMBINE: dict[Any, Combine] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda result, other: torch.minimum(result, other, out=result),
    ReduceOp.MAX: lambda result, other: torch.maximum(result, other, out=result),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}
"""By torch's reduction, the function that combines two tensors. For AVG, the sum is divided later."""


class LinkGroup(NamedGroup):
    """Process group of torch that builds all collectives from `send` and `recv` of a link.

    The operations of a rank run in the order of its calls, so all ranks must call them in the same order.
    Calls with `async_op=True` return at once, and a thread of the group does the work. An `irecv` runs when
    the program waits for it, or before the next operation other than a send.

    A link may implement the following operations itself. The group then calls them. If one returns
    NotImplemented, which it must do on all ranks, the group does the work:

        all_reduce(flat, op): reduce in place; `op` is `torch.distributed.ReduceOp.SUM`, PRODUCT, MIN, ...
        broadcast(flat, source): fill `flat` with the tensor of rank `source`.
        all_gather(out, flat): fill `out`, of N times the length of `flat`, with the tensors of all ranks.
        barrier(): return once all ranks have called it.
        close(): release the link's resources; called at the end of the group.

    All tensors are contiguous and of one dimension; they may be empty.

    Args:
        link: the link of this rank.
        timeout: the longest wait for an operation that runs in the thread. Waits within the link have a
            time-out of the link.

    Example:
        group = LinkGroup(MyTransport(store, rank, world_size, timeout), timeout)
    """

    def __init__(self, link: Link, timeout: timedelta = timedelta(minutes=30)) -> None:
        super().__init__(link.rank, link.world_size)  # type: ignore[call-arg]  # The stub demands a store.
        self._link = link
        self._timeout = timeout
        self._queue = OperationQueue()
        self._receives: deque[Operation] = deque()
        """Receives for which the program does not wait yet. They are not queued, so a later send may run
        first."""
        # End the thread with the group, and at exit: the interpreter would abort if it ended a thread within
        # torch's code.
        self._end = weakref.finalize(self, self._queue.end)

    def getBackendName(self) -> str:  # torch calls it by this name
        return type(self._link).__name__

    # --- methods that reduce tensors

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> distributed.Work:
        def run() -> None:
            for tensor in tensors:
                if tensor.is_sparse:
                    self._all_reduce_sparse(tensor, opts)
                    continue
                with _Flat(tensor) as flat:
                    self._all_reduce(flat, opts)

        return self._start("all_reduce", run, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> distributed.Work:
        def run() -> None:
            flat = _flat(tensors[0])
            operations.reduce(flat, self._link, opts.rootRank, _combine(opts))
            if self._link.rank == opts.rootRank:
                _fill(tensors[0], self._averaged(flat, opts))

        return self._start("reduce", run, tensors, opts)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> distributed.Work:
        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [_flat(part).clone() for part in parts], opts)

        return self._start("reduce_scatter", run, outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> distributed.Work:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], opts: Any = None
    ) -> distributed.Work:
        def run() -> None:
            for output, whole in zip(outputs, wholes, strict=True):
                self._reduce_scatter(output, self._cut(_flat(whole).clone(), output), opts)

        return self._start("reduce_scatter", run, outputs, opts)

    # --- methods that copy tensors

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> distributed.Work:
        def run() -> None:
            for tensor in tensors:
                with _Flat(tensor) as flat:
                    if flat.numel() and not self._by_link("broadcast", flat, opts.rootRank):
                        operations.broadcast(flat, self._link, opts.rootRank)

        return self._start("broadcast", run, tensors, opts)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> distributed.Work:
        def run() -> None:
            for parts, part in zip(outputs, inputs, strict=True):
                lengths = [output.numel() for output in parts]
                whole = part.new_empty(sum(lengths))
                pieces = _pieces(whole, lengths)
                self._all_gather(whole, pieces, part)
                for output, piece in zip(parts, pieces, strict=True):
                    _fill(output, piece)

        return self._start("all_gather", run, outputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> distributed.Work:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(
        self, whole: torch.Tensor, part: torch.Tensor, opts: Any = None
    ) -> distributed.Work:
        return self.all_gather_single_coalesced([whole], [part], opts)

    def all_gather_single_coalesced(
        self, wholes: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> distributed.Work:
        def run() -> None:
            for whole, part in zip(wholes, inputs, strict=True):
                with _Flat(whole) as flat:
                    self._all_gather(flat, self._cut(flat, part), part)

        return self._start("all_gather", run, wholes, opts)

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> distributed.Work:
        def run() -> None:
            # `outputs` is empty on all ranks but the root.
            targets = outputs[0] if outputs else []
            parts = [_flat(target) for target in targets]
            operations.gather(parts, _flat(inputs[0]), self._link, opts.rootRank)
            for target, part in zip(targets, parts, strict=True):
                _fill(target, part)

        return self._start("gather", run, outputs, opts)

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> distributed.Work:
        def run() -> None:
            # `inputs` is empty on all ranks but the root.
            parts = [_flat(part) for part in inputs[0]] if inputs else []
            with _Flat(outputs[0]) as flat:
                operations.scatter(flat, parts, self._link, opts.rootRank)

        return self._start("scatter", run, outputs, opts)

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> distributed.Work:
        def run() -> None:
            parts = [_flat(output) for output in outputs]
            operations.all_to_all(parts, [_flat(tensor) for tensor in inputs], self._link)
            for output, part in zip(outputs, parts, strict=True):
                _fill(output, part)

        return self._start("all_to_all", run, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_lengths: Sequence[int],
        lengths: Sequence[int],
        opts: Any = None,
    ) -> distributed.Work:
        def run() -> None:
            with _Flat(output) as flat:
                parts = self._split(flat, output, output_lengths)
                operations.all_to_all(parts, self._split(_flat(whole), whole, lengths), self._link)

        return self._start("all_to_all", run, [output], opts)

    def barrier(self, opts: Any = None) -> distributed.Work:
        def run() -> None:
            if not self._by_link("barrier"):
                operations.barrier(self._link)

        return self._start("barrier", run, [], opts)

    # --- methods that send and receive messages from one rank to another

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> distributed.Work:
        self._refuse_tag(tag)
        flat = _flat(tensors[0])
        return self._later("send", lambda: self._link.send(flat, to), tensors)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int = 0) -> distributed.Work:
        self._refuse_tag(tag)

        def run() -> None:
            with _Flat(tensors[0]) as flat:
                self._link.recv(flat, source)

        label = f"recv from rank {source} on rank {self._link.rank}"
        operation = Operation(label, run, tensors, self._timeout, self._put_receives)
        self._receives.append(operation)

        return operation

    def _refuse_tag(self, tag: int) -> None:
        if tag:
            raise NotImplementedError(
                f"{self.getBackendName()} supports no tags, because messages arrive in the sends' order. "
                f"Leave out tag={tag}."
            )

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> distributed.Work:
        raise NotImplementedError(
            f"{self.getBackendName()} can't receive from any rank: give the source (`src=`)."
        )

    # --- names of these methods in torch before 2.13

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # --- methods that coalesce operations and that end the group

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing, because operations are not coalesced: they run one after the other."""

    def _end_coalescing(self, device: torch.device) -> distributed.Work:
        self._put_receives()
        # Return an operation that runs after the coalesced operations, so that torch waits for all of them.
        return self._later("coalesced operations", lambda: None, [])

    def shutdown(self) -> None:
        """End the thread and close the link; torch calls it in `destroy_process_group`."""
        self._end()
        # `close` is optional in a link.
        getattr(self._link, "close", lambda: None)()

    abort = shutdown

    def _start(
        self, name: str, run: Callable[[], object], outputs: Sequence[Any], opts: Any
    ) -> distributed.Work:
        """Run a collective after all earlier operations.

        It runs in the thread of the group's queue if the call is asynchronous or other operations are queued,
        else in the calling thread.

        Args:
            name: the name of the collective, for errors.
            run: does the work.
            outputs: the tensors that the handle's `result()` returns.
            opts: torch's options of the collective.

        Returns:
            The handle of the operation.
        """
        if self._receives:
            self._put_receives()

        # Run it in the caller if nothing is queued: a change of threads takes longer than a message.
        waits = not getattr(opts, "asyncOp", True)
        if waits and self._queue.run(run):
            return Finished(outputs)

        operation = self._later(name, run, outputs)
        if waits:
            operation.wait()

        return operation

    def _later(self, name: str, run: Callable[[], object], outputs: Sequence[Any]) -> Operation:
        operation = Operation(f"{name} on rank {self._link.rank}", run, outputs, self._timeout)
        self._queue.put(operation)
        return operation

    def _put_receives(self) -> None:
        # Pop until IndexError: two threads may run this loop, so a check before the pop would not be safe.
        with suppress(IndexError):
            while True:
                self._queue.put(self._receives.popleft())

    def _by_link(self, name: str, *arguments: object) -> bool:
        """Let the link run the operation `name`; return False if the link does not implement it."""
        operation = getattr(self._link, name, None)
        return operation is not None and operation(*arguments) is not NotImplemented

    def _all_reduce(self, flat: torch.Tensor, opts: Any) -> None:
        # Look up the reduction only where it is needed: a comparison of torch's reductions takes a
        # microsecond.
        if flat.numel() and self._link.world_size > 1:
            if not self._by_link("all_reduce", flat, _reduction(opts)):
                is_large = flat.numel() * flat.element_size() >= _RING_BYTES
                algorithm = ring if is_large else halving_doubling
                algorithm(flat, self._link, _combine(opts))
        else:
            # Look up the reduction for its error alone, so that an unsupported one fails on a single rank,
            # too.
            _combine(opts)

        self._averaged(flat, opts)

    def _all_reduce_sparse(self, tensor: torch.Tensor, opts: Any) -> None:
        """Gather values and indices of all ranks, which may differ in their indices, and sum the values."""
        if _reduction(opts) != ReduceOp.SUM:
            raise NotImplementedError("Sparse tensors can only be reduced to sums and averages.")

        elements = tensor.detach().coalesce()
        counts = torch.zeros(self.size(), dtype=torch.long)
        counts[self._link.rank] = elements._nnz()
        operations.all_gather(torch.split(counts, 1), self._link)

        indices = self._all_rows(elements.indices().t(), counts.tolist()).t()
        values = self._all_rows(elements.values(), counts.tolist())
        total = torch.sparse_coo_tensor(indices, values, elements.shape).coalesce()
        self._averaged(total.values(), opts)

        # Don't use `detach().copy_`: a detached sparse tensor does not share its elements with the tensor.
        with torch.no_grad():
            tensor.copy_(total)

    def _all_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Gather the `rows` of all ranks into one tensor; rank i has `counts[i]` rows."""
        gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
        row_length = math.prod(rows.shape[1:])
        parts = _pieces(gathered.view(-1), [count * row_length for count in counts])
        parts[self._link.rank].copy_(_flat(rows))
        operations.all_gather(parts, self._link)

        return gathered

    def _reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> None:
        operations.reduce_scatter(parts, self._link, _combine(opts))
        _fill(output, self._averaged(parts[self._link.rank], opts))

    def _averaged(self, flat: torch.Tensor, opts: Any) -> torch.Tensor:
        """Divide a sum by the world size, in place, if `opts` asks for the average; return the tensor.

        Integers are truncated, as by NCCL.
        """
        if getattr(opts, "reduceOp", None) != ReduceOp.AVG:
            return flat

        fractional = flat.is_floating_point() or flat.is_complex()
        return flat.div_(self.size(), rounding_mode=None if fractional else "trunc")

    def _all_gather(self, whole: torch.Tensor, parts: Sequence[torch.Tensor], part: torch.Tensor) -> None:
        """Gather the tensor `part` of each rank into `parts`, which are views of `whole`."""
        flat = _flat(part)
        has_equal_lengths = all(len(other) == len(flat) for other in parts)
        if has_equal_lengths and whole.numel() and self._by_link("all_gather", whole, flat):
            return

        parts[self._link.rank].copy_(flat)
        operations.all_gather(parts, self._link)

    def _cut(self, whole: torch.Tensor, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return a view of `whole` for each rank, each with as many elements as `part`.

        Raises:
            ValueError: `whole` has another number of elements.
        """
        length = part.numel()
        size = self.size()
        if whole.numel() != size * length:
            raise ValueError(
                f"The whole tensor has {whole.numel()} elements, but {size} parts of {length} elements have "
                f"{size * length}."
            )
        return _pieces(whole, [length] * size)

    def _split(self, flat: torch.Tensor, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return a view of `flat` for each rank.

        Args:
            flat: the elements of `tensor`, in one dimension.
            tensor: the tensor whose rows are split along the first dimension.
            lengths: number of rows for each rank. Empty: the same number for each.

        Raises:
            ValueError: `lengths` does not fit the rows or the ranks.
        """
        rows = len(tensor) if tensor.dim() else 0
        if not lengths:
            lengths = [rows // self.size()] * self.size()
        if sum(lengths) != rows or len(lengths) != self.size():
            raise ValueError(
                f"{rows} rows can't be split over {self.size()} ranks by the sizes {list(lengths)}."
            )

        row_length = flat.numel() // max(rows, 1)
        return _pieces(flat, [length * row_length for length in lengths])


class _Flat:
    """Context that yields a contiguous tensor of one dimension, and copies changes back at its end."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._flat = _flat(tensor)

    def __enter__(self) -> torch.Tensor:
        return self._flat

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            _fill(self._tensor, self._flat)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension: a view of a contiguous tensor, else a copy."""
    return tensor.detach().contiguous().view(-1)


def _pieces(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return consecutive views of `flat` with these lengths."""
    return [flat[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]


def _fill(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy `flat` into `tensor`, unless `flat` is a view of `tensor`."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def _reduction(opts: Any) -> Any:
    """Return the reduction that `opts` asks for; SUM for an average, which is divided afterwards."""
    reduction = getattr(opts, "reduceOp", ReduceOp.SUM)
    # Some calls of torch pass a value of the enumeration, and others an object with the attribute `op`.
    reduction = getattr(reduction, "op", reduction)
    return ReduceOp.SUM if reduction == ReduceOp.AVG else reduction


def _combine(opts: Any) -> Combine:
    reduction = _reduction(opts)
    if reduction not in COMBINE:
        raise NotImplementedError(f"{reduction} is not supported. Use one of {', '.join(map(str, COMBINE))}.")
    return COMBINE[reduction]
