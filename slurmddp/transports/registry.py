"""Register transports as backends of torch.distributed: shipped transports by name, others by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from slurmddp.collectives.link import Link
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.near_matches import near_matches
from slurmddp.plugins import locate, methods
from slurmddp.transports.device_group import DeviceGroup
from slurmddp.transports.link_group import LinkGroup

TRANSPORTS: Mapping[str, str] = {
    "shm": "slurmddp.transports.shared_memory.SharedMemoryLink",
    "hierarchical": "slurmddp.transports.hierarchical_link.HierarchicalLink",
}
"""The import paths of the shipped transports, by name."""
GROUP_OPERATIONS = ("allreduce", "broadcast", "allgather", "barrier")
"""Methods that a process group of a user must have, because a training calls them."""

Create = Callable[[distributed.Store, int, int, timedelta], distributed.ProcessGroup]
"""Function that builds the process group of one rank: `create(store, rank, world_size, timeout)`."""


def register_shm() -> None:
    """Register the backend `shm`; an entry point that torch calls when a script names the backend (2.14)."""
    register("shm")


def register_hierarchical() -> None:
    """Register the backend `hierarchical`; an entry point like `register_shm`."""
    register("hierarchical")


def register(backend: str) -> str:
    """Register a backend in torch.distributed, and return the name under which torch knows it.

    Args:
        backend: a backend that torch knows, a transport of this package, `package.module.Class`, or one of
            these for each type of device, as in `cpu:my_package.transport.MyTransport,cuda:nccl`. A class is
            built as `Class(store, rank, world_size, timeout)`. A subclass of torch's ProcessGroup is used as
            it is; any other class is a `Link`, and a `LinkGroup` builds the collectives from it. The
            attribute `devices` of a class names the types of devices whose tensors it accepts; `("cpu",)` by
            default.

    Raises:
        ConfigError: there is no such backend, or the class lacks operations.

    Example:
        distributed.init_process_group(register("my_package.transport.MyTransport"))
    """
    if ":" not in backend:
        return _register_one(backend)

    names = {device: _register_one(name) for device, name in split_devices(backend).items()}
    joined = ",".join(f"{device}:{name}" for device, name in names.items())
    transports = [name for name in names.values() if _is_transport(name)]
    if not transports:
        return joined

    others = set(names.values()) - {*transports, "gloo", "nccl"}
    if others:
        raise ConfigError(
            f"backend={backend!r} combines {others.pop()} with {transports[0]}, which is not supported.",
            hint="With a transport for one device, use gloo, nccl or a transport for the others.",
        )

    _add(joined, _for_each_device(names), list(names))
    return joined


def split_devices(backend: str) -> dict[str, str]:
    """Parse a string such as `cpu:gloo,cuda:nccl`, and return the backend of each type of device.

    Raises:
        ConfigError: an entry is not of this form, or a type of device occurs twice.
    """
    parts = [part.strip().partition(":") for part in backend.split(",")]
    names = {device: name for device, _, name in parts}
    is_complete = all(device and name and ":" not in name for device, _, name in parts)
    if len(names) < len(parts) or not is_complete:
        raise ConfigError(
            f"backend={backend!r} is not a list of devices with one backend each.",
            hint="Name each type of device once, as in backend=cpu:gloo,cuda:nccl.",
        )

    return names


def _register_one(name: str) -> str:
    if name.lower() in distributed.Backend.backend_list:
        return name.lower()

    if name not in TRANSPORTS and "." not in name:
        raise ConfigError(
            f"backend={name!r} is not known.",
            hint=f"{near_matches(name, known_backends())} Give your own as package.module.Class.",
        )

    transport: Any = locate(TRANSPORTS.get(name, name), key="backend")
    _check(transport, name)

    def create(
        store: distributed.Store, rank: int, world_size: int, timeout: timedelta
    ) -> distributed.ProcessGroup:
        try:
            built = transport(store, rank, world_size, timeout)
        except SlurmddpError:
            raise
        except Exception as error:
            # A user's class may raise any exception.
            raise ConfigError(
                f"backend={name!r} can't be built on rank {rank}: {type(error).__name__}: {error}.",
                hint=f"It is called as {transport.__qualname__}(store, rank, world_size, timeout).",
            ) from error

        return built if isinstance(built, distributed.ProcessGroup) else LinkGroup(built, timeout)

    return _add(name, create, list(getattr(transport, "devices", ("cpu",))))


def _is_transport(name: str) -> bool:
    """Return whether torch builds a backend by `create(store, rank, world_size, timeout)`."""
    plugin = _plugin(name)
    # torch's own plugins have the extended API, with other arguments.
    return plugin is not None and not plugin.extended_api


def _plugin(name: str) -> Any:
    """Return the plugin that torch has registered for a backend, or None.

    Since torch 2.14 its own backends are plugins, too.
    """
    load = getattr(distributed.Backend, "_ensure_backend_registered", None)
    if load is not None:
        load(name)
    return distributed.Backend._plugins.get(name.upper())


def _for_each_device(names: Mapping[str, str]) -> Create:
    """Return a function that builds a `DeviceGroup` from one backend for each type of device.

    It is needed because torch can't combine a process group in Python with other backends.
    """

    def create(
        store: distributed.Store, rank: int, world_size: int, timeout: timedelta
    ) -> distributed.ProcessGroup:
        groups = {}
        for device, name in names.items():
            device_store = distributed.PrefixStore(f"{device}/", store)
            if _is_transport(name):
                groups[device] = _plugin(name).creator_fn(device_store, rank, world_size, timeout)
            else:
                groups[device] = _of_torch(device, name, device_store, rank, world_size, timeout)

        return DeviceGroup(groups)

    return create


def _of_torch(
    device: str, name: str, store: distributed.Store, rank: int, world_size: int, timeout: timedelta
) -> distributed.ProcessGroup:
    """Return a process group with torch's backend `name` for one type of device."""
    # The new group has no backend yet; the lines below register one for the device.
    group = distributed.ProcessGroup(store, rank, world_size)
    plugin = _plugin(name)
    if plugin is not None:
        # torch chooses the class: since 2.15, `nccl` is not ProcessGroupNCCL.
        backend: Any = plugin.creator_fn(_plugin_options(group, device, store, timeout), None)
    elif name == "nccl":
        nccl_options = distributed.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        backend = distributed.ProcessGroupNCCL(store, rank, world_size, nccl_options)
    else:
        backend = distributed.ProcessGroupGloo(store, rank, world_size, timeout)

    kind = distributed.Backend.backend_type_map[name]
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)

    return group


