"""Let ranks, each in a thread, meet at a rendezvous, and let other programs listen on their ports."""

import contextlib
import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import SlurmddpError
from slurmddp.training.process_group.rendezvous import open_store

WHO = threading.local()
"""Data of each thread: `WHO.rank` is the rank that the thread plays."""


def rank(number, world_size=2, launch_id="1.0.0", **changes):
    place = RankInfo(
        environment="slurm",
        rank=number,
        local_rank=number,
        world_size=world_size,
        local_world_size=world_size,
        launch_id=launch_id,
    )
    return dataclasses.replace(place, **changes)


def on_two_nodes(number, launch_id, **changes):
    """Return the description of one of four ranks on two emulated nodes."""
    place = rank(number, 4, launch_id, nodes=2, hosts=("n1", "n2"), local_world_size=2, emulated=True)
    return dataclasses.replace(place, **{"node_rank": number // 2, "local_rank": number % 2} | changes)


def meet(infos, timeout_s=120.0):
    """Let all these ranks meet at the same time; return for each rank its store, or its error."""

    def outcome(info):
        WHO.rank = info.rank
        try:
            return open_store(info, timeout_s)
        except SlurmddpError as error:
            return error

    with ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(outcome, infos))


@contextlib.contextmanager
def listener(port, answer=None):
    """Listen on `port` as another program, which answers every caller with `answer`, or never answers."""
    with socket.create_server(("127.0.0.1", port)) as server:
        stopped = threading.Event()
        server.settimeout(0.05)

        def serve():
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    caller, _ = server.accept()
                    with caller:
                        caller.sendall(answer)
                        caller.recv(1000)

        thread = threading.Thread(target=serve if answer is not None else stopped.wait)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def talk(port, request):
    """Send a request to the port server on `port`, once it listens; return its answer."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.01)
            continue

        with connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            try:
                return connection.recv(1000)
            except ConnectionResetError:
                return b""
