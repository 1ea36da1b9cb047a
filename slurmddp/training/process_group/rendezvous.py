"""How the ranks of one launch find each other without a port that anybody had to choose.

Rank 0 opens the store on a port that the kernel gives out and keeps, so it can't collide, and on no other
address than the one that leads to the others. To tell them that port it answers on a beacon (`beacon`), for
which the ranks look by the launch's id. When all ranks have reported, the beacon is closed. No shared file
system is needed.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby, product

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import MismatchError, RankFailure, SlurmddpError, StoppedAtCheckpoint
from slurmddp.host.address import Address, find_rank_zero, master_name, not_here
from slurmddp.training.process_group.port_discovery import Beacon, Words, ask
from slurmddp.training.process_group.signed_store import SignedStore

_log = logging.getLogger(__name__)

_NOTICE_S = (3.0, 10.0)
"""When a rank that waits first says so, and how often from then on."""
_POLL_S = 0.25
_PATIENCE_S = (0.2, 1.0)
"""How long a listener may take to answer, in seconds: in the first round, and at most later."""
_GRACE_S = 5.0
_ARRIVED = "slurmddp/arrived"
_SCATTERED = "slurmddp/scattered"
"""Set by a rank that does not lie where it would if each node had the next few ranks (`--distribution`)."""
_VERDICT = "slurmddp/verdict"
_COMPLETE = "complete"
_STOPPED = "stopped"
_SLOW_S = 3.0
"""A connection takes milliseconds; a name server that does not answer is asked for five seconds and more."""
_NAMES_HINT = (
    "Most likely this node's name server does not answer: see how long `getent hosts ADDRESS` takes for an "
    "address of rank 0's node, and mend /etc/resolv.conf or add the nodes to /etc/hosts."
)
_LOGS_HINT = "The logs of the missing ranks say why they did not start."


def open_store(
    info: RankInfo, timeout_s: float = 60.0, *, stopped: Callable[[], bool] = lambda: False
) -> dist.Store:
    """Return the store that all ranks of this launch share, once every one of them has reported.

    Raises MismatchError when rank 0's host can't be right, and SlurmddpError when ranks are missing after
    `timeout_s` seconds; both say who waited where for whom. `stopped` says whether this rank was told to
    leave: if that is before all have met, every rank that is here raises StoppedAtCheckpoint.
    """
    if info.master_port is not None:
        return _given_store(info, timeout_s)
    deadline = time.monotonic() + timeout_s
    addresses = find_rank_zero(info)
    if info.rank == 0:
        return _host(info, addresses, deadline, stopped)
    store = _join(info, addresses, deadline, stopped)
    signed = SignedStore(store, info.launch_id)
    try:
        _report(signed, info)
        # Rank 0 began to wait before this rank reported, so it is the first to give up, and says why.
        verdict = _await_verdict(signed, info, time.monotonic() + timeout_s + _GRACE_S, stopped)
    except RuntimeError as error:
        if stopped():
            raise _left_early() from error
        raise RankFailure(
            f"Rank 0 went away while rank {info.rank} waited for the others.", hint="Rank 0's log says why."
        ) from error
    if verdict == _STOPPED:
        raise _left_early()
    if verdict != _COMPLETE:
        raise SlurmddpError(verdict, hint=_LOGS_HINT)
    return store


class _Notice:
    """When a rank that waits says so in its log."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _NOTICE_S[0]

    def is_due(self) -> bool:
        due = time.monotonic() > self._next
        if due:
            self._next = time.monotonic() + _NOTICE_S[1]
        return due


def _left_early() -> StoppedAtCheckpoint:
    return StoppedAtCheckpoint(
        "Stopped before the ranks had met.", hint="It begins there when it is started again."
    )


def _given_store(info: RankInfo, timeout_s: float) -> dist.Store:
    """Meet at the address and port that torchrun chose."""
    try:
        store: dist.Store = next(
            rendezvous("env://", info.rank, info.world_size, timeout=timedelta(seconds=timeout_s))
        )[0]
    except (RuntimeError, ValueError) as error:
        raise SlurmddpError(
            f"Rank {info.rank} met nobody at {info.master_addr}:{info.master_port} (MASTER_ADDR, "
            f"MASTER_PORT): {str(error).splitlines()[0].rstrip('.')}.",
            hint="Check that rank 0 runs on that host and that the port is free there.",
        ) from error
    return store


