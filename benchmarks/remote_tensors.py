"""Measure remote tensors on one worker of this host, beside torch.distributed.rpc, Monarch, and local torch.

    python benchmarks/remote_tensors.py [--rounds N] [--output FILE]

- Operation: seconds per `x + y` on small tensors, from the first to the end of all of them. `enqueue` is the
  part until the last line has returned. torch.distributed.rpc runs the same by one `rpc.remote` each.
- Copy: seconds to bring 64 MB to a worker and back, beside a plain TCP socket between two processes, which
  receives into new memory as a copy does; the median of five.
- Matrices: seconds of products of matrices and of training steps on one worker, beside the same lines here.

A round measures all ways one after the other; ratios are medians of the ratios of the rounds. Monarch is
measured where it is installed (`pip install torchmonarch==0.7.0`).

Promised: at most 100 us per enqueued operation; at least 80 % of the socket's bandwidth; at most 1.1 of the
local time. A missed limit is named, and the exit code is then 1.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from record import as_json, free_port, in_turn, keep, parser, ratio
from torch.distributed import rpc

from slurmddp import remote

OPERATIONS = 2000
COPY_BYTES, COPIES = 64 << 20, 5
"""Bytes of a copy, and copies of a round: single ones differ by a factor of two, as the cores are shared."""
ENQUEUE_S, COPY_SHARE, MATRIX_RATIO = 100e-6, 0.8, 1.1
WIDTH, PRODUCTS = 768, 12


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- one operation


def of_remote(w: remote.workers) -> tuple[float, float]:
    """Return the seconds per operation until all are in the queue, and until all have run."""
    x, y = remote.ones(8, 8, node=0), remote.ones(8, 8, node=0)
    w.synchronize()

    def enqueue() -> None:
        for _ in range(OPERATIONS):
            x + y

    queued = seconds(enqueue)
    return queued / OPERATIONS, (queued + seconds(w.synchronize)) / OPERATIONS


def add(x, y):
    return x.local_value() + y.local_value()


def one():
    return torch.ones(8, 8)


def of_rpc() -> float:
    """Return the seconds per operation by one remote call each, all in flight at once.

    The two processes live for this measurement only: their idle threads poll, and take a core.
    """
    method = f"tcp://127.0.0.1:{free_port()}"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pair:
        peer, taken = (pair.submit(rpc_member, rank, method) for rank in (1, 0))
        peer.result()
        return taken.result()


def rpc_member(rank: int, method: str) -> float:
    """Be one of the two processes; the first of them measures."""
    warnings.filterwarnings("ignore", message="torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    taken = rpc_operations() if rank == 0 else 0.0
    rpc.shutdown()
    return taken


def rpc_operations() -> float:
    x, y = rpc.remote("worker1", one), rpc.remote("worker1", one)
    x.to_here()

    def run() -> None:
        for done in [rpc.remote("worker1", add, (x, y)) for _ in range(OPERATIONS // 10)]:
            done.to_here()

    return seconds(run) / (OPERATIONS // 10)


def monarch_mesh():
    """Return a mesh of one process of Monarch; None where it is not installed."""
    if importlib.util.find_spec("monarch") is None:
        return None
    from monarch.actor import this_host

    return this_host().spawn_procs({"gpus": 1})


def of_monarch(mesh) -> float:
    from monarch import fetch_shard

    with mesh.activate():
        x, y = torch.ones(8, 8), torch.ones(8, 8)

        def run() -> None:
            for _ in range(OPERATIONS):
                z = x + y
            fetch_shard(z).result()

        return seconds(run) / OPERATIONS


# --- a copy


def there_and_back() -> float:
    data = torch.ones(COPY_BYTES // 4)
    return seconds(lambda: data.dist_send(node=0).fetch())


def echo(port: int) -> None:
    """Send back what comes, each message whole."""
    with socket.create_connection(("127.0.0.1", port)) as end:
        while True:
            data = torch.empty(COPY_BYTES, dtype=torch.uint8)
            if not fill(end, data):
                return
            end.sendall(memoryview(data.numpy()))


def fill(end: socket.socket, data: torch.Tensor) -> bool:
    view = memoryview(data.numpy())
    while len(view):
        count = end.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def over_socket(end: socket.socket) -> float:
    data = torch.ones(COPY_BYTES, dtype=torch.uint8)

    def run() -> None:
        end.sendall(memoryview(data.numpy()))
        fill(end, torch.empty(COPY_BYTES, dtype=torch.uint8))

    return seconds(run)


# --- matrices


def matrices(node: int | None) -> float:
    """Return the seconds of products and of training steps, locally or on a worker."""
    torch.manual_seed(0)
    x = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    if node is not None:
        x, model = x.dist_send(node=node), remote.module(model, node)
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        y = x
        for _ in range(PRODUCTS):
            y = torch.tanh(y @ x)
            optimizer.zero_grad()
            model(y).square().mean().backward()
            optimizer.step()
        y.sum().item()

    run()
    return seconds(run)


def measure(rounds: int, peer: socket.socket, mesh) -> dict[str, list[float]]:
    """Return the seconds of each way in each round."""
    with remote.workers(1) as w:
        ways: dict[str, Callable[[], float]] = {
            "enqueue": lambda: of_remote(w)[0],
            "operation": lambda: of_remote(w)[1],
            "rpc": of_rpc,
            "copy": lambda: statistics.median(there_and_back() for _ in range(COPIES)),
            "socket": lambda: statistics.median(over_socket(peer) for _ in range(COPIES)),
            "matrices": lambda: matrices(0),
            "local matrices": lambda: matrices(None),
        }
        if mesh is not None:
            ways["monarch"] = lambda: of_monarch(mesh)
        return in_turn(ways, rounds, lambda name: ways[name]())


def main() -> int:
    options = parser(__doc__, rounds=5).parse_args()
    mesh, spawn = monarch_mesh(), multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        echoing = spawn.Process(target=echo, args=(listener.getsockname()[1],), daemon=True)
        echoing.start()
        peer, _ = listener.accept()
    with peer:
        times = measure(options.rounds, peer, mesh)
    echoing.join()
    if mesh is not None:
        mesh.stop().get()
    for name, values in times.items():
        print(f"{name:15} {statistics.median(values) * 1e6:12.1f} us")
    found = verdicts(times)
    for text, _ in found:
        print(text)
    keep(options.output, {**as_json(times), "held": all(held for _, held in found)})
    return 0 if all(held for _, held in found) else 1


def verdicts(times: dict[str, list[float]]) -> list[tuple[str, bool]]:
    """Return a line for each promise, and whether it holds."""
    queued = statistics.median(times["enqueue"])
    share, slower = ratio(times["socket"], times["copy"]), ratio(times["matrices"], times["local matrices"])
    return [
        (
            f"{queued * 1e6:.0f} us per enqueued operation, promised {ENQUEUE_S * 1e6:.0f}",
            queued <= ENQUEUE_S,
        ),
        (f"{share:.2f} of the socket's bandwidth, promised {COPY_SHARE}", share >= COPY_SHARE),
        (f"{slower:.2f} of the local time for matrices, promised {MATRIX_RATIO}", slower <= MATRIX_RATIO),
    ]


if __name__ == "__main__":
    sys.exit(main())
