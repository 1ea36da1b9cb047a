"""Measure the time that faults cost a training on SLURM: slurmddp, torchrun, Lightning, ft_launcher.

    python benchmarks/goodput.py [--minutes M] [--seed N] [--ways A B] [--save-every N] [--output FILE]

One training (2 nodes, one gloo rank each, AdamW) runs in each way without and then with the same trace of
faults, on one sandbox of 3 nodes. The trace follows from the seed: two killed ranks, a preemption, a lost
node and a time limit. Each fault comes when the training first reaches its step, but not before the restart
after a time limit. A pause in the step stands for a GPU's work, so that the ways do not compete for the CPUs
of this machine. `--minutes` is the length without faults. 2 minutes show that everything works. The goal of
1.05 needs 30 or more, because only then are five faults as rare as on a cluster.

slurmddp      slurmddp train, with its defaults
torchrun      --max-restarts=100 --monitor-interval=0.1 in an sbatch script with --requeue. The ranks save a
              complete snapshot every save interval and at a warning (SIGTERM; `--signal=B:USR2`), and agree
              on the stop.
lightning     Trainer under srun: SLURM auto-requeue on SIGUSR2, ckpt_path="last", and every save interval
              ModelCheckpoint(save_last, save_on_exception)
ft_launcher   nvidia-resiliency-ext's launcher, with the script and the options of torchrun. Measured after
              `pip install nvidia-resiliency-ext`. (Uninstall `pynvml` again, of which torch warns.)

The batch script of the peers requeues the job after any end before the last step. SLURM warns all ways 20 s
before the time limit. No job holds a spare node, since Lightning could not use it.

Time that only SLURM needs is counted apart, as `SLURM`: while no job of the training runs (queue, requeue
delay, end of the old job), and until SLURM has ended the job of a lost node. All other time, from submission
to the last step, is `time`. The loss of a fault is the time from its moment to the moment of the next fault,
less the time of as many steps without faults. `twice` counts the steps that rank 0 completed more than once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from record import keep, parser

from slurmddp.environments.hostlist import expand
from slurmddp.environments.scrub import scrub
from slurmddp.errors import SlurmError

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.slurm.faulty_sandbox import FaultySandbox

WAYS = ("slurmddp", "torchrun", "lightning", "ft_launcher")
KINDS = ("kill-rank", "kill-rank", "preemption", "lost-node", "time-limit")
GOAL = 1.05
"""The goal: the largest ratio of the time with faults to the time without faults."""
GOAL_TO_PEER = 0.2
"""The goal: the largest ratio of slurmddp's loss to the best peer's loss."""
NODES = 2
STEP_S = 0.1
LEAD_S = 20
"""Seconds from the warning to the time limit."""
TIMES_UP_S = 30
"""Seconds from the change of the time limit to the limit."""
PREEMPTED_S = 5
SETTLED_S = 3.0
"""Seconds after a fault from which on a step shows that the training has recovered."""
STUCK_S = 300
"""Seconds without a new step after which the training is given up."""
POLL_S = 0.1
PEERS = Path(__file__).parent / "goodput_peers"


@dataclass(frozen=True)
class Fault:
    """One fault of the trace: its kind, the step at which it comes, and the rank or node that it hits."""

    kind: str
    step: int
    target: int


def trace(seed: int, steps: int) -> list[Fault]:
    """Return the faults in the order of their steps, about evenly spread, none close to the end."""
    random_numbers = random.Random(seed)
    gap = steps / (len(KINDS) + 1)
    kinds = random_numbers.sample(KINDS, len(KINDS))
    faults = []
    for number, kind in enumerate(kinds, 1):
        step = round(gap * (number + random_numbers.uniform(-0.25, 0.25)))
        faults.append(Fault(kind, step, random_numbers.randrange(NODES)))
    return faults


@dataclass
class Watched:
    """The observations of one training: completed steps with their times, and the times that SLURM needs."""

    submitted: float
    steps: list[tuple[int, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which the training waits for SLURM."""
    struck: list[tuple[Fault, int, float]] = field(default_factory=list)
    """The faults so far, each with the last completed step and the time."""

    def last(self) -> int:
        """Return the last completed step."""
        return max((step for step, _ in self.steps), default=0)

    def reached(self, step: int) -> float:
        """Return the time at which a step at or after `step` was first completed."""
        return min(time for completed, time in self.steps if completed >= step)

    def own_time(self, start: float, end: float) -> float:
        """Return the seconds from `start` to `end` less the time that SLURM needs."""
        slurm_s = 0.0
        for wait_start, wait_end in self.waits:
            slurm_s += max(0.0, min(end, wait_end) - max(start, wait_start))
        return end - start - slurm_s


