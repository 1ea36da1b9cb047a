"""Make this process a rank: take its device, threads and network interface, and join the process group.

`finish` undoes the changes of `start` in this process: environment variables, number of threads, process
group. So the same process can start again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError
from slurmddp.host import gloo_threads
from slurmddp.host.network_interface import GLOO_VARIABLE
from slurmddp.training.device.cpu_affinity import THREADS_VARIABLE, take_cpus
from slurmddp.training.device.visible_devices import VISIBLE
from slurmddp.training.process_group import flight_recording
from slurmddp.training.process_group.device_agreement import agree_on_devices, report_device
from slurmddp.training.process_group.gloo_interface import check_interfaces, name_interface
from slurmddp.training.process_group.rendezvous import open_store
from slurmddp.training.process_group.signed_store import SignedStore
from slurmddp.training.process_group.start_prefix import part_of_this_start

_log = logging.getLogger(__name__)
_VARIABLES = (VISIBLE, THREADS_VARIABLE, GLOO_VARIABLE)
"""The environment variables that `start` may set."""
_LEAVE_S = 5.0
"""The longest time in seconds that rank 0, at its end, keeps the store open for ranks that still use it."""
_joined: list[object] = []
"""A list with the default process group if this module has initialised it; empty if the program has."""


@dataclass(frozen=True)
class RankContext:
    """This process as a rank: its number, its device, and its connection to the other ranks."""

    info: RankInfo
    device: torch.device
    backend: str | None
    """The name of the process group's backend; None for a single rank, which has no group."""
    store: dist.Store | None
    """The store that all ranks of the launch share; keys that begin with `slurmddp/` are reserved."""
    undo: contextlib.ExitStack = field(repr=False, compare=False)
    """Undoes the changes that `start` has made in this process."""


def start(
    info: RankInfo,
    *,
    backend: str = "auto",
    init_method: str | None = None,
    rendezvous_timeout_s: float = 60.0,
    collective_timeout_s: float = 1800.0,
    stopped: Callable[[], bool] = lambda: False,
) -> RankContext:
    """Set up this process as the rank that `info` describes, and join the process group of all ranks.

    If the program has already initialised torch's default process group, that group is used, and `finish`
    leaves it open.

    Args:
        info: this rank, from `detect`.
        backend: `auto` (nccl on GPUs, else gloo), a name that `register` takes, or a device string.
        init_method: `tcp://host:port` or `file:///path`, where the ranks meet; None: from the environment.
        rendezvous_timeout_s: seconds to wait for ranks that have not joined.
        collective_timeout_s: seconds that a collective may take.
        stopped: returns whether this rank was asked to stop; polled while it waits for other ranks.

    Raises:
        DevicesError: on all ranks, if a rank has no device or the devices are not compatible.
        SlurmddpError: ranks are missing after `rendezvous_timeout_s`.
        StoppedAtCheckpoint: on all ranks, if any rank was asked to stop before all had met.
        MismatchError: two processes have the same rank, a host or network interface is wrong, or an
            existing process group has another rank or number of ranks than `info`.
    """
    group_backend = _check_group(info) if dist.is_initialized() else None
    undo = contextlib.ExitStack()
    undo.callback(_restore, {name: os.environ.get(name) for name in _VARIABLES})
    try:
        device, device_backend, report = report_device(info, group_backend or backend)
        context = RankContext(info, device, device_backend if info.world_size > 1 else None, None, undo)
        if not report.trouble:
            take_cpus(info, undo)

        if context.backend is None:
            return context

        if group_backend is not None:
            if report.trouble:
                raise MismatchError(report.trouble, hint=report.hint)
            return replace(context, store=part_of_this_start(_store_of_group(), info, rendezvous_timeout_s))

        check_interfaces(info, context.backend)
        store = open_store(info, rendezvous_timeout_s, init_method, stopped=stopped)
        name_interface(info, store)
        # A rank that found no device has not raised yet. It reports here, and all ranks raise the same error.
        agree_on_devices(SignedStore(store, info.launch_id), info, report)
        return _join_group(context, store, collective_timeout_s)
    except BaseException:
        undo.close()
        raise


def finish(context: RankContext) -> None:
    """Destroy the process group that `start` initialised, and restore environment variables and threads.

    Further calls do nothing. Call it at an orderly end only. After an error a rank should exit at once: the
    other ranks may wait in a collective that this rank will never join.
    """
    context.undo.close()


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _check_group(info: RankInfo) -> str:
    """Check the group that the program has initialised; return its backend, `auto` unless gloo or nccl.

    Raises:
        SlurmddpError: a Distributon that is not closed initialised the group.
        MismatchError: rank or world size of the group differ from `info`.
    """
    if dist.group.WORLD in _joined:
        raise SlurmddpError(
            "Another Distributon of this process has not been closed.",
            hint="Use one Distributon at a time and close it before the next.",
        )

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if (rank, world_size) != (info.rank, info.world_size):
        raise MismatchError(
            f"The process group of this program has rank {rank} of {world_size}, but the environment "
            f"({info.environment}) gives rank {info.rank} of {info.world_size}.",
            hint="Initialise the group from the environment (`init_process_group()` without rank=), or leave "
            "it to launch().",
        )

    backend = dist.get_backend()
    if backend not in ("gloo", "nccl"):
        return "auto"
    return backend


def _store_of_group() -> dist.Store:
    """Return the store of the default process group, without torch's prefixes."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store

    return store


def _join_group(context: RankContext, store: dist.Store, timeout_s: float) -> RankContext:
    """Initialise the default process group with the ranks that share `store`.

    Returns:
        `context` with the store.
    """
    info = context.info
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(
        context.backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=_bound_device(context),
    )

    _joined.append(dist.group.WORLD)
    # Callbacks run in reverse order: first destroy the group, then keep the store open until the other
    # ranks have left.
    context.undo.callback(_joined.clear)
    context.undo.callback(SignedStore(store, info.launch_id).await_all, "slurmddp/left", info, _LEAVE_S)
    context.undo.callback(_destroy_group)
    flight_recording.start(info.rank, context.device, context.undo)

    _log.info(
        "rank %d of %d uses backend %s on device %s",
        info.rank,
        info.world_size,
        context.backend,
        context.device,
    )
    return replace(context, store=store)


def _bound_device(context: RankContext) -> torch.device | None:
    """Return the GPU on which torch is to build its NCCL communicators; None if there are none."""
    if context.backend == "nccl":
        return context.device

    # For `cpu:gloo,cuda:nccl` torch 2.15 builds the communicators at once, by default on the GPU that
    # LOCAL_RANK names. Older versions build them at the first collective, on the current GPU.
    builds_at_once = hasattr(dist, "ProcessGroupNCCL2") and context.device.type == "cuda"
    backend = context.backend or ""
    is_of_torch = backend not in dist.Backend.backend_list
    if builds_at_once and is_of_torch and "cuda:nccl" in backend.split(","):
        return context.device
    return None


def _destroy_group() -> None:
    """Destroy the default process group, if there is one."""
    if not dist.is_initialized():
        return

    if dist.get_backend() != "nccl":
        # torch 2.13 can deadlock when the last reference to a gloo group (a DDP model holds one) is released
        # just after a collective: the caller holds the interpreter lock and waits for gloo's thread, which
        # needs that lock. An extra reference, never released, keeps the group until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        gloo_threads.wait_until_idle()

    dist.destroy_process_group()
