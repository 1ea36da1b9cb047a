"""Train with a parameter server on rank 0, synchronous or with bounded staleness."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from slurmddp.checkpoint.state.optimizers import load_optimizer
from slurmddp.collectives.link import CountedLink, GroupLink
from slurmddp.collectives.values import from_zero
from slurmddp.errors import ConfigError, RankFailure
from slurmddp.strategies.gradient_server import LEFT, GradientServer, MessageFormat, Values
from slurmddp.strategies.replicas import Replicas, broadcast_from_rank_zero, collective_timeout

log = logging.getLogger(__name__)

_IDLE = timedelta(days=365)
"""Time-out of the server for the next step of a rank: in effect none.

Ranks that wait for slower ranks have a time-out of their own.
"""
_MARGIN = timedelta(seconds=10)
"""Seconds by which a rank waits longer than the server, so that the server's error reaches it in time."""


class ParameterServer(Replicas):
    """Strategy in which ranks send gradients to a server on rank 0, and get the updated weights back.

    Rank 0 trains as well. All ranks call `state_dict` at the same point of the training. It waits until the
    server has applied all steps. Then all ranks have the weights, buffers and optimizer state of rank 0.

    Args:
        staleness: most steps by which a rank may be ahead of the slowest rank. 0: the server takes each step
            on the mean of the gradients of all ranks. Above 0: it takes a step on each gradient as it
            arrives, with the learning rate divided by the number of ranks.

    Raises:
        ConfigError: `staleness` is below 0.

    Source:
        Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014.
        Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013.

    Example:
        server = ParameterServer(staleness=2)
        d = Distributon(4, strategy=server)
        ...
        print(server.counts())  # {"messages": 300, "bytes": 1203600, "staleness": [220, 120, 60]}
    """

    def __init__(self, *, staleness: int = 0) -> None:
        if staleness < 0:
            raise ConfigError(f"strategy.staleness is {staleness}.", hint="Give 0 (synchronous) or more.")

        self._staleness = staleness
        self.averages_gradients = staleness == 0
        self._models: list[nn.Module] = []
        self._served: list[ServedOptimizer] = []
        self._final_counts: dict[str, Any] = {}
        """The result of `counts` at the end of the training; empty before."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._models.append(super().wrap(model, device))
        return model

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        """Return an optimizer whose `step` lets the server on rank 0 step rank 0's `optimizer`.

        Without a process group, return `optimizer`.

        Raises:
            ConfigError: the server can't step the optimizer.
        """
        if not distributed.is_initialized():
            return optimizer
        self._served.append(ServedOptimizer(optimizer, self._staleness))
        return self._served[-1]

    def counts(self) -> dict[str, Any]:
        """Return counts of this rank's messages, and on rank 0 of the staleness of gradients.

        Returns:
            `messages` and `bytes`: the number of messages that this rank has sent, and their bytes.
            `staleness`: a list with the number of gradients of staleness 0, 1, 2, ...; empty on other ranks.
        """
        if self._final_counts:
            return self._final_counts

        links = [link for served in self._served for link in served.links]
        staleness = sum((served.staleness for served in self._served), Counter[int]())
        return {
            "messages": sum(link.messages for link in links),
            "bytes": sum(link.bytes for link in links),
            "staleness": _as_list(staleness),
        }

    def state_dict(self) -> dict[str, Any]:
        """Give all ranks the server's weights and optimizer state, and return the counts of staleness.

        All ranks must call it, between two steps.
        """
        if not self._served:
            return {}

        # Wait for all ranks: the server has then applied the last step of each rank.
        distributed.barrier()
        for served in self._served:
            served.settle()
        for model in self._models:
            broadcast_from_rank_zero(model)
        for served in self._served:
            served.share_state()

        return {"staleness": [_as_list(served.staleness) for served in self._served]}

    def reset(self) -> None:
        """Clear the counts of staleness.

        The server has no weights to reset: each load calls `state_dict` first, which closes the server.
        """
        for served in self._served:
            served.staleness.clear()

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the counts of a result of `state_dict`; return False if another strategy has saved it."""
        if "staleness" not in state:
            return False
        for served, counts in zip(self._served, state["staleness"], strict=False):
            served.staleness.update(dict(enumerate(counts)))
        return True

    def close(self) -> None:
        """Report to the server that this rank takes no further step; on rank 0, wait for all ranks' reports.

        All ranks call it at an orderly end. Rank 0 logs the counts of staleness.
        """
        for served in self._served:
            served.leave()

        self._final_counts = self.counts()
        staleness = self._final_counts["staleness"]
        if staleness:
            log.info(
                "parameter server: number of gradients with staleness 0, 1, 2, ...: %s (bound: %d)",
                staleness,
                self._staleness,
            )
        self._served.clear()


