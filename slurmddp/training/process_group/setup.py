"""Turns the facts about a rank into a device, threads, an interface and a process group, and back.

Whatever `start` changes in this process (environment variables, thread count, the group), `finish` undoes,
so that a second start in the same process, and a test, find it as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, SlurmddpError
from slurmddp.host.address import LOOPBACK, find_rank_zero, is_loopback
from slurmddp.host.interface import GLOO_VARIABLE, check_named, interface_towards
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.process_group.cpu_affinity import take_cpus
from slurmddp.training.process_group.device import (
    choose_backend,
    choose_device,
    device_identity,
    foreign_gpus,
    own_mig_device,
    visible_names,
)
from slurmddp.training.process_group.device_agreement import DeviceReport, DevicesError, judge, settle
from slurmddp.training.process_group.rendezvous import open_store
from slurmddp.training.process_group.signed_store import SignedStore
from slurmddp.training.process_group.variable import set_variable

_log = logging.getLogger(__name__)
_FAREWELL_S = 5.0
_FOUND = "slurmddp/found"
_LEFT = "slurmddp/left"
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO_REST_S = 1.0
_LOOKS_AT_REST = 5
_joined: list[object] = []
"""The process group that this module has initialised, until it is destroyed; empty for a program's own."""


@dataclass(frozen=True)
class RankContext:
    """Where this rank stands, what it computes on, and how it talks to the others."""

    info: RankInfo
    device: torch.device
    backend: str | None
    """None when this is the only rank: there is no process group then."""
    store: dist.Store | None
    """Shared by all ranks of the launch; keys that begin with `slurmddp/` are taken."""
    undo: contextlib.ExitStack = field(repr=False, compare=False)


def start(
    info: RankInfo,
    *,
    backend: str = "auto",
    timeout_s: float = 1800.0,
    rendezvous_timeout_s: float = 60.0,
    stopped: Callable[[], bool] = lambda: False,
) -> RankContext:
    """Prepare this process as the rank that `info` says; returns when all ranks have done so.

    `timeout_s` bounds collectives, `rendezvous_timeout_s` bounds the wait for ranks that do not come, which
    ends as well once this rank, or one that waits with it, is told to stop (`stopped`). Raises DevicesError
    on all ranks if one of them has no device, or another kind of it, or that of another one.

    A default process group that the program has initialised is used as it is, and `finish` leaves it alone.
    """
    group_backend = _check_group(info) if dist.is_initialized() else None
    undo = contextlib.ExitStack()
    try:
        device, chosen, claim = _claim_device(info, group_backend or backend, undo)
        place = RankContext(info, device, chosen if info.world_size > 1 else None, None, undo)
        if not claim.trouble:
            take_cpus(info, place.undo)
        if place.backend is None:
            return place
        if group_backend is not None:
            if claim.trouble:
                raise MismatchError(claim.trouble, hint=claim.hint)
            return replace(place, store=_store_of_group())
        store = _find_others(place, rendezvous_timeout_s, stopped)
        settle(SignedStore(store, info.launch_id), info.rank, info.world_size, claim)
        return _meet(place, store, timeout_s)
    except BaseException:
        undo.close()
        raise