def losses(plain: Watched, faulty: Watched, last: int) -> list[dict[str, Any]]:
    """Return each fault with the seconds that it cost.

    Args:
        plain: the training without faults.
        faulty: the training with faults.
        last: the last step that both have completed.
    """
    first = plain.reached(1)
    step_s = (plain.reached(last) - first) / max(1, last - 1)
    bounds = [(step, time) for _, step, time in faulty.struck] + [(last, faulty.reached(last))]
    results: list[dict[str, Any]] = []
    for (fault, step, start), (next_step, end) in zip(faulty.struck, bounds[1:], strict=True):
        lost_s = faulty.own_time(start, end) - (next_step - step) * step_s
        results.append({**asdict(fault), "struck_at": step, "lost_s": round(lost_s, 1)})
    return results


def figures(plain: Watched, faulty: Watched) -> dict[str, Any]:
    """Return the figures of one way from its training without faults and its training with faults."""
    last = min(plain.last(), faulty.last())
    without_s = plain.own_time(plain.submitted, plain.reached(last))
    with_faults_s = faulty.own_time(faulty.submitted, faulty.reached(last))
    completed = [step for step, _ in faulty.steps]
    return {
        "time_without_s": round(without_s, 1),
        "time_s": round(with_faults_s, 1),
        "ratio": round(with_faults_s / without_s, 3),
        "lost_s": round(with_faults_s - without_s, 1),
        "slurm_s": round(sum(end - start for start, end in faulty.waits), 1),
        "faults": losses(plain, faulty, last),
        "steps_twice": len(completed) - len(set(completed)),
        "last_step": faulty.last(),
    }


@dataclass(frozen=True)
class Bench:
    """The sandbox, and the trainings' folder and size."""

    sandbox: FaultySandbox
    folder: Path
    steps: int
    save_every: int

    @property
    def environ(self) -> dict[str, str]:
        """The variables of the commands that submit."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "project"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted rank could meet addresses of dead ranks
        }
        environ = scrub(os.environ) | variables
        return {**environ, **self.sandbox.environment(environ)}

    def run(self, command: Sequence[str]) -> None:
        """Run a command in the project; end the benchmark if it fails."""
        result = subprocess.run(
            command, cwd=self.folder / "project", env=self.environ, capture_output=True, text=True
        )
        if result.returncode:
            output = f"{result.stdout}{result.stderr}"
            raise SystemExit(f"{shlex.join(command)} ended with {result.returncode}:\n{output}")

    def minutes(self) -> int:
        """Return a time limit that only the fault of that kind reaches."""
        return 30 + round(self.steps * STEP_S / 60 * 3)


def submit_slurmddp(bench: Bench, marks: Path) -> None:
    """Submit the training of slurmddp, which writes its marks into a folder."""
    bench.run(
        [
            *(sys.executable, "-m", "slurmddp", "train", "+cluster=sandbox", f"name={marks.name}"),
            *("nodes=2", "ranks_per_node=1", f"time_limit={bench.minutes()}m"),
            *("model._target_=goodput_training.Net", f"model.step_s={STEP_S}"),
            "data._target_=goodput_training.Samples",
            *(f"data.size={bench.steps * 8 * NODES}", "train.batch_size=8"),
            *("callbacks.marks._target_=goodput_training.Callback", f"callbacks.marks.folder={marks}"),
            *(f"train.steps={bench.steps}", f"train.save_every={bench.save_every}", "train.clip_norm=null"),
            *(f"policy.signal_lead_s={LEAD_S}", "policy.exclude_failed_h=0"),
        ]
    )


def submit_peer(bench: Bench, marks: Path, command: str, *, warn: str) -> None:
    """Submit the peers' batch script.

    Args:
        bench: the sandbox.
        marks: the folder for the marks.
        command: the command of one task per node, as a line of shell.
        warn: "B:" if SLURM warns the script, and "" if it warns the ranks.
    """
    options = [
        *("sbatch", f"--nodes={NODES}", "--ntasks-per-node=1", "--partition=low", "--requeue"),
        *("--open-mode=append", f"--output={marks}/log", f"--time={bench.minutes()}"),
        f"--signal={warn}USR2@{LEAD_S}",
    ]
    arguments = [str(marks), str(bench.steps), str(bench.save_every), str(STEP_S)]
    bench.run([*options, str(PEERS / "peer.sbatch"), str(marks), command, *arguments])


def elastic(launcher: str) -> Callable[[Bench, Path], None]:
    """Return a function that submits the script under a launcher with torchrun's options."""
    command = (
        f"exec {launcher} --nnodes={NODES} --nproc-per-node=1 --max-restarts=100 --monitor-interval=0.1 "
        "--rdzv-backend=c10d --rdzv-endpoint=$GOODPUT_HEAD:$GOODPUT_PORT --rdzv-id=$GOODPUT_START "
        "torch_loop.py"
    )
    return lambda bench, marks: submit_peer(bench, marks, command, warn="B:")


