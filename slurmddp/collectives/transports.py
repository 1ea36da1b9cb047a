"""Register transports as backends of torch.distributed: shipped ones by name, others by import path."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import distributed

from slurmddp.collectives.backend import LinkGroup
from slurmddp.collectives.link import Link
from slurmddp.errors import ConfigError, near_matches
from slurmddp.plugins import locate, methods

TRANSPORTS: Mapping[str, str] = {"shm": "slurmddp.collectives.shared_memory.SharedMemoryLink"}
"""The import paths of the shipped transports, by name."""
GROUP_OPERATIONS = ("allreduce", "broadcast", "allgather", "barrier")
"""Methods that a process group of a person's own must have: a training calls them."""


def register(name: str) -> str:
    """Make a backend usable by its name in torch.distributed; return the name by which torch knows it.

    Args:
        name: a backend that torch knows, a shipped transport, or `package.module.Class`. The class is built
            as `Class(store, rank, world_size, timeout)`. A subclass of torch's ProcessGroup is used as it is;
            any other class is a `Link`. Its attribute `devices` names the types of devices whose tensors it
            takes; `("cpu",)` by default.

    Raises:
        ConfigError: there is no such backend, or the class lacks operations.

    Example:
        distributed.init_process_group(register("my_package.transport.MyTransport"))
    """
    if name.lower() in distributed.Backend.backend_list:
        return name.lower()
    if name not in TRANSPORTS and "." not in name:
        raise ConfigError(
            f"backend={name!r} is not known.",
            hint=f"{near_matches(name, known_backends())} One of your own is given as package.module.Class.",
        )
    found = locate(TRANSPORTS.get(name, name), key="backend")
    _check(found, name)

    def create(store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        try:
            built = found(store, rank, world_size, timeout)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"backend={name!r} can't be built on rank {rank}: {type(error).__name__}: {error}.",
                hint=f"It is called as {found.__qualname__}(store, rank, world_size, timeout).",
            ) from error
        return built if isinstance(built, distributed.ProcessGroup) else LinkGroup(built, timeout)

    devices = list(getattr(found, "devices", ("cpu",)))
    distributed.Backend.register_backend(name.lower(), create, devices=devices)
    return name.lower()


def known_backends() -> list[str]:
    """Return the names of torch's backends and of the shipped transports."""
    return sorted({*distributed.Backend.backend_list, *TRANSPORTS} - {"undefined", "fake"})


def _check(found: Any, name: str) -> None:
    if not isinstance(found, type):
        raise ConfigError(f"backend={name!r} is no class.", hint="Name a class: package.module.Class.")
    is_group = issubclass(found, distributed.ProcessGroup)
    needed = GROUP_OPERATIONS if is_group else methods(Link)
    missing = [
        operation
        for operation in needed
        if not callable(getattr(found, operation, None))
        or getattr(found, operation) is getattr(distributed.ProcessGroup, operation)
    ]
    if missing:
        kind = "process group" if is_group else "link"
        raise ConfigError(
            f"backend={name!r} has no {' and no '.join(missing)}.",
            hint=f"A {kind} needs the methods {', '.join(needed)}; see slurmddp.collectives.link.Link.",
        )
