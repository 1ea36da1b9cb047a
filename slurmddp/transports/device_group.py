"""One process group per type of device behind one: torch keeps no other backend beside a group in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree

from slurmddp.transports.named_group import NamedGroup


class DeviceGroup(NamedGroup):
    """Hands each operation to the process group of its tensors' device.

    Args:
        groups: by type of device; a barrier goes to the first one.
    """

    def __init__(self, groups: Mapping[str, distributed.ProcessGroup]) -> None:
        first = next(iter(groups.values()))
        super().__init__(first.rank(), first.size())  # type: ignore[call-arg]  # The stub demands a store.
        self._groups = dict(groups)

    def getBackendName(self) -> str:
        return ",".join(self._groups)

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()

    def abort(self) -> None:
        for group in self._groups.values():
            group.abort()


def _route(name: str) -> Callable[..., Any]:
    def call(self: DeviceGroup, *arguments: Any, **options: Any) -> Any:
        found = [value for value in _pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor)]
        kind = found[0].device.type if found else next(iter(self._groups))
        if kind not in self._groups:
            raise ValueError(
                f"{name} of a tensor on {kind}, but the backends are for {', '.join(self._groups)}."
            )
        return getattr(self._groups[kind], name)(*arguments, **options)

    return call


_OPERATIONS = """
    allreduce allreduce_coalesced reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
    broadcast allgather allgather_coalesced all_gather_single all_gather_single_coalesced gather scatter
    alltoall all_to_all_single barrier send recv recv_anysource
    _allgather_base allgather_into_tensor_coalesced _reduce_scatter_base reduce_scatter_tensor_coalesced
    alltoall_base
"""
"""The operations of a group; the last two lines are the names of torch before 2.13."""
for _name in _OPERATIONS.split():
    setattr(DeviceGroup, _name, _route(_name))
