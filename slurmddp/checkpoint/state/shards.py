"""Handle tensors of which each rank holds some rows: torch's DTensor, as fully_shard makes them.

In a checkpoint, each rank has a file with its rows. The tree file has an entry for each sharded tensor:
`{"shape": [5, 8], "dtype": "float32", "rows": [0, 3, 5]}`. The file of rank i holds the rows from rows[i] to
rows[i + 1].

`is_sharded` looks for torch's module in `sys.modules`: only a strategy with shards imports it, and the import
takes half a second.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from slurmddp.checkpoint.files.manifest import shard_file


def is_sharded(value: object) -> bool:
    """Return whether `value` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_shards(value: object) -> bool:
    """Return whether a parameter of a module or an optimizer is a DTensor; False for other objects."""
    return mesh_of([value]) is not None


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's local tensor of a DTensor; return any other tensor unchanged."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> torch.Tensor:
    """Gather a DTensor from its ranks, which must all call this; return any other tensor unchanged."""
    full: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def mesh_of(objects: Iterable[object]) -> Any:
    """Return the device mesh of the first DTensor parameter in modules and optimizers; None without one."""
    for value in objects:
        placed: Any = next(filter(is_sharded, _parameters(value)), None)
        if placed is not None:
            return placed.device_mesh
    return None


def entry_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the tree file's entry of a DTensor whose rows are split over all ranks (see the module).

    Return None for other tensors, and for DTensors that are distributed in another way.
    """
    if not is_sharded(tensor) or tensor.ndim == 0:
        return None

    placed: Any = tensor
    mesh = placed.device_mesh
    if mesh.ndim != 1 or mesh.size() != distributed.get_world_size() or not placed.placements[0].is_shard(0):
        return None

    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "rows": _rows(tensor.shape[0], mesh.size())}


def _rows(count: int, ranks: int) -> list[int]:
    """Return the first row of each rank, and then `count`, as torch.chunk splits `count` rows."""
    each = -(-count // ranks)
    return [min(rank * each, count) for rank in range(ranks + 1)]


def joined(
    table: Mapping[str, Any], read: Callable[[str], Mapping[str, torch.Tensor]], mesh: Any
) -> dict[str, torch.Tensor]:
    """Read the sharded tensors of a checkpoint from the shard files that contain rows of this rank.

    Args:
        table: the tree file's entry of each sharded tensor, by name.
        read: returns the tensors, by name, of the file with the given name.
        mesh: as in `checkpoint.read`.

    Returns:
        By name, DTensors with this rank's rows; whole tensors if `mesh` is None.
    """
    rank = 0
    ranks = 1
    if mesh is not None:
        rank = mesh.get_local_rank()
        ranks = mesh.size()
    bounds = {name: _rows(entry["shape"][0], ranks)[rank : rank + 2] for name, entry in table.items()}

    parts: dict[str, list[torch.Tensor]] = {name: [] for name in table}
    for number in range(max((len(entry["rows"]) - 1 for entry in table.values()), default=0)):
        wanted = _wanted_rows(table, number, bounds)
        # Do not read a file that contains no rows of this rank.
        if not wanted:
            continue
        tensors = read(shard_file(number))
        for name, rows in wanted.items():
            part = tensors[name][rows]
            # Copy some of the rows: a view would keep all rows in memory.
            parts[name].append(part if len(part) == len(tensors[name]) else part.clone())

    return {name: _placed(_joined(parts[name], entry), entry, mesh) for name, entry in table.items()}


def _wanted_rows(
    table: Mapping[str, Any], number: int, bounds: Mapping[str, Sequence[int]]
) -> dict[str, slice]:
    """Return, for each tensor, the slice of the rows in the file of rank `number` that this rank needs.

    Args:
        table: as in `joined`.
        number: the rank that wrote the file.
        bounds: for each tensor, the first wanted row and the row after the last.
    """
    wanted = {}
    for name, entry in table.items():
        start, end = entry["rows"][number : number + 2]
        first = max(start, bounds[name][0])
        last = min(end, bounds[name][1])
        if first < last:
            wanted[name] = slice(first - start, last - start)
    return wanted


def _joined(parts: list[torch.Tensor], entry: Mapping[str, Any]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts:
        return torch.cat(parts)
    return torch.empty((0, *entry["shape"][1:]), dtype=getattr(torch, entry["dtype"]), device="cpu")


def _placed(rows: torch.Tensor, entry: Mapping[str, Any], mesh: Any) -> torch.Tensor:
    """Return a DTensor on `mesh` with `rows` as this rank's part; return `rows` if `mesh` is None."""
    if mesh is None:
        return rows
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size(entry["shape"])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def with_whole_tensors(state: Any, *, keep: bool) -> Any:
    """Return a copy of a state in which DTensors that `entry_of` can't describe are whole tensors on the CPU.

    All ranks must call it. If `fully_shard` splits over all ranks, `entry_of` describes all its DTensors.

    Args:
        state: as in a checkpoint, with the same DTensors in the same order on all ranks.
        keep: whether this rank needs the whole tensors. If not, they are empty in its result.
    """

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if not is_sharded(tensor) or entry_of(tensor) is not None:
            return tensor
        full = whole(tensor.detach())
        if keep:
            return full.cpu()

        # A slice would keep the memory of the whole tensor until the state is saved.
        return torch.empty(0, dtype=full.dtype)

    return mapped(state, gather)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a nested state in which each tensor is replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)()
        for key, item in value.items():
            copy[key] = mapped(item, change)
        # Copy the attribute in which a module's state_dict keeps the versions of its submodules.
        if hasattr(value, "_metadata"):
            copy._metadata = value._metadata
        return copy
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return value


def fitted(saved: Any, target: Any) -> Any:
    """Return a saved state whose tensors are distributed, or whole, like the tensors of `target`.

    All ranks must call it. The state is returned unchanged if `target` has no DTensors, which is so for
    objects other than modules and optimizers.
    """
    if not isinstance(saved, Mapping) or not has_shards(target):
        return saved
    if isinstance(target, nn.Module):
        present = target.state_dict()
        changed = mapped(saved, lambda tensor: tensor)
        for key, value in saved.items():
            changed[key] = _like(value, present.get(key))
        return changed

    states = dict(saved["state"])
    for number, parameter in enumerate(_parameters(target)):
        if number in states:
            states[number] = {key: _like(value, parameter) for key, value in states[number].items()}
    return {**saved, "state": states}


def _parameters(value: object) -> Iterable[torch.Tensor]:
    """Return the tensors of a module or an optimizer among which DTensors may be; empty for other objects."""
    if isinstance(value, Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    if not isinstance(value, nn.Module) or "torch.distributed.tensor" not in sys.modules:
        return ()
    # Not `parameters()`: parameters may stay gathered after a forward pass. Only state_dict() returns their
    # shards then.
    return value.state_dict().values()


def _like(value: Any, like: Any) -> Any:
    """Return the tensor `value` distributed like the tensor `like`; unchanged if their shapes differ."""
    if not (isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and value.shape == like.shape):
        return value
    if is_sharded(like) == is_sharded(value):
        return value
    if is_sharded(value):
        return whole(value)
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: all ranks have read the whole tensor, so no rank needs to send it.
    placed: Any = like
    return distribute_tensor(
        value.to(local(like).device), placed.device_mesh, placed.placements, src_data_rank=None
    )
