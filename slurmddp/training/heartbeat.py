"""Write this rank's heartbeat: its phase, its step, and the times of the step, for the agent's watchdog.

A step costs some stores into a page of memory: no system call, no lock, no message, no wait for a GPU. In a
loop on `Distributon`, the heartbeat comes from the library's calls: steps from `setup_optimizer` (or from
`should_stop` after a `backward`), waits for data from the loaders, checkpoints from `save` and `load`. Before
the first step, after a loop over a loader and after `close` no heartbeat is expected, unless the program has
called `Distributon.heartbeat`.
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
_IN_A_STEP = frozenset({"first_step", "step", "data"})


class Heartbeat:
    """The heartbeat of this rank; measures the times of the running step."""

    def __init__(self, page: HeartbeatPage, start_up: StartupTimer) -> None:
        self._page, self._start_up = page, start_up
        self._phase, self._since = "starting", time.monotonic()
        self._watched = False
        self._step_s = self._wait_s = 0.0
        """Seconds of the running step before the current phase, and of its waits for data."""
        self._step: int | None = None
        """The last completed step; None until it is known at which step training starts."""
        self._is_first = True
        self._computed = False
        """Whether a backward pass has followed the last completed step."""
        self.on_step: Callable[[int, float], None] = lambda step, seconds: None
        """Receives the number of each completed step and the seconds that it took."""
        self._hooked = False
        self._forward: _ForwardClock | None = None
        self._forward_s = 0.0
        """Seconds of the forward passes since the last completed step."""
        self._has_stepped = False
        """Whether a step was completed after the last call of `should_stop`."""

    @property
    def awaits_first_step(self) -> bool:
        """Whether an optimizer was set up, and none of its steps has been completed."""
        return self._hooked and self._is_first

    def enter(self, phase: str, *, watched: bool = True) -> None:
        """Write a heartbeat of `phase`; with `watched`, the watchdog expects more heartbeats."""
        if watched is not self._watched:
            self._watched = watched
            self._page.watch(watched)
        now = self._page.enter(phase)
        if self._is_first and self._phase == "evaluating" != phase:
            self._start_up.lap("evaluation")
        if self._phase in _IN_A_STEP:
            self._step_s += now - self._since
            if self._phase == "data":
                self._wait_s += now - self._since
        self._phase, self._since = phase, now

    def alive(self, phase: str) -> None:
        """Write a heartbeat of the user's program; raise ConfigError for an unknown phase."""
        if phase not in PHASES:
            raise ConfigError(f"Unknown phase {phase!r}.", hint=f"One of {', '.join(PHASES)}.")
        self.enter(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Write heartbeats of `phase` before the block, and of the phase before it after the block."""
        before, watched = self._phase, self._watched
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before, watched=watched)

    def finish(self) -> None:
        """Write that the training has come to its own end."""
        self._page.finish()

    def resumed(self, step: int) -> None:
        """Write from which step training resumes; 0 for a new training."""
        self._step = step
        self._page.resumed(step)

    def step_begins(self) -> None:
        """Record a call of `should_stop`, which comes before each step."""
        if self._computed and not self._hooked:
            self._complete()
        if not self._has_stepped:  # A step that was completed just now has shown a heartbeat.
            self.enter("first_step" if self._is_first else "step")
        self._has_stepped = False

    def follow(self, optimizer: Optimizer) -> None:
        """Count the steps of the first optimizer as the steps of the training."""
        if not self._hooked and hasattr(optimizer, "register_step_post_hook"):
            self._hooked = True
            optimizer.register_step_post_hook(self._complete)

    def backward_begins(self) -> None:
        """Record a call of `backward`, which ends the forward pass."""
        self._computed = True
        if self._forward is not None:
            self._forward_s += self._forward.stop()

    def batches(self, source: Iterator[T], device: torch.device) -> Iterator[T]:
        """Yield from `source`, and measure the waits for it.

        A batch that is requested under `torch.no_grad` belongs to an evaluation.
        """
        watched, enter = self._watched, self.enter
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
        """Count the step that has just ended; a hook of the optimizer."""
        self.enter("step")
        if self._step is None:
            self.resumed(0)
        self._step = (self._step or 0) + 1
        self._page.completed(self._step, self._step_s, self._wait_s, self._forward_s)
        seconds, self._step_s, self._wait_s, self._forward_s = self._step_s, 0.0, 0.0, 0.0
        self._computed = self._is_first = False
        self._has_stepped = True
        self.on_step(self._step, seconds)


def shown_as(phase: str) -> Callable[[Method], Method]:
    """Return a decorator for methods of Distributon that shows `phase` while they run.

    An error of slurmddp explains itself. So its traceback ends where the program has called the method,
    unless SLURMDDP_DEBUG=1 asks for the frames below.
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
    """Measures forward passes on the CPU."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.monotonic()

    def stop(self) -> float:
        """Return the seconds of the forward pass; 0.0 if none has started."""
        if self._since is None:
            return 0.0
        seconds, self._since = time.monotonic() - self._since, None
        return seconds


class _DeviceClock(_ForwardClock):
    """Measures forward passes by CUDA events, without waiting for the GPU.

    Until the GPU has completed a measured pass, later passes are not measured; each counts as long as that
    pass.
    """

    def __init__(self) -> None:
        self._events: tuple[Any, Any] = (_event(), _event())
        self._passes = 0
        """Passes since the first event; the second event ends the first of them."""
        self._runs = False

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
        if not self._events[1].query():
            return 0.0
        passes, self._passes = self._passes, 0
        seconds: float = self._events[0].elapsed_time(self._events[1]) / 1000
        return seconds * passes


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
