"""Let the ranks of one launch meet at rank 0's store, without a shared file and without a chosen port.

Rank 0 opens the store on a port that the kernel picks, so no other program can hold it. The store listens
only on the address that leads to the other ranks. Those ranks learn the port from rank 0 (`port_discovery`).
When all ranks have joined (`participants`), rank 0 stops answering.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import product
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from slurmddp.environments import mpi
from slurmddp.environments.names import MPIEXEC_VARIABLE
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import ConfigError, RankFailure, SlurmddpError, StoppedAtCheckpoint
from slurmddp.host import process
from slurmddp.host.address import Address, find_rank_zero, master_name, resolve
from slurmddp.host.ports import listen_as_rank_zero
from slurmddp.short_text import first_line
from slurmddp.training.process_group.participants import COMPLETE, STOPPED, Participants
from slurmddp.training.process_group.port_discovery import Handshake, PortServer, ask_for_port
from slurmddp.training.process_group.start_prefix import part_of_this_start

_log = logging.getLogger(__name__)

_NOTICE_S = (3.0, 10.0)
"""Seconds until a waiting rank first logs that it waits, and seconds between later log lines."""
_POLL_S = 0.25
"""The longest pause in seconds between two polls of the outcome."""
_ANSWER_S = (0.2, 1.0)
"""Seconds that a listener may take to answer: in the first round, and at most in a later round."""
_GRACE_S = 5.0
"""Seconds that other ranks wait longer than rank 0, which gives up first and names the missing ranks."""
_READ_S = 5.0
"""The longest time in seconds that rank 0 waits until the ranks that joined have read a failure's reason."""
_SLOW_S = 3.0
"""Seconds from which a connection counts as slow: a name server that does not answer costs five seconds."""
_NAMES_HINT = (
    "Most likely this node's name server does not answer: see how long `getent hosts ADDRESS` takes for an "
    "address of rank 0's node, and mend /etc/resolv.conf or add the nodes to /etc/hosts."
)
_LOGS_HINT = "The logs of the missing ranks show why they did not start."


