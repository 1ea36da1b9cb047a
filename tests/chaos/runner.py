"""The whole experiment: one undisturbed training, then disturbed ones until every planned fault was done."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from chaos import disk
from chaos.compare import End, difference, end_of
from chaos.faults import Planned, Scene, draw
from chaos.recovery import LOST, Outcome, return_nodes, strike
from chaos.training import POLL_S, Place, Shape, Training, write_project
from slurmddp.errors import SlurmddpError
from support.slurm.faulty_sandbox import FaultySandbox

DISK_MB = 192
SPARE_NODES = 1
"""For the job to go to while a node of its own is down."""
SLURMD_TIMEOUT_S = 30
"""With 10 s, SLURM 24.11 gave up a healthy node together with a dead one in one of eight trials."""
KILL_WAIT_S = 3
"""Less than SLURM's 6 s before it starts a job again that was put back, as at real sites (30 s and 120 s)."""
MOST_MISSES = 5
"""So many times is a fault put off that came too late or found nothing to break."""
LAST_SECONDS = 4.0
"""No fault is begun so near to the end of a training that it might come too late."""


@dataclass(frozen=True)
class Settings:
    """The settings of the experiment."""

    kinds: tuple[str, ...]
    faults: int = 12
    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    limit_s: float = 180.0
    """A training that takes no new step for so long after a fault has not survived it."""
    keep: Path | None = None
    """Where the run folders are copied to at the end."""
    shared: str = ""
    """The file system through which each node sees the project; empty: the disk of this machine."""


@dataclass(frozen=True)
class RunResult:
    """One disturbed training: how many attempts it took, and its difference from the undisturbed one."""

    name: str
    attempts: int
    difference: str
    """Empty if weights and losses are equal, bit for bit."""

    @property
    def good(self) -> bool:
        return not self.difference


@dataclass
class Result:
    """The result of the experiment, complete or so far."""

    settings: Settings
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == self.settings.faults

    @property
    def good(self) -> bool:
        """Whether every fault was survived and every training ended with the undisturbed numbers."""
        survived = all(outcome.survived for outcome in self.outcomes)
        return self.complete and survived and bool(self.runs) and all(run.good for run in self.runs)


Report = Callable[[str, Result], None]
"""Is told of every event, in a sentence, with the result so far."""


