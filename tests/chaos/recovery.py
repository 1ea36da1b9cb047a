"""One fault on one training: do it, then read from the run folder whether and when the training continues."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from itertools import pairwise

from chaos.faults import FAULTS, MissedError, Planned, Scene, Struck
from chaos.training import POLL_S, Training
from slurmddp.errors import SlurmddpError, SlurmError

CALM_S = 2.0
"""A training that takes steps for so long after a fault that may interrupt it was not interrupted."""

WENT_ON, IN_PLACE, CAME_BACK, BY_HAND, LOST = "went on", "in place", "came back", "by hand", "lost"
"""The same ranks; others in the same attempt; a later attempt; one by `slurmddp resume`; not in time."""


@dataclass(frozen=True)
class Outcome:
    """The fate of a training after one fault."""

    number: int
    kind: str
    run: str
    what: str
    step: int
    """The last step logged before the fault took hold."""
    outcome: str
    attempts: int
    """Attempts that it took to get beyond that step."""
    lost_steps: int | None
    recovery_s: float | None
    """From the fault to the first step beyond the last one; without a new attempt the longest pause."""
    note: str = ""

    @property
    def survived(self) -> bool:
        return self.outcome in (WENT_ON, IN_PLACE, CAME_BACK)

    def sentence(self, faults: int) -> str:
        """Say it on one line."""
        figures = f" after {self.recovery_s:.1f} s" if self.recovery_s is not None else ""
        figures += f", {self.lost_steps} steps lost" if self.lost_steps else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.number + 1}/{faults} {self.kind}: {self.outcome}{figures} ({self.what}{note})"


def strike(scene: Scene, planned: Planned, limit_s: float) -> Outcome | None:
    """Do one planned fault and wait for what becomes of it; None when it came too late to count."""
    training, luck = scene.training, planned.luck()
    attempt, restarts = training.attempt, len(training.events("restarted"))
    time.sleep(luck.uniform(0, 0.2))
    try:
        struck = FAULTS[planned.kind].inject(scene, luck)
    except MissedError:
        return None
    attempt = attempt if struck.attempt is None else struck.attempt
    how = LOST if struck.broken else _await(training, attempt, restarts, struck, limit_s)
    note = ""
    if how is None:
        return None
    if how == LOST:
        note = struck.broken or training.end_word()
        how = BY_HAND if _resume_by_hand(scene, attempt, limit_s) else LOST
    step, lost, recovery = _figures(training, attempt, restarts, struck, how)
    return Outcome(
        number=planned.number,
        kind=planned.kind,
        run=training.folder.name,
        what=struck.what,
        step=step,
        outcome=how,
        attempts=training.attempt - attempt,
        lost_steps=lost,
        recovery_s=None if recovery is None else round(recovery, 2),
        note=note,
    )


def _await(training: Training, attempt: int, restarts: int, struck: Struck, limit_s: float) -> str | None:
    """Return how the training continues, LOST if it does not, None if it ended undisturbed."""
    done, deadline = time.time(), time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if _is_beyond(training, attempt):
            return CAME_BACK
        if _beyond_in_place(training, attempt, restarts) is not None:
            return IN_PLACE
        if training.finished:
            return CAME_BACK if training.attempt > attempt else None if struck.interrupts else WENT_ON
        if not struck.interrupts and _steps_after(training, attempt, done + CALM_S):
            return WENT_ON
        if training.history().settled:
            return LOST
        time.sleep(POLL_S)
    return LOST


def _is_beyond(training: Training, attempt: int) -> bool:
    """Say whether a later attempt than `attempt` got further than all up to it."""
    reached = training.last_step(lambda number: number <= attempt)
    return training.last_step(lambda number: number > attempt) > reached


def _beyond_in_place(training: Training, attempt: int, restarts: int) -> tuple[int, int, float] | None:
    """Return the step at which ranks restarted in the attempt, the repeated steps, and the time of their end.

    None before that. `restarts` is how often ranks had begun again until the fault.
    """
    new = training.events("restarted")[restarts:]
    if not new:
        return None
    begun, own = new[0]["time"], training.steps(lambda number: number == attempt)
    reached = max((step for step, when in own if when <= begun), default=0)
    beyond = next((when for step, when in own if when > begun and step > reached), None)
    resumed = [event["step"] for event in training.events("resumed") if event["time"] >= begun]
    return None if beyond is None else (reached, max(0, reached - min(resumed, default=0)), beyond)


def _steps_after(training: Training, attempt: int, moment: float) -> bool:
    return any(when > moment for _, when in training.steps(lambda number: number == attempt))


def return_nodes(scene: Scene) -> None:
    """Give nodes back that SLURM took out of service, as an administrator would."""
    for node, state in scene.sandbox.status().nodes.items():
        if not state.startswith(("drain", "down")):
            continue
        with contextlib.suppress(SlurmError):  # It may just have come back by itself.
            scene.sandbox.command("scontrol", "update", f"NodeName={node}", "State=RESUME")


def _resume_by_hand(scene: Scene, attempt: int, limit_s: float) -> bool:
    """Do what a person would: end hanging processes, resume, and return whether the training continues."""
    training = scene.training
    if not training.history().settled:
        training.give_up()
    return_nodes(scene)
    with contextlib.suppress(SlurmddpError):
        training.place.command(*training.resume_words)
        return training.wait(lambda: _is_beyond(training, attempt), limit_s)
    return False


def _figures(
    training: Training, attempt: int, restarts: int, struck: Struck, how: str
) -> tuple[int, int | None, float | None]:
    """Return the last step before the fault took hold, the steps repeated, the seconds without a new one."""
    own = training.steps(lambda number: number == attempt)
    before = training.last_step(lambda number: number <= attempt)
    if how == LOST:
        return before, None, None
    if how == IN_PLACE and (found := _beyond_in_place(training, attempt, restarts)) is not None:
        return found[0], found[1], found[2] - struck.at
    if how == WENT_ON:
        times = [struck.at, *(when for _, when in own if when > struck.at)]
        return before, 0, max((b - a for a, b in pairwise(times)), default=0.0)
    for step, when in training.steps(lambda number: number > attempt):
        if step > before:
            resumes = training.events("resumed")
            from_step = [event["step"] for event in resumes if event["attempt"] == training.attempt]
            return before, max(0, before - (from_step[-1] if from_step else 0)), when - struck.at
    return before, 0, None