def submit_lightning(bench: Bench, marks: Path) -> None:
    """Submit the script of Lightning, which handles the warning itself."""
    submit_peer(bench, marks, "exec python lightning_loop.py", warn="")


SUBMIT: Mapping[str, Callable[[Bench, Path], None]] = {
    "slurmddp": submit_slurmddp,
    "torchrun": elastic("torchrun"),
    "lightning": submit_lightning,
    "ft_launcher": elastic("ft_launcher --ignore-missing-fault-tol-cfg"),
}


@dataclass(frozen=True)
class QueuedJob:
    """A job of the training in SLURM's queue."""

    job_id: str
    state: str
    nodes: str
    """Its nodes, as SLURM writes them."""


class Observer:
    """Watches one training and causes its faults; all times are those of one clock."""

    def __init__(self, bench: Bench, marks: Path, faults: Sequence[Fault]) -> None:
        self._bench = bench
        self._sandbox = bench.sandbox
        self._marks = marks
        self._pending = [*faults]
        self._struck_at = 0.0
        self._stopped: float | None = time.time()
        """The time since which SLURM runs no job of the training; None while a job runs."""
        self._lost_node = ""
        self._limited_job = ""
        """The job whose time limit was shortened."""
        self._bytes_read = 0
        self._slurm_knows = True
        """Whether SLURM knows of a lost node."""
        self.seen = Watched(time.time())

    def follow(self) -> Watched:
        """Watch until the last step, or until no step was completed for a while."""
        newest = time.time()
        while self.seen.last() < self._bench.steps and time.time() - newest < STUCK_S:
            if self._read_marks():
                newest = time.time()
                self._act()
            self._look_at_jobs()
            time.sleep(POLL_S)

        self._end_wait(time.time())
        if self._lost_node:
            self._sandbox.restore_node(self._lost_node)
        return self.seen

    def _read_marks(self) -> bool:
        """Read new marks; return whether a step was completed since the last call."""
        with contextlib.suppress(FileNotFoundError), (self._marks / "steps").open() as stream:
            stream.seek(self._bytes_read)
            text = stream.read()
            # The last line may be half written.
            text = text[: text.rfind("\n") + 1]
            self._bytes_read += len(text)
            for line in text.splitlines():
                step, time_of_step = line.split()
                self.seen.steps.append((int(step), float(time_of_step)))
            return bool(text)
        return False

    def _act(self) -> None:
        """Restore a lost node once the training has recovered without it, and cause a fault that is due."""
        is_settled = self.seen.steps[-1][1] > self._struck_at + SETTLED_S
        if self._lost_node and is_settled:
            self._end_wait(time.time())
            self._sandbox.restore_node(self._lost_node)
            self._lost_node = ""

        if not self._pending or not is_settled or self._limited_job:
            return
        if self.seen.last() < self._pending[0].step:
            return
        running = [job for job in self._jobs() if job.state == "RUNNING"]
        if running:
            fault = self._pending.pop(0)
            self._struck_at = time.time()
            self.seen.struck.append((fault, self.seen.last(), self._struck_at))
            self._strike(fault, running[0])

    def _jobs(self) -> list[QueuedJob]:
        """Return the training's jobs."""
        output = self._sandbox.command("squeue", "-h", "--partition=low", "--format=%i|%T|%N")
        return [QueuedJob(*line.split("|")) for line in output.splitlines()]

    def _look_at_jobs(self) -> None:
        """Begin or end an interval in which the training waits for SLURM."""
        try:
            running = [job for job in self._jobs() if job.state == "RUNNING"]
        except SlurmError:
            return

        now = time.time()
        if not running:
            self._slurm_knows = True
            self._stopped = self._stopped or now
        elif self._slurm_knows:
            self._end_wait(now)

    def _end_wait(self, now: float) -> None:
        """End the interval of SLURM, and give a job whose limit was shortened its time back."""
        if self._stopped is None:
            return

        self.seen.waits.append((self._stopped, now))
        self._stopped = None
        if self._limited_job:
            with contextlib.suppress(SlurmError):
                limit = f"TimeLimit={self._bench.minutes()}"
                self._sandbox.command("scontrol", "update", f"JobId={self._limited_job}", limit)
            self._limited_job = ""

    def _strike(self, fault: Fault, job: QueuedJob) -> None:
        """Cause a fault."""
        if fault.kind == "kill-rank":
            os.kill(int((self._marks / f"pid-{fault.target}").read_text()), signal.SIGKILL)
        elif fault.kind == "preemption":
            options = ("--partition=high", f"--nodelist={job.nodes}", f"--nodes={NODES}", "--exclusive")
            self._sandbox.command("sbatch", *options, "--output=/dev/null", f"--wrap=sleep {PREEMPTED_S}")
        elif fault.kind == "lost-node":
            self._lost_node = expand(job.nodes)[fault.target]
            self._stopped = time.time()
            self._slurm_knows = False
            self._sandbox.kill_node(self._lost_node, with_jobs=True)
        else:
            self._limited_job = job.job_id
            self._sandbox.command("scontrol", "update", f"JobId={job.job_id}", f"EndTime=now+{TIMES_UP_S}")
        print(f"    step {self.seen.last()}: {fault.kind}", file=sys.stderr, flush=True)


