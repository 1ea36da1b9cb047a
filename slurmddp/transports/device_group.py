"""Combine one process group per type of device: torch can't add a backend to a group written in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree

from slurmddp.transports.named_group import NamedGroup


class DeviceGroup(NamedGroup):
    """Process group that passes each operation to the group for the device of its tensors.

    Args:
        groups: a process group for each type of device, such as `cpu`. The first group runs barriers.
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
    """Return a method for `DeviceGroup` that calls the method `name` of the group for the tensors' device."""

    def call(self: DeviceGroup, *arguments: Any, **options: Any) -> Any:
        leaves = _pytree.tree_leaves(arguments)
        devices = [value.device.type for value in leaves if isinstance(value, torch.Tensor)]
        # A barrier has no tensor, so the first group runs it.
        device = devices[0] if devices else next(iter(self._groups))
        if device not in self._groups:
            raise ValueError(
                f"{name} got a tensor on {device}, but there are backends only for {', '.join(self._groups)}."
            )

        return getattr(self._groups[device], name)(*arguments, **options)

    return call


_OPERATIONS = """
    allreduce allreduce_coalesced reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
    broadcast allgather allgather_coalesced all_gather_single all_gather_single_coalesced gather scatter
    alltoall all_to_all_single barrier send recv recv_anysource
    _allgather_base allgather_into_tensor_coalesced _reduce_scatter_base reduce_scatter_tensor_coalesced
    alltoall_base
"""
"""The operations of a process group; the last two lines are their names in torch before 2.13."""
for _name in _OPERATIONS.split():
    setattr(DeviceGroup, _name, _route(_name))
