"""A transport over plain TCP sockets: slurmddp train backend=sockets.Sockets"""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import distributed


class Sockets:
    """A connection to each other rank. A thread per connection sends, so that two ranks may send at once."""

    def __init__(self, store: distributed.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self.peers: dict[int, socket.socket] = {}

        listener = socket.create_server((socket.gethostname(), 0))
        listener.settimeout(timeout.total_seconds())
        store.set(f"address-{rank}", f"{socket.gethostname()} {listener.getsockname()[1]}")

        # Each rank connects to all lower ranks, and sends its number first.
        for other in range(rank):
            host, port = store.get(f"address-{other}").decode().split()
            self.peers[other] = socket.create_connection((host, int(port)), timeout.total_seconds())
            self.peers[other].sendall(rank.to_bytes(4, "big"))

        for _ in range(rank + 1, world_size):
            peer, _ = listener.accept()
            peer.settimeout(timeout.total_seconds())
            other = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")
            self.peers[other] = peer

        listener.close()
        self.senders = {other: ThreadPoolExecutor(1) for other in self.peers}

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], object]:
        return self.senders[to].submit(self.peers[to].sendall, _bytes(tensor)).result

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        left = _bytes(tensor)
        while len(left):
            count = self.peers[source].recv_into(left)
            if count == 0:
                raise ConnectionError(f"rank {source} has closed its connection")
            left = left[count:]

    def close(self) -> None:
        for other, peer in self.peers.items():
            self.senders[other].shutdown()
            peer.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor of any dtype."""
    return memoryview(tensor.view(torch.uint8).numpy())