def run(settings: Settings, report: Report) -> Result:
    """Carry the experiment out on a sandbox of its own; nothing of it is left afterwards."""
    result = Result(settings)
    started = time.monotonic()

    def tell(text: str) -> None:
        result.seconds = round(time.monotonic() - started, 1)
        report(text, result)

    with stage(settings, tell) as scene_of:
        first = scene_of("undisturbed")
        result.versions = _versions(first.sandbox)
        reference = _undisturbed(first, settings, tell)
        pending = deque(
            draw(settings.kinds, settings.faults, settings.seed, min(40, settings.shape.steps // 5))
        )
        misses = 0
        while pending and misses < MOST_MISSES:
            before = len(result.outcomes)
            scene = scene_of(f"disturbed-{len(result.runs)}")
            result.runs.append(_disturbed(scene, pending, reference, result, tell))
            misses = misses + 1 if len(result.outcomes) == before else 0
            tell(_sentence(result.runs[-1]))
    return result


def _versions(sandbox: FaultySandbox) -> dict[str, str]:
    slurm = ".".join(str(part) for part in sandbox.plan.machine.slurm_version)
    return {"python": platform.python_version(), "torch": metadata.version("torch"), "slurm": slurm}


@contextlib.contextmanager
def stage(settings: Settings, tell: Callable[[str], None]) -> Iterator[Callable[[str], Scene]]:
    """Build the sandbox and a project, and yield what makes a scene for a run of a given name."""
    nodes = settings.shape.nodes + SPARE_NODES
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmddp-chaos-")))
        project = folder / "project"
        small = None
        if "fill-disk" in settings.kinds:
            small = stack.enter_context(disk.mounted(project, DISK_MB))
        write_project(project, inspect.getsource(inspect))
        if settings.keep is not None:
            kept = shutil.ignore_patterns(disk.FILLER)
            stack.callback(shutil.copytree, project / "runs", settings.keep, dirs_exist_ok=True, ignore=kept)
        cpus = settings.shape.ranks_per_node
        sandbox = FaultySandbox(
            f"chaos{os.getpid()}",
            root=folder / "sandbox",
            nodes=nodes,
            cpus=cpus,
            gpus=0,
            slurmd_timeout_s=SLURMD_TIMEOUT_S,
            kill_wait_s=KILL_WAIT_S,
            shared=settings.shared or None,
            shared_folder=project if settings.shared else None,
        )
        stack.callback(sandbox.down)
        sandbox.up()
        tell(f"The sandbox is up: {nodes} nodes of which {settings.shape.nodes} train.")
        place = Place(project, sandbox)
        yield lambda name: Scene(sandbox, Training(place, name, settings.shape), small)


def _undisturbed(scene: Scene, settings: Settings, tell: Callable[[str], None]) -> End:
    training = scene.training
    started = time.monotonic()
    training.start()
    if not _await_end(training, settings.limit_s):
        raise SlurmddpError(
            f"The undisturbed training did not come to its end: {training.end_word()}.",
            hint="Try `slurmddp train +cluster=sandbox model=gpt_tiny` on a sandbox by hand.",
        )
    tell(f"The undisturbed training took {time.monotonic() - started:.0f} s.")
    return end_of(training.folder)


def _disturbed(
    scene: Scene, pending: deque[Planned], reference: End, result: Result, tell: Callable[[str], None]
) -> RunResult:
    """Train once, with faults from `pending` for as long as there are steps left; compare the end."""
    training, limit_s = scene.training, result.settings.limit_s
    training.start()
    while pending and _await_moment(scene, pending[0], limit_s):
        outcome = strike(scene, pending[0], limit_s)
        if outcome is None:
            continue
        pending.popleft()
        result.outcomes.append(outcome)
        tell(outcome.sentence(result.settings.faults))
        if outcome.outcome == LOST:
            break
    return _judge(training, reference, limit_s)


def _await_moment(scene: Scene, planned: Planned, limit_s: float) -> bool:
    """Wait for all nodes, a checkpoint of this attempt and some new steps; False when it won't come."""
    training = scene.training
    if not training.wait(lambda: training.saved(training.attempt) or training.history().settled, limit_s):
        return False
    return_nodes(scene)
    if not training.wait(lambda: scene.sandbox.status().healthy, limit_s):
        return False
    goal = training.last_step() + planned.after_steps
    training.wait(lambda: training.last_step() >= goal or training.history().settled, limit_s)
    return not training.history().settled and _seconds_left(training) > LAST_SECONDS


def _seconds_left(training: Training) -> float:
    """Guess from the pace of the last steps the seconds until the training ends."""
    recent = training.steps(lambda attempt: attempt == training.attempt)[-20:]
    if len(recent) < 2:
        return 0.0
    pace_s = (recent[-1][1] - recent[0][1]) / (len(recent) - 1)
    return pace_s * (training.shape.steps - recent[-1][0])


def _await_end(training: Training, limit_s: float) -> bool:
    """Wait until the training has finished; False when it takes no new step for `limit_s`, or is over."""
    reached, deadline = -1, 0.0
    while not training.history().settled:
        if training.last_step() > reached:
            reached, deadline = training.last_step(), time.monotonic() + limit_s
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return training.finished


def _judge(training: Training, reference: End, limit_s: float) -> RunResult:
    if not _await_end(training, limit_s):
        found = training.end_word()
        training.give_up()
    else:
        try:
            found = difference(end_of(training.folder), reference)
        except SlurmddpError as error:
            found = error.message
    return RunResult(training.folder.name, training.attempt + 1, found)


def _sentence(run: RunResult) -> str:
    if run.good:
        return f"{run.name}: {run.attempts} attempts, weights and losses as in the undisturbed training."
    return f"{run.name}: {run.attempts} attempts, NOT as the undisturbed training: {run.difference}."