def open_store(
    info: RankInfo,
    timeout_s: float = 60.0,
    init_method: str | None = None,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> dist.Store:
    """Wait until all ranks of this launch have joined, and return the store that they share.

    Args:
        info: this rank. If it has a `master_port`, as under torchrun, the ranks meet at that port.
        timeout_s: seconds to wait for the other ranks.
        init_method: `tcp://host:port` of rank 0, or `file:///path`; None: as the environment says.
        stopped: returns whether this rank was asked to stop; polled while this rank waits.

    Raises:
        ConfigError: the file of `init_method` is damaged.
        MismatchError: the name of rank 0's host does not resolve, or two processes have the same rank.
        StoppedAtCheckpoint: on all ranks that have joined, if any of them was asked to stop.
        SlurmddpError: ranks are missing after `timeout_s`; the message names them.
    """
    if init_method is not None or info.master_port is not None:
        return _given_store(info, timeout_s, init_method or "env://")

    deadline = time.monotonic() + timeout_s
    if info.rank == 0:
        return _host(info, deadline, stopped)

    store = _find_store(info, deadline, stopped)
    participants = Participants(store, info)
    try:
        participants.join()
        outcome = _await_outcome(participants, info, time.monotonic() + timeout_s + _GRACE_S, stopped)
        if outcome != COMPLETE:
            participants.confirm_outcome()
    except RuntimeError as error:
        # The store ended with rank 0's process. If this rank was asked to stop, rank 0 probably was too, so
        # this is a stop and no failure.
        if stopped():
            raise _stopped_early() from error

        raise RankFailure(
            f"Rank 0 exited while rank {info.rank} waited for other ranks.", hint="Rank 0's log shows why."
        ) from error

    _require_complete(outcome, _LOGS_HINT)
    return store


def _require_complete(outcome: str, hint: str) -> None:
    if outcome == STOPPED:
        raise _stopped_early()
    if outcome != COMPLETE:
        raise SlurmddpError(outcome, hint=hint)


def _stopped_early() -> StoppedAtCheckpoint:
    return StoppedAtCheckpoint(
        "Stopped before all ranks had joined.", hint="The next attempt starts the ranks again."
    )


class _Notice:
    """Timer for the log lines of a waiting rank: the first after 3 s, later ones 10 s apart."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _NOTICE_S[0]

    def is_due(self) -> bool:
        due = time.monotonic() > self._next
        if due:
            self._next = time.monotonic() + _NOTICE_S[1]

        return due


def environment_with(environ: Mapping[str, str], init_method: str | None) -> Mapping[str, str]:
    """Return a copy of `environ` in which MASTER_ADDR and MASTER_PORT follow from `init_method`, if given.

    For ranks that one mpiexec started on one node, it also sets the pid and the start time of mpiexec, from
    which the id of their launch follows.

    Raises:
        ConfigError: `init_method` is not `env://`, `tcp://host:port` or `file:///path`.
    """
    if mpi.is_on_one_node(environ):
        launcher = process.starter(environ, mpi.PMI_VARIABLES)
        if launcher:
            environ = {**environ, MPIEXEC_VARIABLE: f"{launcher} {process.start_time(launcher)}"}

    if init_method in (None, "env://"):
        return environ

    url = urlsplit(str(init_method))
    # `url.port` raises ValueError if the port is no number.
    with suppress(ValueError):
        if url.scheme == "tcp" and url.hostname and url.port:
            return {**environ, "MASTER_ADDR": url.hostname, "MASTER_PORT": str(url.port)}
        if url.scheme == "file" and not url.netloc and url.path[0:1] == "/" and url.path[1:]:
            return {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", **environ}

    raise ConfigError(
        f"init_method is {init_method!r}.",
        hint="Give tcp://host:port of rank 0, or file:///path/on/a/shared/disk, or leave it out.",
    )


def _given_store(info: RankInfo, timeout_s: float, init_method: str) -> dist.Store:
    """Return the store at the address or file that torchrun or the user has named."""
    is_file = init_method.startswith("file:")
    if not is_file:
        # Raise at once if the host name does not resolve: torch would retry until the time-out.
        resolve(urlsplit(init_method).hostname or info.master_addr or "localhost")

    try:
        store = _open_given(info, timedelta(seconds=timeout_s), init_method)
    except (RuntimeError, ValueError) as error:
        where = f"{init_method} (init_method)"
        if init_method == "env://":
            where = f"{info.master_addr}:{info.master_port} (MASTER_ADDR, MASTER_PORT)"
        hint = "Check that rank 0 runs on that host and that the port is free there."
        if is_file:
            hint = "Check that the folder is on a disk that all nodes share."

        raise SlurmddpError(
            f"Rank {info.rank} found no other rank at {where}: {first_line(error).rstrip('.')}.", hint=hint
        ) from error

    return part_of_this_start(store, info, timeout_s)


def _open_given(info: RankInfo, timeout: timedelta, init_method: str) -> dist.Store:
    """Return torch's store for `init_method`, opened without waiting for other ranks."""
    if init_method.startswith("file:"):
        path = urlsplit(init_method).path
        _refuse_damaged(path)
        # Given a number of ranks, torch deletes the file when the last one closes it, and a rank of a later
        # start might already use it. With -1 torch never deletes the file.
        return dist.FileStore(path, -1)

    # torchrun's agent already serves a store at this address. torch's own `rendezvous` connects all ranks to
    # it as clients.
    if init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: dist.Store = next(rendezvous("env://", info.rank, info.world_size, timeout=timeout))[0]
        return store

    url = urlsplit(init_method)
    host = url.hostname or info.master_addr or ""
    port = url.port or info.master_port or 0
    return dist.TCPStore(host, port, is_master=info.rank == 0, wait_for_workers=False, timeout=timeout)


def _refuse_damaged(path: str) -> None:
    """Raise ConfigError if the file is not a complete FileStore of torch: reading it would never end.

    A FileStore is a sequence of keys and values in turn, each preceded by its length in 4 bytes.
    """
    with suppress(OSError), open(path, "rb") as file:
        # Another rank may be writing the file. torch takes the same lock while it writes.
        fcntl.flock(file, fcntl.LOCK_SH)
        size = os.fstat(file.fileno()).st_size

        at = 0
        parts = 0
        while at < size:
            at = file.seek(at + 4 + int.from_bytes(file.read(4), sys.byteorder))
            parts += 1
        if at != size or parts % 2:
            raise ConfigError(
                f"{path} (init_method) is not a complete FileStore of torch: a rank was killed "
                "while it wrote the file, or another program wrote it.",
                hint="Delete the file, or name one that does not exist.",
            )


def _host(info: RankInfo, deadline: float, stopped: Callable[[], bool]) -> dist.TCPStore:
    """Open the store on rank 0, send its port to the other ranks until all have joined, and return it."""
    began = time.monotonic()
    address, store = _serve(info)
    is_slow = _warn_if_slow(time.monotonic() - began)

    participants = Participants(store, info)
    notice = _Notice()
    with PortServer(address, Handshake(info.launch_id)) as server:
        participants.join()
        while not participants.are_complete() and participants.outcome() is None:
            if stopped():
                participants.decide(STOPPED)
            elif time.monotonic() > deadline:
                participants.decide(participants.missing())
            elif notice.is_due():
                _log.warning("still waiting for missing ranks: %s", participants.missing())

            server.answer(store.port)

        outcome = participants.decide(COMPLETE)
        if outcome != COMPLETE:
            # An error ends this process and with it the store. So let the other ranks read the outcome first.
            # Keep answering meanwhile, so that a rank that joins late reads it too.
            decided = time.monotonic()
            while time.monotonic() < decided + (2 * _POLL_S if participants.have_all_read() else _READ_S):
                server.answer(store.port)

    hint = f"{_LOGS_HINT} {_NAMES_HINT}" if is_slow else _LOGS_HINT
    _require_complete(outcome, hint)
    return store


def _serve(info: RankInfo) -> tuple[Address, dist.TCPStore]:
    """Open the store on the first of rank 0's addresses that this machine has; return address and store."""
    listener = listen_as_rank_zero(info, [0])
    host, port = listener.getsockname()[:2]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )

    return Address(listener.family, host), store