def _check_group(info: RankInfo) -> str:
    """Return the backend of the default process group; raises SlurmddpError where it can't be adopted."""
    if dist.group.WORLD in _joined:
        raise SlurmddpError(
            "Another Distributon of this process has not been closed.",
            hint="Use one Distributon at a time and close it before the next.",
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (info.rank, info.world_size):
        raise MismatchError(
            f"The process group of this program says rank {rank} of {world_size}, but the environment "
            f"({info.environment}) says rank {info.rank} of {info.world_size}.",
            hint="Initialise the group from the environment (`init_process_group()` without rank=), or leave "
            "it to launch().",
        )
    backend = dist.get_backend()
    return backend if backend in ("gloo", "nccl") else "auto"


def _store_of_group() -> dist.Store:
    """Return the store at which the ranks of the default process group have met."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def visible_gpus() -> int:
    """Return how many GPUs the ranks of this node can share; leaves CUDA alone where it would take one."""
    names = visible_names(os.environ) or ()
    if names and names[0].startswith("MIG-") and torch.version.cuda:
        return len(names)
    return torch.cuda.device_count()


def finish(place: RankContext) -> None:
    """Leave the process group and undo what `start` changed; calling it again does nothing.

    Meant for an orderly end: after an error a rank should exit at once, since its peers may be stuck in a
    collective that this one will never join.
    """
    place.undo.close()


def _claim_device(
    info: RankInfo, asked: str, undo: contextlib.ExitStack
) -> tuple[torch.device, str, DeviceReport]:
    """Take this rank's device; return it with its backend, and what the other ranks are to know of it.

    A rank that gets none still meets the others, so that they hear of it; one that is alone raises.
    """
    lacks = False
    try:
        lacks = _lacks_gpus(info)
        index = _choose_device(info, undo)
        chosen = choose_backend(asked, index, {"gloo", "nccl", *dist.Backend.backend_list})
        device = _take_device(info, index)
        identity = _identity(device)
    except (MismatchError, RuntimeError) as error:
        claim = _trouble(info, error, lacks)
        _log.error("no device: %s", claim.trouble)
        if info.world_size == 1 and (refusal := judge([claim])):
            raise DevicesError(refusal) from error
        return torch.device("cpu"), "gloo", claim
    claim = DeviceReport(
        node=info.node_rank, kind=device.type, backend=chosen, identity=identity, unfit=lacks
    )
    return device, chosen, claim


def _trouble(info: RankInfo, error: Exception, lacks: bool) -> DeviceReport:
    """Return what a rank says that has got no device; a GPU that raises is its node's fault."""
    if isinstance(error, MismatchError):
        return DeviceReport(node=info.node_rank, trouble=error.message, hint=error.hint, unfit=lacks)
    said = str(error).splitlines()[0]
    hint = "Have the GPUs of that node looked at (`nvidia-smi`, the kernel's log)."
    return DeviceReport(node=info.node_rank, trouble=f"its GPU can't be used: {said}", hint=hint, unfit=True)


def _lacks_gpus(info: RankInfo) -> bool:
    """Whether torch shows fewer GPUs than SLURM has given to the ranks of this node, all of them together."""
    return RunContext.read(os.environ).by_agent and visible_gpus() < info.local_world_size <= (
        info.gpus_on_node or 0
    )


def _choose_device(info: RankInfo, undo: contextlib.ExitStack) -> int | None:
    """Return the index of this rank's GPU, None for the CPU; one of several MIG devices is the only one then.

    CUDA reads the variable once, so this comes before anything that asks it for devices.
    """
    own = own_mig_device(info, os.environ)
    if own is None:
        return choose_device(info, os.environ, torch.cuda.device_count())
    set_variable("CUDA_VISIBLE_DEVICES", own, undo)
    return 0 if torch.cuda.device_count() else None


def _take_device(info: RankInfo, index: int | None) -> torch.device:
    if index is not None:
        if info.local_rank == 0 and (line := foreign_gpus(info, os.environ, torch.cuda.device_count())):
            _log.warning(line)
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if info.gpus_on_node:
        _log.warning("SLURM granted %d GPU(s), but torch sees none: computing on the CPU", info.gpus_on_node)
    elif info.emulated and (here := visible_gpus()):
        _log.warning("%d ranks on pretended nodes, %d GPU(s): computing on the CPU", info.world_size, here)
    return torch.device("cpu")


def _find_others(place: RankContext, timeout_s: float, stopped: Callable[[], bool]) -> dist.Store:
    _check_interfaces(place)
    store = open_store(place.info, timeout_s, stopped=stopped)
    _name_interface(place, store)
    return store


def _check_interfaces(place: RankContext) -> None:
    """Refuse interfaces that a person named and that can't be right."""
    info = place.info
    # Nodes that share this machine meet on its loopback.
    nodes = 1 if info.emulated or is_loopback(info.master_addr or "") else info.nodes
    check_named(os.environ, place.backend, nodes, [name for _, name in socket.if_nameindex()])


def _name_interface(place: RankContext, store: dist.Store) -> None:
    """Name gloo the interface that leads to the others, unless a person has named one."""
    address = _address_of_rank_zero(place.info, store)
    if os.environ.get(GLOO_VARIABLE) or address is None:
        return
    name = interface_towards(address)
    if name is not None:
        set_variable(GLOO_VARIABLE, name, place.undo)


def _address_of_rank_zero(info: RankInfo, store: dist.Store) -> str | None:
    """Return the address of rank 0's node; None where torchrun met there by a name that leads nowhere now.

    Under torchrun its own node may take its name for loopback, and the others not: it asks these.
    """
    if info.nodes == 1:
        return LOOPBACK.text
    if info.master_port is None:
        return find_rank_zero(info)[0].text
    found = ""
    with contextlib.suppress(SlurmddpError):
        found = find_rank_zero(info)[0].text
    store.set(f"{_FOUND}/{info.rank}", found)
    if is_loopback(found) and not is_loopback(info.master_addr or ""):
        with contextlib.suppress(RuntimeError):  # Who says nothing is missed when all say what they have.
            told = (store.get(f"{_FOUND}/{rank}").decode() for rank in range(info.world_size))
            found = next((text for text in told if text and not is_loopback(text)), found)
    return found or None


def _meet(place: RankContext, store: dist.Store, timeout_s: float) -> RankContext:
    """Form the group with the ranks that share `store`."""
    met = replace(place, store=store)
    _join_group(met, store, timedelta(seconds=timeout_s))
    return met


def _identity(device: torch.device) -> str:
    """Return what tells a GPU from all others, those of other nodes included; empty where nothing does."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else device_identity(os.environ, device.index, uuid)


def _join_group(place: RankContext, store: dist.Store, timeout: timedelta) -> None:
    info = place.info
    store.set_timeout(timeout)
    dist.init_process_group(
        place.backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=place.device if place.backend == "nccl" else None,
    )
    _joined.append(dist.group.WORLD)
    place.undo.callback(_joined.clear)
    place.undo.callback(_say_farewell, info, store)
    place.undo.callback(_destroy_group)
    _log.info("rank %d of %d: %s on %s", info.rank, info.world_size, place.backend, place.device)


def _destroy_group() -> None:
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        # torch 2.13: whoever drops the last reference to a gloo group just after a collective (a DDP model
        # holds one) waits, with the interpreter locked, for gloo's thread, which waits for the interpreter.
        # One more reference, never given back, lets the group end with the process instead.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
        _await_gloo_rest()
    dist.destroy_process_group()


def _await_gloo_rest() -> None:
    """Return once gloo's threads have let go of the tensors of the last collective, or after a second.

    A collective returns before its thread drops the tensors, for which it needs the interpreter; if that is
    ending by then, the process aborts ("terminate called without an active exception"). A thread seen asleep
    several times in a row, while nobody holds the interpreter, has nothing left to drop.
    """
    asleep_in_a_row = 0
    deadline = time.monotonic() + _GLOO_REST_S
    while asleep_in_a_row < _LOOKS_AT_REST and time.monotonic() < deadline:
        time.sleep(0.002)  # lets the interpreter go
        asleep_in_a_row = asleep_in_a_row + 1 if set(_gloo_thread_states()) <= {"S"} else 0


def _gloo_thread_states() -> Iterator[str]:
    """Yield the kernel's letter for the state of each thread that runs gloo's collectives; none off Linux."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
            if name == _GLOO_THREAD:
                yield rest.split()[0]


def _say_farewell(info: RankInfo, store: dist.Store) -> None:
    """Keep the store, which lives in rank 0, until the others have left the group too."""
    deadline = time.monotonic() + _FAREWELL_S
    with contextlib.suppress(RuntimeError):
        store.add(_LEFT, 1)
        while info.rank == 0 and store.add(_LEFT, 0) < info.world_size and time.monotonic() < deadline:
            time.sleep(0.005)
