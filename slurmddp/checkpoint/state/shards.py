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
    """Return whether a module has parameters, or an optimizer trains parameters, that are DTensors."""
    return mesh_of([value]) is not None


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor; another tensor as it is."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> torch.Tensor:
    """Return the whole of a DTensor, for which all its ranks call this; another tensor as it is."""
    full: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def mesh_of(objects: Iterable[object]) -> Any:
    """Return the device mesh of the first sharded parameter of modules and optimizers; None without one."""
    for value in objects:
        placed: Any = next(filter(is_sharded, _parameters(value)), None)
        if placed is not None:
            return placed.device_mesh
    return None


def entry_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the entry of a tensor whose rows are split over all ranks; None for another tensor."""
    if not is_sharded(tensor) or tensor.ndim == 0:
        return None

    placed: Any = tensor
    mesh = placed.device_mesh
    if mesh.ndim != 1 or mesh.size() != distributed.get_world_size() or not placed.placements[0].is_shard(0):
        return None

    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "rows": _rows(tensor.shape[0], mesh.size())}


def _rows(count: int, ranks: int) -> list[int]:
    """Return the first row of each rank, and the end, as torch.chunk splits `count` rows."""
    each = -(-count // ranks)
    return [min(rank * each, count) for rank in range(ranks + 1)]


def joined(
    table: Mapping[str, Any], read: Callable[[str], Mapping[str, torch.Tensor]], mesh: Any
) -> dict[str, torch.Tensor]:
    """Return the sharded tensors of a checkpoint, from the files that hold rows of this rank.

    Args:
        table: the entry of each sharded tensor by name.
        read: returns the tensors of a file.
        mesh: as in `checkpoint.read`.
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
        # A file without rows of this rank is not read.
        if not wanted:
            continue
        tensors = read(shard_file(number))
        for name, rows in wanted.items():
            part = tensors[name][rows]
            # A view would keep the memory of all rows.
            parts[name].append(part if len(part) == len(tensors[name]) else part.clone())

    return {name: _placed(_joined(parts[name], entry), entry, mesh) for name, entry in table.items()}


def _wanted_rows(
    table: Mapping[str, Any], number: int, bounds: Mapping[str, Sequence[int]]
) -> dict[str, slice]:
    """Return the rows of each tensor in the file of rank `number` that lie within `bounds`."""
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
    """Return this rank's rows as a DTensor of `mesh`; as they are without a mesh."""
    if mesh is None:
        return rows
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size(entry["shape"])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def with_whole_tensors(state: Any, *, keep: bool) -> Any:
    """Return a state with whole tensors, on the CPU, in place of DTensors without an entry.

    All ranks call it. `fully_shard` on all ranks makes only DTensors with an entry (see `entry_of`).

    Args:
        state: as in a checkpoint, with the same DTensors in the same order on all ranks.
        keep: whether this rank needs the result. Otherwise it frees each tensor at once.
    """

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if not is_sharded(tensor) or entry_of(tensor) is not None:
            return tensor
        full = whole(tensor.detach())
        return full.cpu() if keep else full[:0]

    return mapped(state, gather)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a nested state in which `change` has replaced each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)()
        for key, item in value.items():
            copy[key] = mapped(item, change)
        # A module's state_dict keeps the versions of its submodules there.
        if hasattr(value, "_metadata"):
            copy._metadata = value._metadata
        return copy
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return value


def fitted(saved: Any, target: Any) -> Any:
    """Return a saved state with each tensor sharded, or whole, as the tensors of `target` are.

    All ranks call it. Objects other than modules and torch's optimizers get their state as it is.
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
    """Return the parameters of a module or an optimizer that may be sharded."""
    if isinstance(value, Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    if not isinstance(value, nn.Module) or "torch.distributed.tensor" not in sys.modules:
        return ()
    # Only the state shows the shards of parameters that stayed gathered after a forward pass.
    return value.state_dict().values()


def _like(value: Any, like: Any) -> Any:
    """Return `value` with the placement of the tensor `like`, if both have the same shape."""
    if not (isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and value.shape == like.shape):
        return value
    if is_sharded(like) == is_sharded(value):
        return value
    if is_sharded(value):
        return whole(value)
    from torch.distributed.tensor import distribute_tensor

    # All ranks have read the whole tensor, so that none sends it.
    placed: Any = like
    return distribute_tensor(
        value.to(local(like).device), placed.device_mesh, placed.placements, src_data_rank=None
    )