def _plugin_options(
    group: distributed.ProcessGroup, device: str, store: distributed.Store, timeout: timedelta
) -> Any:
    """Return the options from which a plugin of torch builds a backend for `group`."""
    options = distributed.distributed_c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = group.rank()
    options.group_size = group.size()
    options.timeout = timeout
    if device == "cuda" and hasattr(options, "process_group"):
        # Bind the group to the current GPU: NCCL in torch 2.15 would take the GPU that LOCAL_RANK names.
        group.bound_device_id = torch.device(device, torch.cuda.current_device())
        options.process_group = group

    return options


def _add(name: str, create: Create, devices: list[str]) -> str:
    distributed.Backend.register_backend(name.lower(), create, devices=devices)
    return name.lower()


def known_backends() -> list[str]:
    """Return the names of torch's backends and of this package's transports."""
    return sorted({*distributed.Backend.backend_list, *TRANSPORTS} - {"undefined", "fake"})


def _check(transport: Any, name: str) -> None:
    """Raise ConfigError if `transport` is not a class, or lacks methods of a link or a process group."""
    if not isinstance(transport, type):
        raise ConfigError(f"backend={name!r} is not a class.", hint="Name a class: package.module.Class.")

    is_group = issubclass(transport, distributed.ProcessGroup)
    needed = GROUP_OPERATIONS if is_group else methods(Link)
    # A method that is inherited from torch's base class counts as missing, because it only raises.
    missing = [
        method
        for method in needed
        if not callable(getattr(transport, method, None))
        or getattr(transport, method) is getattr(distributed.ProcessGroup, method)
    ]
    if missing:
        kind = "process group" if is_group else "link"
        raise ConfigError(
            f"backend={name!r} has no {' and no '.join(missing)}.",
            hint=f"A {kind} needs the methods {', '.join(needed)}; see slurmddp.collectives.link.Link.",
        )
