"""Serve strategy `parameter_server`: apply the gradients of all ranks to one set of weights.

A rank's clock is the number of steps that it has taken. A rank's step c ends when every rank has taken at
least c - staleness steps.

Source:
    Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slurmddp.collectives.link import Link
from slurmddp.errors import RankFailure

Values = Sequence[torch.Tensor | None]
"""A value for each parameter, in the order of the optimizer; None: the parameter has no gradient."""

LEFT = -1
"""Status word of the last message that a rank sends: the rank takes no further step."""
_WORD_BYTES = 8


class MessageFormat:
    """Layout of the messages between a rank and the server, as tensors of bytes.

    A message contains a value for each parameter, then a byte for each parameter (1 if it has a value, else
    0), and a status word: a signed integer of 64 bits.

    Args:
        like: the parameters. The values have their shapes and dtypes.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        # The dtypes with the largest elements come first, so that each value starts at a multiple of its
        # element size.
        order = sorted(range(len(like)), key=lambda number: -like[number].element_size())
        self._like = like
        self._spans = [(0, 0)] * len(like)

        begin = 0
        for number in order:
            end = begin + like[number].numel() * like[number].element_size()
            self._spans[number] = (begin, end)
            begin = end

        self._values_bytes = begin
        self.bytes = begin + len(like) + _WORD_BYTES

    def empty(self) -> torch.Tensor:
        """Return an uninitialized message, to receive into."""
        return torch.empty(self.bytes, dtype=torch.uint8)

    def pack(self, values: Values, word: int = 0) -> torch.Tensor:
        """Return a message with the given values and status word."""
        message = self.empty()
        for view, value in zip(self._views(message), values, strict=True):
            if value is not None:
                view.copy_(value.detach())

        present = [value is not None for value in values]
        message[self._values_bytes : -_WORD_BYTES] = torch.tensor(present, dtype=torch.uint8)
        message[-_WORD_BYTES:] = torch.tensor([word]).view(torch.uint8)

        return message

    def unpack(self, message: torch.Tensor) -> Values:
        """Return the values of a message, as views of the message; None for a parameter without a value."""
        present = message[self._values_bytes : -_WORD_BYTES].tolist()
        return [
            view if has_value else None for view, has_value in zip(self._views(message), present, strict=True)
        ]

    def word(self, message: torch.Tensor) -> int:
        """Return the status word of a message."""
        return int(message[-_WORD_BYTES:].clone().view(torch.int64))

    def _views(self, message: torch.Tensor) -> list[torch.Tensor]:
        return [
            message[begin:end].view(like.dtype).view(like.shape)
            for like, (begin, end) in zip(self._like, self._spans, strict=True)
        ]


