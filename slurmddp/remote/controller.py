"""Start the workers of a script, or accept the workers of a job, and run collectives between them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmddp.environments import names, slurm
from slurmddp.environments.hostlist import expand
from slurmddp.environments.rank_info import RankInfo
from slurmddp.environments.scrub import scrub
from slurmddp.environments.srun_options import STEP_OPTIONS
from slurmddp.errors import ConfigError, RankFailure
from slurmddp.host import process
from slurmddp.host.address import LOOPBACK, Address, find_rank_zero
from slurmddp.host.cpu_shares import refuse_crowd
from slurmddp.host.network_interface import address_towards
from slurmddp.host.ports import listen
from slurmddp.remote import channel, collective
from slurmddp.remote.connection import Node
from slurmddp.remote.dispatch import common_node, described, exchange

_START_S = 120.0
"""Seconds within which all workers must have imported torch, formed their process group and connected."""
_PROOF_S = 10.0
"""Seconds after which the connection of a caller that has not proved the secret is closed."""
_MOST_STRANGERS = 32
"""Largest number of callers that are served at the same time before they have proved the secret."""
_POLL_S = 0.1
_END_S = 10.0
"""Seconds within which workers must end before they are killed."""

Tensors = torch.Tensor | Sequence[torch.Tensor]


class Workers:
    """The worker processes, on which tensors are stored and operations run; a context manager.

    Args:
        count: the number of workers to start. Under `slurmddp controller` it has no effect: the job's ranks
            are the workers.

    Raises:
        ConfigError: other workers are open, or `count` is missing or too large.
        RankFailure: a worker did not start.

    Example:
        with remote.workers(4) as w:
            parts = [torch.randn(8).dist_send(node=n) for n in range(4)]
            w.all_reduce(parts)
            print(parts[0].fetch())
    """

    current: Workers | None = None

    def __init__(self, count: int | None = None) -> None:
        # `slurmddp controller` sets the variable: the descriptor of the listener, and the number of ranks.
        listener, _, ranks = os.environ.get(names.CONTROLLER_VARIABLE, "").partition(":")
        self._count = int(ranks or count or 0)
        if self._count < 1:
            raise ConfigError(
                f"workers({'' if count is None else count}) needs a number of workers, 1 or more.",
                hint="Use workers(4), or start the script by `slurmddp controller -n 4`.",
            )

        if Workers.current is not None:
            raise ConfigError(
                "Other workers are still open in this process.",
                hint="Close them first by remote.workers.current.close().",
            )

        self.nodes: dict[int, Node] = {}
        self._callers = threading.BoundedSemaphore(self._count + _MOST_STRANGERS)
        self._process: subprocess.Popen[bytes] | None = None
        if listener:
            # Duplicate the descriptor: this one is closed, and later workers of the script use the inherited
            # one.
            self._listener = socket.socket(fileno=os.dup(int(listener)))
            self._secret = os.environ[names.SECRET_VARIABLE]
        else:
            self._secret = secrets.token_hex(32)
            self._start()

        Workers.current = self

        try:
            self._await_all()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start the workers on this machine, or by srun on the nodes of this process's allocation."""
        in_allocation = slurm.in_allocation(os.environ) and not slurm.in_step(os.environ)
        if not in_allocation:
            refuse_crowd(self._count, process.usable_cpus(), "workers({})", "this machine")

        self._listener = listen(_address_towards_nodes() if in_allocation else LOOPBACK, [0])
        address, port = self._listener.getsockname()[:2]
        command = [
            *(sys.executable, "-m", "slurmddp.remote.job"),
            *("--connect", address, str(port), str(self._count)),
        ]
        # Give the workers this script's import path, because remote.call names modules that the script can
        # import.
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths}

        if in_allocation:
            # Don't let srun end the other workers if one has died.
            options = [f"--ntasks={self._count}", "--kill-on-bad-exit=0", "--unbuffered"]
            command = ["srun", *STEP_OPTIONS, *options, *command]
        else:
            launch = {names.LAUNCHER_VARIABLE: "local", names.LAUNCH_ID_VARIABLE: secrets.token_hex(8)}
            environment = scrub(environment) | launch
        environment[names.SECRET_VARIABLE] = self._secret

        # Start a new session without a terminal, so that Ctrl-C reaches only the controller.
        self._process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
        )

    def _await_all(self) -> None:
        """Accept connections until all workers are connected and authenticated.

        Raises:
            RankFailure: a worker did not start.
        """
        deadline = time.monotonic() + _START_S
        self._listener.settimeout(_POLL_S)
        while len(self.nodes) < self._count:
            self._refuse_missing(deadline)
            # Limit the threads: further connections wait in the listener's queue.
            if not self._callers.acquire(timeout=_POLL_S):
                continue

            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                self._callers.release()
                continue

            threading.Thread(target=self._admit, args=(end,), daemon=True).start()

        self.nodes = dict(sorted(self.nodes.items()))
        self._listener.close()

    def _refuse_missing(self, deadline: float) -> None:
        """Raise RankFailure if workers are missing and their starter has ended, or the time is over."""
        has_ended = self._process is not None and self._process.poll() is not None
        if not has_ended and time.monotonic() <= deadline:
            return

        missing = sorted(set(range(self._count)) - set(self.nodes))
        if missing:
            raise RankFailure(
                f"Worker(s) {', '.join(map(str, missing))} of {self._count} did not start.",
                hint="See their last output above, or in the logs of their ranks.",
            )

    def _admit(self, end: socket.socket) -> None:
        """Authenticate a connection and add its worker to `nodes`; drop the connection if that fails."""
        # Use a timer, because a time-out of the socket would begin again with each byte.
        limit = threading.Timer(_PROOF_S, partial(_shut_down, end))
        limit.start()
        try:
            admitted, facts = channel.meet(end, self._secret, "controller")
            self.nodes[facts[0]] = Node(admitted, facts, described)
        except ConnectionError:
            # The caller was another program, or a worker that has died. The connection is closed.
            pass
        finally:
            limit.cancel()
            self._callers.release()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self.synchronize()
        finally:
            self.close()

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Let the workers end after their queued commands; kill those that don't end within 10 seconds."""
        Workers.current = None
        self._listener.close()
        for node in self.nodes.values():
            node.close()

        if self._process is None:
            return

        # Don't wait if no worker has connected: only connected workers have received the command to end.
        deadline = time.monotonic() + (_END_S if self.nodes else 0)
        leader = self._process.pid
        while time.monotonic() < deadline and (self._process.poll() is None or process.exists(-leader)):
            time.sleep(0.01)

        process.signal_group(leader, signal.SIGKILL)
        self._process.wait()

    def node(self, number: int) -> Node:
        """Return worker `number`; raise ConfigError if there is no worker with this number."""
        if isinstance(number, int) and number in self.nodes:
            return self.nodes[number]

        raise ConfigError(
            f"There is no node {number!r}.", hint=f"The workers are node 0 to node {self._count - 1}."
        )

    def synchronize(self) -> None:
        """Wait until all workers have run all commands that were queued.

        Workers for which a WorkerLostError was raised before are skipped.

        Raises:
            RemoteError: a command has failed on a worker; the first error is raised.
            WorkerLostError: a worker is gone.
        """
        for node in self.nodes.values():
            if not node.loss_reported:
                node.ask("count")

    def live_objects(self, node: int) -> int:
        """Wait for worker `node`, and return the number of tensors and other objects that it stores."""
        count: int = self.node(node).ask("count")
        return count

    # --- methods for collectives, given a tensor or a list of tensors for each worker that takes part

    def all_reduce(self, tensors: Sequence[Tensors], op: str = "sum") -> None:
        """Reduce tensors of different workers in place, without waiting.

        Args:
            tensors: for each worker that takes part, a tensor or a list of tensors of one dtype. The shapes
                must be the same on all workers.
            op: sum, mean, min, max or product. The mean divides before it adds, as DDP does.
        """
        _collective("reduce", tensors, op)

    def average_gradients(self, replicas: Sequence[torch.nn.Module]) -> None:
        """Average the gradients of copies of a model on different workers, without waiting.

        All gradients of a copy are exchanged as one tensor.
        """
        gradients = [
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            for model in replicas
        ]
        self.all_reduce(gradients, "mean")

    def reduce(self, tensors: Sequence[Tensors], node: int, op: str = "sum") -> None:
        """Reduce the tensors of workers into the tensors of `node`, without waiting; see `all_reduce`."""
        _collective("reduce", tensors, op, node)

    def broadcast(self, tensors: Sequence[Tensors], node: int) -> None:
        """Copy the tensors of worker `node` into the tensors of the other workers, without waiting."""
        _collective("broadcast", tensors, node=node)

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Copy the tensor of each worker to all workers, without waiting.

        Args:
            tensors: a tensor of each worker that takes part, with the same shape and dtype on all workers.

        Returns:
            A list for each worker, in the order of the numbers: the copies of all tensors on this worker.
        """
        parts = _parts_of(tensors)
        gathered: list[list[torch.Tensor]] = [[tensor.clone() for _ in parts] for (tensor,) in parts]
        _collective("all_gather", gathered)

        return gathered


def _shut_down(end: socket.socket) -> None:
    """Shut a connection down, so that a thread that reads from it gets an error."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _collective(kind: str, given: Sequence[Tensors], op: str | None = None, node: int | None = None) -> None:
    """Check the arguments of a collective, and queue it on the workers; they are as for `collective.run`.

    Raises:
        ConfigError: the tensors don't fit together, or there is no such reduction or node.
    """
    parts = _parts_of(given)
    nodes = [part[0].get_node() for part in parts]
    reductions = collective.REDUCTIONS
    if op not in (None, *reductions):
        raise ConfigError(f"There is no reduction {op!r}.", hint=f"Use one of {', '.join(reductions)}.")

    if node not in (None, *nodes):
        raise ConfigError(
            f"node={node} holds none of the tensors; they are on nodes {nodes}.",
            hint="Name one of these nodes.",
        )

    if len(parts) > 1:
        exchange(kind, parts, op, node)

    # Mark the tensors as changed, so that autograd refuses a backward pass that needs their former values.
    torch.autograd.graph.increment_version([tensor.detach() for part in parts for tensor in part])