def watch(way: str, bench: Bench, faults: Sequence[Fault]) -> Watched:
    """Train in one way, and leave nothing of the training in the sandbox."""
    kind = "faulty" if faults else "plain"
    marks = bench.folder / f"{way}-{kind}"
    marks.mkdir()
    observer = Observer(bench, marks, faults)
    SUBMIT[way](bench, marks)
    seen = observer.follow()

    if not bench.sandbox.cancel_jobs():
        raise SystemExit(f"{way}: jobs can't be cancelled")
    deadline = time.monotonic() + STUCK_S
    while not bench.sandbox.status().healthy and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return seen


def measure(way: str, bench: Bench, faults: Sequence[Fault]) -> dict[str, Any]:
    """Train in one way without faults and with faults; return its figures, or why there are none."""
    print(f"{way}: without faults", file=sys.stderr, flush=True)
    plain = watch(way, bench, ())
    if plain.last() < bench.steps:
        return {"failed": f"without faults it stopped at step {plain.last()}"}

    print(f"{way}: with faults", file=sys.stderr, flush=True)
    faulty = watch(way, bench, faults)
    if not faulty.steps:
        return {"failed": "the training for the faults took no step"}
    results = figures(plain, faulty)
    if results["last_step"] < bench.steps:
        results["failed"] = f"it stopped at step {results['last_step']} of {bench.steps}"
    return results