def _warn_if_slow(seconds: float) -> bool:
    """Log a warning if torch took more than `_SLOW_S` to connect to its store; return whether it did.

    torch looks up the host name of the address for its log, which is slow if the name server is down.
    """
    if seconds > _SLOW_S:
        _log.warning("torch took %.0f s to connect to its store. %s", seconds, _NAMES_HINT)

    return seconds > _SLOW_S


def _find_store(info: RankInfo, deadline: float, stopped: Callable[[], bool]) -> dist.TCPStore:
    """Ask at the ports where rank 0 may listen until rank 0 answers; return a connection to its store.

    Ranks other than 0 call it.
    """
    addresses = find_rank_zero(info)
    handshake = Handshake(info.launch_id)
    notice = _Notice()
    pause_s = 0.02
    patience_s = _ANSWER_S[0]
    began = time.monotonic()

    while True:
        ports = handshake.ports
        # Rank 0 publishes its port in a file if all ports of the list were in use. Reading it may be slow, so
        # start only after a few seconds.
        if time.monotonic() - began > _NOTICE_S[0]:
            ports = [*handshake.published(), *ports]

        for address, port in product(addresses, ports):
            if stopped():
                raise _stopped_early()

            store_port = ask_for_port(address, port, handshake, patience_s)
            if store_port is not None:
                asked = time.monotonic()
                store = _connect(address, store_port, deadline)
                _warn_if_slow(time.monotonic() - asked)
                return store

            if time.monotonic() > deadline:
                raise _not_found(info, addresses, handshake.ports)

            if notice.is_due():
                _log.warning("still waiting: rank 0 on %s does not answer.", master_name(info))

        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 1.0)
        patience_s = min(patience_s * 1.5, _ANSWER_S[1])


def _connect(address: Address, port: int, deadline: float) -> dist.TCPStore:
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        return dist.TCPStore(address.text, port, is_master=False, wait_for_workers=False, timeout=left)
    except RuntimeError as error:
        raise RankFailure(
            f"Rank 0 answered on {address.text}, but its store on port {port} does not.",
            hint="Rank 0 died just now (its log shows why), or a firewall between nodes blocks that port.",
        ) from error


def _await_outcome(
    participants: Participants, info: RankInfo, deadline: float, stopped: Callable[[], bool]
) -> str:
    """Wait for the outcome of the rendezvous, and return it; set STOPPED if this rank is asked to stop."""
    # Poll, because Python runs no signal handlers during a blocking wait inside the store.
    pause_s = 0.002
    while (outcome := participants.outcome()) is None:
        if stopped():
            return participants.decide(STOPPED)

        if time.monotonic() > deadline:
            raise SlurmddpError(
                f"Rank {info.rank} found rank 0, but not all {info.world_size} ranks joined in time.",
                hint=_LOGS_HINT,
            )

        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, _POLL_S)

    return outcome


def _not_found(info: RankInfo, addresses: list[Address], ports: list[int]) -> SlurmddpError:
    where = ", ".join(address.text for address in addresses)
    return SlurmddpError(
        f"Rank {info.rank} on {socket.gethostname()} did not find rank 0 of launch {info.launch_id} on "
        f"{master_name(info)!r} ({where}), ports {', '.join(map(str, ports[:4]))} and {len(ports) - 4} more.",
        hint="Rank 0 listens there as soon as it has started: its log says whether it did. If it did, the "
        "nodes don't reach each other by that name: set SLURMDDP_MASTER_ADDR to an address they reach.",
    )
