"""Measure remote tensors on one worker of this host, beside torch.distributed.rpc, Monarch, and local torch.

    python benchmarks/remote_tensors.py [--rounds N] [--output FILE]

- Operation: seconds of one `x + y` on small tensors, from the first to the end of all of them. `enqueue` is
the part until the last line has returned. torch.distributed.rpc adds by one `rpc.remote` each. - Copy:
seconds to bring 64 MB to a worker and back; the median of five. A plain TCP socket between two processes,
which receives into new memory as a copy does, is measured beside it. - Matrices: seconds of products of
matrices and of training steps on one worker, and of the same lines in this process.

A round measures all ways one after the other; ratios are medians of the ratios of the rounds. Monarch is
measured where it is installed (`pip install torchmonarch==0.7.0`).

Limits: 100 us for each enqueued operation; at least 80 % of the socket's bandwidth; 1.1 of the local time. A
missed limit is named, and the exit code is then 1.
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
RPC_OPERATIONS = OPERATIONS // 10
COPY_BYTES = 64 << 20
COPIES = 5
"""Copies of a round. Single copies differ by a factor of two, because the cores are shared."""
ENQUEUE_S = 100e-6
COPY_SHARE = 0.8
MATRIX_RATIO = 1.1
WIDTH = 768
PRODUCTS = 12


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- one operation


def operation_s(workers: remote.workers) -> tuple[float, float]:
    """Return the seconds per operation until all are in the queue, and until all have run."""
    x = remote.ones(8, 8, node=0)
    y = remote.ones(8, 8, node=0)
    workers.synchronize()

    def enqueue() -> None:
        for _ in range(OPERATIONS):
            x + y

    enqueue_s = seconds(enqueue)
    whole_s = enqueue_s + seconds(workers.synchronize)
    return enqueue_s / OPERATIONS, whole_s / OPERATIONS


def add(x, y):
    """Return the sum of two remote values, on their worker."""
    return x.local_value() + y.local_value()


def small_tensor():
    """Return a tensor of the size of an operation."""
    return torch.ones(8, 8)


def rpc_s() -> float:
    """Return the seconds per operation by one remote call each, all of which are under way at once.

    The two processes live for this measurement only: their idle threads poll and take a core.
    """
    method = f"tcp://127.0.0.1:{free_port()}"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pair:
        peer = pair.submit(run_rpc_member, 1, method)
        measured = pair.submit(run_rpc_member, 0, method)
        peer.result()
        return measured.result()


def run_rpc_member(rank: int, method: str) -> float:
    """Run one of the two processes; rank 0 returns the seconds per operation."""
    warnings.filterwarnings("ignore", message="torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    operation_s = 0.0
    if rank == 0:
        operation_s = time_rpc_operations()
    rpc.shutdown()
    return operation_s


def time_rpc_operations() -> float:
    """Return the seconds per operation, as rank 0."""
    x = rpc.remote("worker1", small_tensor)
    y = rpc.remote("worker1", small_tensor)
    x.to_here()

    def run() -> None:
        sums = [rpc.remote("worker1", add, (x, y)) for _ in range(RPC_OPERATIONS)]
        for result in sums:
            result.to_here()

    return seconds(run) / RPC_OPERATIONS


def monarch_mesh():
    """Return a mesh of one process of Monarch; None where it is not installed."""
    if importlib.util.find_spec("monarch") is None:
        return None
    from monarch.actor import this_host

    return this_host().spawn_procs({"gpus": 1})


def monarch_s(mesh) -> float:
    """Return the seconds per operation of Monarch, until all have run."""
    from monarch import fetch_shard

    with mesh.activate():
        x = torch.ones(8, 8)
        y = torch.ones(8, 8)

        def run() -> None:
            for _ in range(OPERATIONS):
                z = x + y
            fetch_shard(z).result()

        return seconds(run) / OPERATIONS


# --- a copy


def copy_s() -> float:
    """Return the seconds of a copy to the worker and back."""
    data = torch.ones(COPY_BYTES // 4)
    return seconds(lambda: data.dist_send(node=0).fetch())


def echo(port: int) -> None:
    """Send back each message as a whole, until the other process closes the socket."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            data = torch.empty(COPY_BYTES, dtype=torch.uint8)
            if not fill(connection, data):
                return
            connection.sendall(memoryview(data.numpy()))


def fill(connection: socket.socket, data: torch.Tensor) -> bool:
    """Receive the bytes of a tensor; return False if the socket was closed."""
    view = memoryview(data.numpy())
    while len(view):
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def socket_s(connection: socket.socket) -> float:
    """Return the seconds of the same bytes over a socket and back."""
    data = torch.ones(COPY_BYTES, dtype=torch.uint8)

    def run() -> None:
        connection.sendall(memoryview(data.numpy()))
        fill(connection, torch.empty(COPY_BYTES, dtype=torch.uint8))

    return seconds(run)


# --- matrices


def matrices_s(node: int | None) -> float:
    """Return the seconds of products and of training steps, on a worker, or locally without `node`."""
    torch.manual_seed(0)
    x = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    if node is not None:
        x = x.dist_send(node=node)
        model = remote.module(model, node)
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


def measure(rounds: int, connection: socket.socket, mesh) -> dict[str, list[float]]:
    """Return the seconds of each way in each round."""
    with remote.workers(1) as workers:
        ways: dict[str, Callable[[], float]] = {
            "enqueue": lambda: operation_s(workers)[0],
            "operation": lambda: operation_s(workers)[1],
            "rpc": rpc_s,
            "copy": lambda: statistics.median(copy_s() for _ in range(COPIES)),
            "socket": lambda: statistics.median(socket_s(connection) for _ in range(COPIES)),
            "matrices": lambda: matrices_s(0),
            "local matrices": lambda: matrices_s(None),
        }
        if mesh is not None:
            ways["monarch"] = lambda: monarch_s(mesh)
        return in_turn(ways, rounds, lambda name: ways[name]())


def verdicts(times: dict[str, list[float]]) -> list[tuple[str, bool]]:
    """Return a line for each limit, and whether it is held."""
    enqueue_s = statistics.median(times["enqueue"])
    share = ratio(times["socket"], times["copy"])
    to_local = ratio(times["matrices"], times["local matrices"])
    return [
        (
            f"{enqueue_s * 1e6:.0f} us per enqueued operation, at most {ENQUEUE_S * 1e6:.0f}",
            enqueue_s <= ENQUEUE_S,
        ),
        (f"{share:.2f} of the socket's bandwidth, at least {COPY_SHARE}", share >= COPY_SHARE),
        (f"{to_local:.2f} of the local time for matrices, at most {MATRIX_RATIO}", to_local <= MATRIX_RATIO),
    ]


def main() -> int:
    """Measure, print medians and limits, and return 1 if a limit is missed."""
    arguments = parser(__doc__, rounds=5).parse_args()
    mesh = monarch_mesh()
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = spawn.Process(target=echo, args=(listener.getsockname()[1],), daemon=True)
        process.start()
        connection, _ = listener.accept()
    with connection:
        times = measure(arguments.rounds, connection, mesh)
    process.join()
    if mesh is not None:
        mesh.stop().get()

    for name, values in times.items():
        print(f"{name:15} {statistics.median(values) * 1e6:12.1f} us")
    lines = verdicts(times)
    for text, _ in lines:
        print(text)
    is_held = all(held for _, held in lines)
    keep(arguments.output, {**as_json(times), "held": is_held})
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