def missing(way: str) -> str | None:
    """Return why a way can't be measured on this machine; None if it can."""
    package = {"lightning": "lightning", "ft_launcher": "nvidia_resiliency_ext"}.get(way)
    if package is None or find_spec(package) is not None:
        return None
    return f"{package} is not installed"


@contextlib.contextmanager
def prepared(steps: int, save_every: int, kept: Path | None) -> Iterator[Bench]:
    """Yield the sandbox and a project that holds the training.

    Args:
        steps: the steps of a training.
        save_every: the steps between saves.
        kept: a new folder for the project and the marks, which stays; None for a folder that is removed.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with contextlib.ExitStack() as stack:
        folder = kept
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="slurmddp-goodput-")
            folder = Path(stack.enter_context(temporary))
        shutil.copytree(PEERS, folder / "project")

        # The paths of the sandbox's sockets must be short.
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmddp-")))
        sandbox = FaultySandbox(
            f"goodput{os.getpid()}", root=root / "sandbox", nodes=NODES + 1, cpus=2, gpus=0
        )
        stack.callback(sandbox.down)
        sandbox.up()
        yield Bench(sandbox, folder, steps, save_every)


def verdict(ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether the goals are held; a peer that did not reach the last step is no best peer."""
    ours = ways.get("slurmddp", {"failed": "not measured"})
    if "failed" in ours:
        return {"held": False, "held_to_peer": False}

    losses_of_peers = [
        peer["lost_s"] for way, peer in ways.items() if way != "slurmddp" and "failed" not in peer
    ]
    is_held_to_peer = bool(losses_of_peers) and ours["lost_s"] <= GOAL_TO_PEER * min(losses_of_peers)
    return {"held": ours["ratio"] <= GOAL, "held_to_peer": is_held_to_peer}


def show(ways: Mapping[str, Mapping[str, Any]], faults: Sequence[Fault]) -> None:
    """Print a row for each way, with the loss of each fault."""
    head = ["way", "without", "time", "ratio", "lost", "SLURM", "twice", "last step"]
    head += [fault.kind for fault in faults]
    print("".join(f"{title:>12}" for title in head))

    names = ("time_without_s", "time_s", "ratio", "lost_s", "slurm_s", "steps_twice", "last_step")
    for way, results in ways.items():
        cells = [str(results[name]) for name in names if name in results]
        cells += [str(fault["lost_s"]) for fault in results.get("faults", ())]
        print("".join(f"{cell:>12}" for cell in [way, *cells]), results.get("failed", ""))


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=2, help="length without faults (2)")
    options.add_argument(
        "--save-every", type=int, default=300, help=f"steps of {STEP_S} s between saves (300)"
    )
    options.add_argument("--seed", type=int, default=0, help="the faults follow from it (0)")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for logs, which stays")
    return options


def main() -> int:
    """Measure the chosen ways, print their figures, and return 1 if a goal is missed."""
    arguments = options().parse_args()
    steps = round(arguments.minutes * 60 / STEP_S)
    faults = trace(arguments.seed, steps)
    kept = arguments.keep and arguments.keep.absolute()
    ways: dict[str, dict[str, Any]] = {}
    with prepared(steps, arguments.save_every, kept) as bench:
        for way in arguments.ways:
            reason = missing(way)
            if reason is not None:
                ways[way] = {"failed": reason}
            else:
                ways[way] = measure(way, bench, faults)

    show(ways, faults)
    held = verdict(ways)
    settings = {"minutes": arguments.minutes, "save_every": arguments.save_every, "seed": arguments.seed}
    keep(arguments.output, {"ways": ways, **held, **settings, "trace": [asdict(fault) for fault in faults]})
    for name, goal in (
        ("held", f"slurmddp takes at most {GOAL} of its time without faults"),
        ("held_to_peer", f"slurmddp loses at most {GOAL_TO_PEER} of the best peer's loss"),
    ):
        print(f"{goal}: {'held' if held[name] else 'not held'}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