def _host(
    info: RankInfo, addresses: list[Address], deadline: float, stopped: Callable[[], bool]
) -> dist.TCPStore:
    """Rank 0: open the store, and answer on the beacon until all ranks have reported."""
    began = time.monotonic()
    address, store = _serve(info, addresses)
    is_slow = _warn_if_slow(time.monotonic() - began)
    signed = SignedStore(store, info.launch_id)
    words, notice = Words(info.launch_id), _Notice()
    with Beacon(address, words) as beacon:
        _report(signed, info)
        while not _have_all_arrived(signed, info) and signed.get(_VERDICT) is None:
            if stopped():
                signed.compare_set(_VERDICT, _STOPPED)
            if time.monotonic() > deadline:
                raise _give_up(signed, info, is_slow)
            if notice.is_due():
                _log.warning("still waiting: %s The others can't begin without.", _missing(signed, info))
            beacon.answer(store.port)
        if signed.compare_set(_VERDICT, _COMPLETE) == _STOPPED:
            # The others poll the verdict, and the store ends with this process; some may only just arrive.
            told = time.monotonic() + 2 * _POLL_S
            while time.monotonic() < told:
                beacon.answer(store.port)
            raise _left_early()
    return store


def _serve(info: RankInfo, addresses: list[Address]) -> tuple[Address, dist.TCPStore]:
    """Open the store on the first of rank 0's addresses that is really this machine's."""
    for address in addresses:
        try:
            listener = socket.create_server((address.text, 0), family=address.family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            raise
        return address, _store_on(listener, address)
    raise not_here(info, addresses)


def _store_on(listener: socket.socket, address: Address) -> dist.TCPStore:
    port = listener.getsockname()[1]
    if _torch_version() >= (2, 8):
        return dist.TCPStore(
            address.text, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    # Older versions take no socket here; they listen on all addresses of the machine.
    listener.close()
    return dist.TCPStore(address.text, 0, is_master=True, wait_for_workers=False)


def _warn_if_slow(seconds: float) -> bool:
    """Warn if torch took long to connect to its store: for its log it looks up the name of the address."""
    if seconds > _SLOW_S:
        _log.warning("torch took %.0f s to connect to its store. %s", seconds, _NAMES_HINT)
    return seconds > _SLOW_S


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _join(
    info: RankInfo, addresses: list[Address], deadline: float, stopped: Callable[[], bool]
) -> dist.TCPStore:
    """Any other rank: look for the beacon until it answers, then connect to the store."""
    words, notice, pause, patience_s = Words(info.launch_id), _Notice(), 0.02, _PATIENCE_S[0]
    began = time.monotonic()
    while True:
        # The disk is asked only if rank 0 is long in coming.
        late = time.monotonic() - began > _NOTICE_S[0]
        ports = [*(words.published() if late else ()), *words.ports]
        for address, port in product(addresses, ports):
            if stopped():
                raise _left_early()
            store_port = ask(address, port, words, patience_s)
            if store_port is not None:
                asked = time.monotonic()
                store = _connect(address, store_port, deadline)
                _warn_if_slow(time.monotonic() - asked)
                return store
            if time.monotonic() > deadline:
                raise _nobody(info, addresses)
            if notice.is_due():
                _log.warning("still waiting: rank 0 on %s does not answer.", master_name(info))
        time.sleep(pause)
        pause = min(pause * 1.2, 1.0)  # a sixth of the time that has passed
        patience_s = min(patience_s * 1.5, _PATIENCE_S[1])


def _connect(address: Address, port: int, deadline: float) -> dist.TCPStore:
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        return dist.TCPStore(address.text, port, is_master=False, wait_for_workers=False, timeout=left)
    except RuntimeError as error:
        raise RankFailure(
            f"Rank 0 answered on {address.text}, but its store on port {port} does not.",
            hint="Rank 0 died just now (its log says why), or a firewall between the nodes closes that port.",
        ) from error


def _report(store: SignedStore, info: RankInfo) -> None:
    """Say that this rank is here; two processes that claim one rank would hang the others later."""
    own = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
    if store.compare_set(_here(info.rank), own) != own:
        raise MismatchError(
            f"Two processes of launch {info.launch_id} say that they are rank {info.rank}.",
            hint="Start each rank once: one srun, and no RANK or SLURM_PROCID set by hand.",
        )
    nodes = _nodes_in_blocks(info)
    if nodes and nodes[info.rank] != info.node_rank:
        store.set(_SCATTERED, "1")
    store.add(_ARRIVED, 1)


def _here(rank: int) -> str:
    return f"slurmddp/here/{rank}"


def _have_all_arrived(store: SignedStore, info: RankInfo) -> bool:
    """Whether all ranks have reported; the reports are read only once the counter says so."""
    return store.add(_ARRIVED, 0) >= info.world_size and not _absent(store, info)


def _absent(store: SignedStore, info: RankInfo) -> list[int]:
    reports = store.get_all([_here(rank) for rank in range(info.world_size)])
    return [rank for rank, report in enumerate(reports) if report is None]


def _await_verdict(store: SignedStore, info: RankInfo, deadline: float, stopped: Callable[[], bool]) -> str:
    """Wait until rank 0 has seen everyone; polls, so that signals are still handled meanwhile."""
    pause = 0.002
    while (verdict := store.get(_VERDICT)) is None:
        if stopped():
            return store.compare_set(_VERDICT, _STOPPED)
        if time.monotonic() > deadline:
            raise SlurmddpError(
                f"Rank {info.rank} found rank 0, which did not see all {info.world_size} ranks in time.",
                hint=_LOGS_HINT,
            )
        time.sleep(pause)
        pause = min(pause * 1.2, _POLL_S)
    return verdict


def _missing(store: SignedStore, info: RankInfo) -> str:
    """Return a sentence that names the ranks which have not reported."""
    ranks = _absent(store, info)
    shown = _named(ranks, info, with_hosts=store.get(_SCATTERED) is None)
    host = socket.gethostname()
    return f"{len(ranks)} of {info.world_size} ranks did not report to rank 0 on {host}: {shown}."


def _named(ranks: list[int], info: RankInfo, *, with_hosts: bool) -> str:
    """Return the ranks, by host where these hold blocks of ranks; a long list is cut off."""
    shown, more = ranks[:8], ", ..." if len(ranks) > 8 else ""
    nodes = _nodes_in_blocks(info)
    if info.nodes == 1 or not with_hosts or not nodes:
        return f"rank {', '.join(map(str, shown))}{more}"
    hosts = [info.hosts[node] for node in nodes]
    blocks = [(host, [str(rank) for rank in block]) for host, block in groupby(shown, hosts.__getitem__)]
    return " and ".join(f"rank {', '.join(block)} on {host}" for host, block in blocks) + more


def _nodes_in_blocks(info: RankInfo) -> list[int]:
    """Return the node of each rank, if each node has the next few; empty where that is not known."""
    tasks = info.tasks or (info.local_world_size,) * info.nodes
    nodes = [node for node, count in enumerate(tasks) for _ in range(count)]
    return nodes if len(nodes) == info.world_size and len(tasks) == len(info.hosts) else []


def _give_up(store: SignedStore, info: RankInfo, is_slow: bool) -> SlurmddpError:
    """Tell the ranks that are here which ones are not, and return the error that says so."""
    message = _missing(store, info)
    store.set(_VERDICT, message)
    time.sleep(2 * _POLL_S)  # The others poll the verdict, and the store ends with this process.
    return SlurmddpError(message, hint=f"{_LOGS_HINT} {_NAMES_HINT}" if is_slow else _LOGS_HINT)


def _nobody(info: RankInfo, addresses: list[Address]) -> SlurmddpError:
    ports = Words(info.launch_id).ports
    where = ", ".join(address.text for address in addresses)
    return SlurmddpError(
        f"Rank {info.rank} on {socket.gethostname()} did not find rank 0 of launch {info.launch_id} on "
        f"{master_name(info)!r} ({where}), ports {', '.join(map(str, ports[:4]))} and {len(ports) - 4} more.",
        hint="Rank 0 listens there as soon as it has started: its log says whether it did. If it did, the "
        "nodes don't reach each other by that name: set SLURMDDP_MASTER_ADDR to an address they reach.",
    )