class GradientServer:
    """Server in the process of rank 0 that owns the weights, and steps the optimizer for all ranks.

    With `staleness` 0 it waits for the gradients of all ranks, and takes one step on their mean. Otherwise it
    takes a step on each gradient on arrival, with the learning rate divided by the number of ranks.

    Args:
        optimizer: the optimizer that steps the weights of the server from now on.
        given: the optimizer that rank 0's program steps, with rank 0's parameters and current settings.
        ranks: number of ranks.
        staleness: most steps by which a rank may be ahead of the slowest rank.
        timeout_s: the longest wait for steps of other ranks, in seconds.
    """

    def __init__(
        self, optimizer: Optimizer, given: Optimizer, ranks: int, staleness: int, timeout_s: float
    ) -> None:
        self._optimizer = optimizer
        self._given = given
        self._ranks = ranks
        self._staleness_bound = staleness
        self._timeout_s = timeout_s

        parameters = [parameter for group in given.param_groups for parameter in group["params"]]
        self._weights = {
            parameter: nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            for parameter in parameters
        }
        """The server's copy of each weight, by the parameter of rank 0's program from which it was copied."""
        self.format = MessageFormat(parameters)
        self.staleness = Counter[int]()
        """By staleness, the number of applied gradients. The staleness is the clock of the gradient's rank
        minus the clock that the slowest rank had when the gradient's rank got its weights."""
        self._changed = threading.Condition()
        """Condition for the attributes below; notified when clocks, gradients or the server change."""
        self._is_open = False
        self._clocks = dict.fromkeys(range(ranks), 0)
        """The steps of each rank that has not left."""
        self._weight_clocks = [0] * ranks
        """For each rank, the clock of the slowest rank when the rank got its weights."""
        self._waiting: dict[int, Values] = {}
        """By rank, gradients of the current clock that wait for the gradients of other ranks."""
        self._answer: torch.Tensor | None = None
        """The packed message with the current weights, for all ranks; None after the weights have changed."""
        self._failed: tuple[int, str] | None = None
        """The first rank that failed, and its error; None if no rank has failed."""

    # Methods that rank 0's program calls.

    def open(self) -> None:
        """Copy rank 0's weights, optimizer state and settings to the server, unless it is open already."""
        with self._changed, torch.no_grad():
            if self._is_open:
                return

            for given, weight in self._weights.items():
                weight.copy_(given)

            self._optimizer.state.clear()
            for key, state in self._given.state.items():
                self._optimizer.state[self._weights.get(key, key)] = state

            self._optimizer.param_groups = [
                {**group, "params": [self._weights[parameter] for parameter in group["params"]]}
                for group in self._given.param_groups
            ]
            self._settings = [dict(group) for group in self._given.param_groups]

            self._clocks = dict.fromkeys(range(self._ranks), 0)
            self._weight_clocks = [0] * self._ranks
            self._answer = None
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Copy the server's weights, optimizer state and settings to rank 0; steps wait for the next `open`.

        Call it only while no rank is in a step.
        """
        with self._changed, torch.no_grad():
            if not self._is_open:
                return

            self._is_open = False
            self._take_settings()
            parameters: dict[Any, Any] = {weight: given for given, weight in self._weights.items()}
            for weight, given in parameters.items():
                given.copy_(weight)

            self._given.state.clear()
            for key, state in self._optimizer.state.items():
                self._given.state[parameters.get(key, key)] = state

            groups = zip(self._given.param_groups, self._optimizer.param_groups, strict=True)
            for given_group, group in groups:
                given_group.update({name: value for name, value in group.items() if name != "params"})

    # For each other rank, a thread in this process runs `serve`.

    def serve(self, rank: int, link: Link) -> None:
        """Receive gradients of a rank and send weights back, step by step, until the rank leaves or fails."""
        message = self.format.empty()
        while True:
            try:
                link.recv(message, rank)
            except Exception as error:
                # Catch errors of all classes, because the transport of a link may raise any error.
                self._fail(rank, f"Rank {rank} has left the training: {error}")
                return

            if self.format.word(message) == LEFT:
                self.leave(rank)
                return

            try:
                answer = self.exchange(rank, self.format.unpack(message))
            except Exception as error:
                failed_rank = self._fail(0, str(error))
                answer = self.format.pack([None] * len(self._weights), word=1 + failed_rank)

            try:
                link.send(answer, rank)()
            except Exception as error:
                self._fail(rank, f"Rank {rank} has left the training: {error}")
                return

    def exchange(self, rank: int, gradients: Values) -> torch.Tensor:
        """Take a step of a rank on its gradients.

        The call waits until the slowest rank is at most `staleness` steps behind this rank.

        Returns:
            A message with the current weights.

        Raises:
            RankFailure: a rank has left or failed, or other ranks took no step within the time-out.
        """
        with self._changed:
            self._wait_until(lambda: self._is_open)
            self.staleness[self._clocks[rank] - self._weight_clocks[rank]] += 1
            self._clocks[rank] += 1
            self._waiting[rank] = gradients

            if self._staleness_bound > 0 or len(self._waiting) == self._ranks:
                # Sum in the order of the ranks, so that a repeated training computes the same bits.
                self._apply([self._waiting[other] for other in sorted(self._waiting)])
                self._waiting.clear()
            self._changed.notify_all()

            self._wait_until(lambda: rank not in self._waiting and self._lead(rank) <= self._staleness_bound)
            self._weight_clocks[rank] = self._clocks[rank] - self._lead(rank)
            if self._answer is None:
                self._answer = self.format.pack(list(self._weights.values()))
            return self._answer

    def leave(self, rank: int) -> None:
        """Record that a rank has taken its last step, so that other ranks no longer wait for it.

        With staleness 0 the later steps of other ranks fail, because they need the gradients of all ranks.
        """
        with self._changed:
            if self._staleness_bound == 0:
                self._fail(rank, f"Rank {rank} has left the training, and other ranks still take steps.")
            else:
                self._clocks.pop(rank)
                self._changed.notify_all()

    def _lead(self, rank: int) -> int:
        """Return the number of steps by which a rank is ahead of the slowest rank."""
        return self._clocks[rank] - min(self._clocks.values())

    def _apply(self, gradients: Sequence[Values]) -> None:
        """Take an optimizer step on the mean of the gradients of some ranks.

        The learning rate is multiplied by the number of these ranks, divided by the number of all ranks.
        """
        for weight, *values in zip(self._weights.values(), *gradients, strict=True):
            # Sum in float32 at least: a sum of 16-bit gradients could be infinite although their mean is not.
            dtype = torch.promote_types(weight.dtype, torch.float32)
            summands = [value.to(weight.device, dtype) for value in values if value is not None]
            if summands:
                mean = sum(summands[1:], summands[0]) / len(gradients)
                weight.grad = mean.to(weight.dtype)
            else:
                weight.grad = None

        self._answer = None
        self._take_settings()
        share = len(gradients) / self._ranks
        if share == 1:
            # If all ranks take the step, leave the learning rate alone: some optimizers have none.
            self._optimizer.step()
            return

        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * share
        self._optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _take_settings(self) -> None:
        """Copy the settings that rank 0's program or scheduler has changed since the last call.

        Other settings stay, because the server's optimizer may have changed them.
        """
        groups = zip(self._optimizer.param_groups, self._given.param_groups, self._settings, strict=True)
        for group, given_group, last_settings in groups:
            changed = {
                name: value for name, value in given_group.items() if value is not last_settings.get(name)
            }
            last_settings.update(changed)
            group.update({name: value for name, value in changed.items() if name != "params"})

    def _wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait until `is_met()` is true.

        Raises:
            RankFailure: a rank has failed, or the condition was not met within the time-out.
        """
        if not self._changed.wait_for(lambda: is_met() or self._failed is not None, self._timeout_s):
            # Name the ranks for which this rank waits: the slowest ranks, or rank 0 if it has not called
            # `open` yet.
            late = [0]
            if self._is_open:
                late = [rank for rank in self._clocks if self._lead(rank) == 0]
            ranks = ", ".join(f"rank {rank}" for rank in late)
            self._fail(late[0], f"The parameter server waited {self._timeout_s:g} s for a step of {ranks}.")

        if not is_met() and self._failed is not None:
            raise RankFailure(self._failed[1])

    def _fail(self, rank: int, error: str) -> int:
        """Let all current and later steps fail with `error`, unless another error came first.

        Returns:
            The rank that failed first.
        """
        with self._changed:
            if self._failed is None:
                self._failed = (rank, error)
            self._changed.notify_all()
            return self._failed[0]
