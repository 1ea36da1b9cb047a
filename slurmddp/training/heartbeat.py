"""Write this rank's heartbeat for the agent's watchdog: its phase, its step, and the times of the step.

A step costs a few stores into a page of memory: no system call, no lock, no message, no wait for a GPU. In a
loop on `Distributon`, the library's calls write the heartbeat. The optimizer of `setup_optimizer` counts the
steps; without it, `should_stop` counts a step after each `backward`. Loaders measure the waits for data.
`save` and `load` write their phases. Before the first step, after a loop over a loader and after `close` the
watchdog expects no heartbeat, unless the program has called `Distributon.heartbeat`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from slurmddp.environments.names import DEBUG_VARIABLE
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.host.heartbeat_page import PHASES, HeartbeatPage
from slurmddp.training.startup_timer import StartupTimer

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
_STEP_PHASES = frozenset({"first_step", "step", "data"})
"""The phases whose time belongs to the running step."""


class Heartbeat:
    """Writer of this rank's heartbeat; it also measures steps, their waits for data and forward passes."""

    def __init__(self, page: HeartbeatPage, start_up: StartupTimer) -> None:
        self._page = page
        self._start_up = start_up

        self._phase = "starting"
        self._since = time.monotonic()
        """When the current phase began, in seconds of `time.monotonic`."""
        self._watched = False
        """Whether the watchdog expects more heartbeats."""

        self._step_s = 0.0
        """Seconds of the running step that passed before the current phase began."""
        self._wait_s = 0.0
        """Seconds of the running step's waits for data."""
        self._forward: _ForwardClock | None = None
        self._forward_s = 0.0
        """Seconds of the forward passes since the last completed step."""

        self._step: int | None = None
        """The last completed step; None until it is known at which step training starts."""
        self._is_first = True
        """Whether this process has not completed a step yet."""
        self._computed = False
        """Whether `backward` was called since the last completed step."""
        self._has_stepped = False
        """Whether a step was completed after the last call of `should_stop`."""
        self._hooked = False
        """Whether the steps of an optimizer of `setup_optimizer` are counted."""
        self.on_step: Callable[[int, float], None] = lambda step, seconds: None
        """Receives the number of each completed step and the seconds that it took."""

    @property
    def awaits_first_step(self) -> bool:
        """Whether an optimizer was set up and has not completed a step yet."""
        return self._hooked and self._is_first

    def enter(self, phase: str, *, watched: bool = True) -> None:
        """Write a heartbeat with the phase `phase`.

        Args:
            phase: a phase of docs/guides/watchdog.md.
            watched: whether the watchdog expects a further heartbeat within the limit of the phase.
        """
        if watched is not self._watched:
            self._watched = watched
            self._page.watch(watched)

        now = self._page.enter(phase)
        if self._is_first and self._phase == "evaluating" and phase != "evaluating":
            self._start_up.lap("evaluation")

        if self._phase in _STEP_PHASES:
            self._step_s += now - self._since
            if self._phase == "data":
                self._wait_s += now - self._since

        self._phase = phase
        self._since = now

    def alive(self, phase: str) -> None:
        """Write a heartbeat for `Distributon.heartbeat`.

        Raises:
            ConfigError: the phase is unknown.
        """
        if phase not in PHASES:
            raise ConfigError(f"Unknown phase {phase!r}.", hint=f"Use one of {', '.join(PHASES)}.")
        self.enter(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Return a context that writes a heartbeat of `phase`, and at its end one of the phase before."""
        phase_before = self._phase
        watched_before = self._watched
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(phase_before, watched=watched_before)

    def finish(self) -> None:
        """Record on the heartbeat page that the training has ended, and was not stopped."""
        self._page.finish()

    def resumed(self, step: int) -> None:
        """Record on the heartbeat page from which step training resumes; 0 for a new training."""
        self._step = step
        self._page.resumed(step)

    def step_begins(self) -> None:
        """Write a heartbeat for a call of `should_stop`, which comes before each step.

        If no optimizer is followed and `backward` was called, also count the previous step as completed.
        """
        if self._computed and not self._hooked:
            self._complete()

        # If a step was completed since the last call, its end has already written a heartbeat.
        if not self._has_stepped:
            self.enter("first_step" if self._is_first else "step")
        self._has_stepped = False

    def follow(self, optimizer: Optimizer) -> None:
        """Count the steps of `optimizer` as the steps of the training; only the first call has an effect."""
        if not self._hooked and hasattr(optimizer, "register_step_post_hook"):
            self._hooked = True
            optimizer.register_step_post_hook(self._complete)

    def backward_begins(self) -> None:
        """Stop the clock of the forward pass, because `backward` was called."""
        self._computed = True
        if self._forward is not None:
            self._forward_s += self._forward.stop()

    def batches(self, source: Iterator[T], device: torch.device) -> Iterator[T]:
        """Yield from `source`, write heartbeats, and measure how long the loop waits for batches.

        A batch that is requested under `torch.no_grad` belongs to an evaluation and not to a step.
        """
        watched = self._watched
        enter = self.enter
        if self._forward is None:
            self._forward = _DeviceClock() if device.type == "cuda" else _ForwardClock()
        begin_forward = self._forward.start

        try:
            while True:
                trains = torch.is_grad_enabled()
                enter("data" if trains else "evaluating")
                try:
                    batch = next(source)
                except StopIteration:
                    return

                if trains:
                    enter("first_step" if self._is_first else "step")
                    begin_forward()
                else:
                    enter("evaluating")
                yield batch
        finally:
            enter(self._phase, watched=watched)

    def _complete(self, *_: object) -> None:
        """Count a step as completed, and write its times; called by the optimizer after its step."""
        self.enter("step")
        if self._step is None:
            self.resumed(0)
        self._step = (self._step or 0) + 1
        self._page.completed(self._step, self._step_s, self._wait_s, self._forward_s)

        seconds = self._step_s
        self._step_s = 0.0
        self._wait_s = 0.0
        self._forward_s = 0.0
        self._computed = False
        self._is_first = False
        self._has_stepped = True
        self.on_step(self._step, seconds)


def shown_as(phase: str) -> Callable[[Method], Method]:
    """Return a decorator for methods of Distributon: the heartbeat shows `phase` while the method runs.

    If the method raises a SlurmddpError, frames of slurmddp are removed from its traceback, so that it ends
    at the program's call of the method. With SLURMDDP_DEBUG=1 they stay.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def shown(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                with self._session.heartbeat.during(phase):
                    return method(self, *args, **kwargs)
            except SlurmddpError as error:
                if os.environ.get(DEBUG_VARIABLE, "") in ("", "0"):
                    error.__traceback__ = None
                raise error

        return shown  # type: ignore[return-value]

    return decorate


class _ForwardClock:
    """Stopwatch for forward passes on the CPU."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.monotonic()

    def stop(self) -> float:
        """Return the seconds since the last `start`; 0.0 if no `start` has followed the last `stop`."""
        if self._since is None:
            return 0.0

        seconds = time.monotonic() - self._since
        self._since = None
        return seconds


class _DeviceClock(_ForwardClock):
    """Stopwatch for forward passes on a GPU, by CUDA events; it never waits for the GPU.

    It measures one pass. Until the GPU has completed this pass, later passes are only counted, and are
    taken to last as long as the measured one.
    """

    def __init__(self) -> None:
        self._events: tuple[Any, Any] = (_event(), _event())
        self._passes = 0
        """Passes since the first event; the second event marks the end of the first of these passes."""
        self._runs = False
        """Whether a forward pass is running."""

    def start(self) -> None:
        self._runs = True
        if self._passes == 0:
            self._events[0].record()

    def stop(self) -> float:
        if not self._runs:
            return 0.0
        self._runs = False
        self._passes += 1

        if self._passes == 1:
            self._events[1].record()
            return 0.0
        # The GPU has not completed the measured pass yet: ask again after the next pass.
        if not self._events[1].query():
            return 0.0

        seconds: float = self._events[0].elapsed_time(self._events[1]) / 1000
        seconds *= self._passes
        self._passes = 0
        return seconds


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