def _parts_of(given: Sequence[Tensors]) -> list[list[Any]]:
    """Return a list of tensors for each worker, in the order of the workers' numbers.

    Raises:
        ConfigError: the workers' tensors differ in shapes or dtypes, or a worker has no tensors.
    """
    parts: list[list[Any]] = []
    for tensors in given:
        parts.append([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))

    if not parts or not all(parts):
        raise ConfigError(
            f"A collective got no tensors from {sum(not part for part in parts)} of {len(parts)} workers.",
            hint="Give one tensor or list of tensors per worker; gradients exist only after backward().",
        )

    parts.sort(key=lambda part: common_node("A collective", part).number)
    kinds = [[(tuple(tensor.shape), tensor.dtype) for tensor in part] for part in parts]
    nodes = [part[0].get_node() for part in parts]
    if len(set(nodes)) < len(nodes) or any(kind != kinds[0] for kind in kinds):
        raise ConfigError(
            f"A collective got tensors of nodes {nodes} with shapes and dtypes {kinds}.",
            hint="Give one tensor or list of tensors per worker, with the same shapes and dtypes on all.",
        )

    return parts


def _address_towards_nodes() -> Address:
    """Return the address from which this machine reaches the nodes of the allocation."""
    first_node = expand(os.environ["SLURM_JOB_NODELIST"])[0]
    target = find_rank_zero(RankInfo(environment="slurm", nodes=2, hosts=(first_node, first_node)))[0]
    return Address(target.family, address_towards(target.text))