class ServedOptimizer(Optimizer):
    """Optimizer of a rank whose step sends gradients to the server, and replaces the weights by the server's.

    If a program or a scheduler changes settings on rank 0, the server uses them from the next step on. The
    other ranks have the state of the optimizer only after `share_state`.

    Args:
        optimizer: the optimizer of this rank's parameters. On rank 0 the server steps it from now on.
        staleness: as for `ParameterServer`.

    Raises:
        ConfigError: the server can't step the optimizer.
    """

    def __init__(self, optimizer: Optimizer, staleness: int) -> None:
        _check(optimizer, staleness)
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        self.state.update(optimizer.state)
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._format = MessageFormat(self._parameters)
        self.staleness = Counter[int]()
        self._server: GradientServer | None = None
        self._threads: list[threading.Thread] = []

        timeout = collective_timeout()
        self._timeout_s = timeout.total_seconds()
        rank = distributed.get_rank()
        # Use a separate group, because the program's collectives may run at the same time as the server's
        # messages.
        group = distributed.new_group(backend="gloo", timeout=_IDLE if rank == 0 else timeout + _MARGIN)
        if rank != 0:
            self.links = [CountedLink(GroupLink(group))]
            return

        ranks = distributed.get_world_size()
        self._server = GradientServer(optimizer, self, ranks, staleness, self._timeout_s)
        self.staleness = self._server.staleness
        self.links = [CountedLink(GroupLink(group)) for _ in range(1, ranks)]
        for other, link in enumerate(self.links, 1):
            self._threads.append(_start_thread(self._server.serve, other, link))

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Send the gradients to the server, and replace the weights by the server's.

        It waits until the slowest rank is at most `staleness` steps behind this rank.

        Raises:
            ConfigError: a closure was given, or a gradient is sparse.
            RankFailure: a rank has left or took no step within the time-out, or the server has failed.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        has_sparse = any(gradient is not None and gradient.is_sparse for gradient in gradients)
        if closure is not None or has_sparse:
            raise ConfigError(
                "strategy=parameter_server can't send sparse gradients, and can't call a closure.",
                hint="Use dense gradients and optimizer.step() without arguments, or strategy=ddp.",
            )

        weights = self._format.unpack(self._exchange(gradients))
        with torch.no_grad():
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.copy_(weight)

    def _exchange(self, gradients: Values) -> torch.Tensor:
        """Send gradients to the server, and return its answer: a message with weights.

        Raises:
            RankFailure: the server or another rank has failed.
        """
        if self._server is not None:
            self._server.open()
            return self._server.exchange(0, gradients)

        (link,) = self.links
        answer = self._format.empty()
        try:
            link.send(self._format.pack(gradients), 0)()
            link.recv(answer, 0)
        except RuntimeError as error:
            raise RankFailure(
                f"Rank 0, which hosts the parameter server, has left: {error}",
                hint="The log of rank 0 shows why.",
            ) from error

        word = self._format.word(answer)
        if word:
            raise RankFailure(
                f"The parameter server has stopped, because of rank {word - 1}.",
                hint="The log of that rank shows why.",
            )

        return answer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group of parameters that is added after `setup_optimizer`, with a ConfigError."""
        # torch's constructor adds the first groups by this method too, before `_format` is set. Accept those.
        if hasattr(self, "_format"):
            raise ConfigError(
                "A group of parameters was added after setup_optimizer, so the server does not know it.",
                hint="Add all groups before d.setup_optimizer(optimizer).",
            )

        super().add_param_group(param_group)

    def settle(self) -> None:
        """Copy the weights and the state of the server to rank 0's optimizer; do nothing on other ranks."""
        if self._server is not None:
            self._server.close()

    def share_state(self) -> None:
        """Load the state of rank 0's optimizer on all other ranks; all ranks must call it."""
        state = from_zero(self.state_dict() if self._server is not None else None)
        if self._server is None and state is not None:
            load_optimizer(self, state)

    def leave(self) -> None:
        """Report to the server that this rank takes no further step; on rank 0, wait for all reports."""
        if self._server is None:
            self.links[0].send(self._format.pack([None] * len(self._parameters), LEFT), 0)()
            return

        self._server.leave(0)
        for thread in self._threads:
            thread.join(self._timeout_s)


def _check(optimizer: Optimizer, staleness: int) -> None:
    """Raise ConfigError if the server can't step `optimizer` with this staleness."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"strategy=parameter_server can't step a {kind}.",
            hint="Give a subclass of torch.optim.Optimizer.",
        )

    if staleness and not all("lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"strategy.staleness={staleness} divides learning rates by the number of ranks, but this {kind} "
            "has none.",
            hint="Use strategy.staleness=0, or an optimizer with a learning rate (lr).",
        )

    if staleness and isinstance(optimizer, torch.optim.Rprop):
        raise ConfigError(
            f"strategy.staleness={staleness} divides learning rates by the number of ranks, but the lr of "
            "Rprop is the size of its first step only: N gradients would move the weights N times as far.",
            hint="Use strategy.staleness=0, or an optimizer whose steps are proportional to lr.",
        )


def _start_thread(serve: Callable[..., None], rank: int, link: CountedLink) -> threading.Thread:
    name = f"slurmddp-server-of-rank-{rank}"
    thread = threading.Thread(target=serve, args=(rank, link), name=name, daemon=True)
    thread.start()

    return thread


def _as_list(counts: Counter[int]) -> list[int]:
    """Return a list whose element i is the number of gradients of staleness i."""
    return [counts[missed] for missed in range(max(counts, default=-1) + 1)]
