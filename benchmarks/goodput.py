"""Measure the time that faults cost a training on SLURM: slurmddp, torchrun, Lightning, ft_launcher.

    python benchmarks/goodput.py [--minutes M] [--seed N] [--ways A B] [--save-every N] [--output FILE]

One training (2 nodes, one gloo rank each, AdamW) runs in each way without and then with the same trace of
faults, on one sandbox of 3 nodes. The trace follows from the seed: two killed ranks, a preemption, a lost
node and a time limit. Each comes when the training first reaches its step, but not before the restart after
a time limit. A pause in the step stands for a GPU's work, so that the ways do not compete for the CPUs of
this machine. `--minutes` is the length without faults. 2 minutes show that everything works. The goal of
1.05 needs 30 or more, because only then are five faults as rare as on a cluster.

slurmddp      slurmddp train, with its defaults
torchrun      --max-restarts=100 --monitor-interval=0.1 in an sbatch script with --requeue. The ranks save a
              complete snapshot every save interval and at a warning (SIGTERM; `--signal=B:USR2`), and agree
              on the stop.
lightning     Trainer under srun: SLURM auto-requeue on SIGUSR2, ckpt_path="last", and every save interval
              ModelCheckpoint(save_last, save_on_exception)
ft_launcher   nvidia-resiliency-ext's launcher, with the script and the options of torchrun. Measured where
              `pip install nvidia-resiliency-ext` was done. (Uninstall `pynvml` again, of which torch warns.)

The batch script of the peers requeues the job after any end before the last step. All ways are warned 20 s
before the time limit. No job holds a spare node, since Lightning could not use it.

Time that only SLURM needs is counted apart, as `SLURM`: no job of the training runs (queue, requeue delay,
end of the old job), or SLURM has not yet ended the job of a lost node. The rest, from submission to the
last step, is `time`. The loss of a fault is the time from its moment to the moment of the next fault, less
the time of as many steps without faults. `twice` counts the steps that rank 0 completed more than once.
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
GOAL, GOAL_TO_PEER = 1.05, 0.2
"""The largest time over the time without faults, and the largest loss over the best peer's loss."""
NODES, STEP_S = 2, 0.1
LEAD_S, TIMES_UP_S = 20, 30
"""Seconds of warning before a time limit, and from the change of the limit to the limit."""
PREEMPTED_S = 5
SETTLED_S = 3.0
"""Steps so long after a fault are steps of a training that goes on."""
STUCK_S = 300
"""A training without a new step for so long is given up."""
POLL_S = 0.1
PEERS = Path(__file__).parent / "goodput_peers"


@dataclass(frozen=True)
class Fault:
    """One fault of the trace: its kind, the step at which it comes, and the rank or node it strikes."""

    kind: str
    step: int
    target: int


def trace(seed: int, steps: int) -> list[Fault]:
    """Return the faults in the order of their steps, about evenly spread, none close to the end."""
    luck = random.Random(seed)
    gap = steps / (len(KINDS) + 1)
    kinds = luck.sample(KINDS, len(KINDS))
    return [
        Fault(kind, round(gap * (number + luck.uniform(-0.25, 0.25))), luck.randrange(NODES))
        for number, kind in enumerate(kinds, 1)
    ]


@dataclass
class Watched:
    """The observations of one training: completed steps with their times, and intervals of SLURM's own."""

    submitted: float
    steps: list[tuple[int, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    struck: list[tuple[Fault, int, float]] = field(default_factory=list)
    """The faults that were done, each with the last completed step and the time."""

    def last(self) -> int:
        return max((step for step, _ in self.steps), default=0)

    def reached(self, step: int) -> float:
        """Return the time at which a step at or after `step` was first completed."""
        return min(at for done, at in self.steps if done >= step)

    def own_time(self, start: float, end: float) -> float:
        """Return the seconds from `start` to `end` less the time of SLURM."""
        slurm = sum(max(0.0, min(end, upto) - max(start, since)) for since, upto in self.waits)
        return end - start - slurm


def figures(plain: Watched, faulty: Watched) -> dict[str, Any]:
    """Return the figures of one way from its training without faults and the one with faults."""
    last = min(plain.last(), faulty.last())
    first = plain.reached(1)
    pace = (plain.reached(last) - first) / max(1, last - 1)
    bounds = [(step, at) for _, step, at in faulty.struck] + [(last, faulty.reached(last))]
    losses: list[dict[str, Any]] = []
    for (fault, step, at), (next_step, upto) in zip(faulty.struck, bounds[1:], strict=True):
        lost = faulty.own_time(at, upto) - (next_step - step) * pace
        losses.append({**asdict(fault), "struck_at": step, "lost_s": round(lost, 1)})
    without, with_faults = (one.own_time(one.submitted, one.reached(last)) for one in (plain, faulty))
    done = [step for step, _ in faulty.steps]
    return {
        "time_without_s": round(without, 1),
        "time_s": round(with_faults, 1),
        "ratio": round(with_faults / without, 3),
        "lost_s": round(with_faults - without, 1),
        "slurm_s": round(sum(upto - since for since, upto in faulty.waits), 1),
        "faults": losses,
        "steps_twice": len(done) - len(set(done)),
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
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder / "project"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted rank could meet addresses of dead ranks
        }
        bare = scrub(os.environ) | own
        return {**bare, **self.sandbox.environment(bare)}

    def run(self, words: Sequence[str]) -> None:
        done = subprocess.run(
            words, cwd=self.folder / "project", env=self.environ, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def minutes(self) -> int:
        return 30 + round(self.steps * STEP_S / 60 * 3)


def submit_slurmddp(bench: Bench, marks: Path) -> None:
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
    """Submit the peers' batch script; `warn` is "B:" if SLURM warns the script and not the ranks."""
    options = [
        *("sbatch", f"--nodes={NODES}", "--ntasks-per-node=1", "--partition=low", "--requeue"),
        *("--open-mode=append", f"--output={marks}/log", f"--time={bench.minutes()}"),
        f"--signal={warn}USR2@{LEAD_S}",
    ]
    arguments = [str(marks), str(bench.steps), str(bench.save_every), str(STEP_S)]
    words = [str(PEERS / "peer.sbatch"), str(marks), command, *arguments]
    bench.run([*options, *words])


def elastic(launcher: str) -> Callable[[Bench, Path], None]:
    """Return what submits the script under a launcher that has torchrun's options."""
    command = (
        f"exec {launcher} --nnodes={NODES} --nproc-per-node=1 --max-restarts=100 --monitor-interval=0.1 "
        "--rdzv-backend=c10d --rdzv-endpoint=$GOODPUT_HEAD:$GOODPUT_PORT --rdzv-id=$GOODPUT_START "
        "torch_loop.py"
    )
    return lambda bench, marks: submit_peer(bench, marks, command, warn="B:")


def submit_lightning(bench: Bench, marks: Path) -> None:
    submit_peer(bench, marks, "exec python lightning_loop.py", warn="")


SUBMIT: Mapping[str, Callable[[Bench, Path], None]] = {
    "slurmddp": submit_slurmddp,
    "torchrun": elastic("torchrun"),
    "lightning": submit_lightning,
    "ft_launcher": elastic("ft_launcher --ignore-missing-fault-tol-cfg"),
}


class Observer:
    """Watches one training and strikes it; all times are those of one clock."""

    def __init__(self, bench: Bench, marks: Path, faults: Sequence[Fault]) -> None:
        self._bench, self._sandbox, self._marks = bench, bench.sandbox, marks
        self._pending = [*faults]
        self._struck_at = 0.0
        self._stopped: float | None = time.time()
        """Since when SLURM runs no job of the training."""
        self._lost_node = self._limited_job = ""
        self._read = 0
        self._noticed = True
        """Whether SLURM knows of a lost node."""
        self.seen = Watched(time.time())

    def follow(self) -> Watched:
        """Watch until the last step, or until no step was taken for a while."""
        newest = time.time()
        while self.seen.last() < self._bench.steps and time.time() - newest < STUCK_S:
            if self._look():
                newest = time.time()
                self._act()
            self._look_at_jobs()
            time.sleep(POLL_S)
        self._goes_on(time.time())
        if self._lost_node:
            self._sandbox.restore_node(self._lost_node)
        return self.seen

    def _look(self) -> bool:
        """Read new marks; return whether a step was completed since the last look."""
        with contextlib.suppress(FileNotFoundError), (self._marks / "steps").open() as stream:
            stream.seek(self._read)
            text = stream.read()
            text = text[: text.rfind("\n") + 1]
            self._read += len(text)
            for line in text.splitlines():
                step, at = line.split()
                self.seen.steps.append((int(step), float(at)))
            return bool(text)
        return False

    def _act(self) -> None:
        """Restore a lost node once the training goes on without it, and strike if it is time."""
        settled = self.seen.steps[-1][1] > self._struck_at + SETTLED_S
        if self._lost_node and settled:
            self._goes_on(time.time())
            self._sandbox.restore_node(self._lost_node)
            self._lost_node = ""
        if not self._pending or not settled or self._limited_job:
            return
        due = self.seen.last() >= self._pending[0].step
        running = [one for one in self._jobs() if one[1] == "RUNNING"] if due else []
        if running:
            self._struck_at = time.time()
            self.seen.struck.append((self._pending[0], self.seen.last(), self._struck_at))
            self._strike(self._pending.pop(0), job=running[0][0], nodes=running[0][2])

    def _jobs(self) -> list[list[str]]:
        """Return id, state and nodes of the training's jobs."""
        said = self._sandbox.command("squeue", "-h", "--partition=low", "--format=%i|%T|%N")
        return [line.split("|") for line in said.splitlines()]

    def _look_at_jobs(self) -> None:
        try:
            running = [job for job, state, _ in self._jobs() if state == "RUNNING"]
        except SlurmError:
            return
        now = time.time()
        if not running:
            self._noticed = True
            self._stopped = self._stopped or now
        elif self._noticed:
            self._goes_on(now)

    def _goes_on(self, now: float) -> None:
        """Close the interval of SLURM, and give a job whose limit was shortened its time back."""
        if self._stopped is None:
            return
        self.seen.waits.append((self._stopped, now))
        self._stopped = None
        if self._limited_job:
            with contextlib.suppress(SlurmError):
                limit = f"TimeLimit={self._bench.minutes()}"
                self._sandbox.command("scontrol", "update", f"JobId={self._limited_job}", limit)
            self._limited_job = ""

    def _strike(self, fault: Fault, job: str, nodes: str) -> None:
        if fault.kind == "kill-rank":
            os.kill(int((self._marks / f"pid-{fault.target}").read_text()), signal.SIGKILL)
        elif fault.kind == "preemption":
            asked = ("--partition=high", f"--nodelist={nodes}", f"--nodes={NODES}", "--exclusive")
            self._sandbox.command("sbatch", *asked, "--output=/dev/null", f"--wrap=sleep {PREEMPTED_S}")
        elif fault.kind == "lost-node":
            self._lost_node = expand(nodes)[fault.target]
            self._stopped, self._noticed = time.time(), False
            self._sandbox.kill_node(self._lost_node, with_jobs=True)
        else:
            self._limited_job = job
            self._sandbox.command("scontrol", "update", f"JobId={job}", f"EndTime=now+{TIMES_UP_S}")
        print(f"    step {self.seen.last()}: {fault.kind}", file=sys.stderr, flush=True)


def watch(way: str, bench: Bench, faults: Sequence[Fault]) -> Watched:
    """Train in one way, and leave nothing of the training in the sandbox."""
    marks = bench.folder / f"{way}-{'faulty' if faults else 'plain'}"
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
    print(f"{way}: without faults", file=sys.stderr, flush=True)
    plain = watch(way, bench, ())
    if plain.last() < bench.steps:
        return {"failed": f"without faults it stopped at step {plain.last()}"}
    print(f"{way}: with faults", file=sys.stderr, flush=True)
    faulty = watch(way, bench, faults)
    if not faulty.steps:
        return {"failed": "the training for the faults took no step"}
    found = figures(plain, faulty)
    if found["last_step"] < bench.steps:
        found["failed"] = f"it stopped at step {found['last_step']} of {bench.steps}"
    return found


def missing(way: str) -> str | None:
    """Return why a way can't be measured here."""
    package = {"lightning": "lightning", "ft_launcher": "nvidia_resiliency_ext"}.get(way)
    return f"{package} is not installed" if package and find_spec(package) is None else None


@contextlib.contextmanager
def prepared(steps: int, save_every: int, kept: Path | None) -> Iterator[Bench]:
    """Yield the sandbox and a project that holds the training."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with contextlib.ExitStack() as stack:
        folder = kept or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmddp-goodput-")))
        shutil.copytree(PEERS, folder / "project")
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmddp-")))
        sandbox = FaultySandbox(
            f"goodput{os.getpid()}", root=short / "sandbox", nodes=NODES + 1, cpus=2, gpus=0
        )
        stack.callback(sandbox.down)
        sandbox.up()
        yield Bench(sandbox, folder, steps, save_every)


def verdict(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether the goals are held; a peer that did not reach the last step is no best peer."""
    peers = [one["lost_s"] for way, one in found.items() if way != "slurmddp" and "failed" not in one]
    ours = found.get("slurmddp", {"failed": "not measured"})
    if "failed" in ours:
        return {"held": False, "held_to_peer": False}
    return {
        "held": ours["ratio"] <= GOAL,
        "held_to_peer": bool(peers) and ours["lost_s"] <= GOAL_TO_PEER * min(peers),
    }


def show(found: Mapping[str, Mapping[str, Any]], faults: Sequence[Fault]) -> None:
    head = ["way", "without", "time", "ratio", "lost", "SLURM", "twice", "last step"]
    head += [fault.kind for fault in faults]
    print("".join(f"{word:>12}" for word in head))
    for way, one in found.items():
        names = ("time_without_s", "time_s", "ratio", "lost_s", "slurm_s", "steps_twice", "last_step")
        cells = [str(one[name]) for name in names if name in one]
        cells += [str(fault["lost_s"]) for fault in one.get("faults", ())]
        print("".join(f"{cell:>12}" for cell in [way, *cells]), one.get("failed", ""))


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=2, help="length without faults (2)")
    made.add_argument("--save-every", type=int, default=300, help=f"steps of {STEP_S} s between saves (300)")
    made.add_argument("--seed", type=int, default=0, help="the faults follow from it (0)")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    made.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for logs, which stays")
    return made


def main() -> int:
    asked = options().parse_args()
    steps = round(asked.minutes * 60 / STEP_S)
    faults = trace(asked.seed, steps)
    found: dict[str, dict[str, Any]] = {}
    with prepared(steps, asked.save_every, asked.keep and asked.keep.absolute()) as bench:
        for way in asked.ways:
            reason = missing(way)
            found[way] = {"failed": reason} if reason else measure(way, bench, faults)
    show(found, faults)
    held = verdict(found)
    settings = {"minutes": asked.minutes, "save_every": asked.save_every, "seed": asked.seed}
    keep(asked.output, {"ways": found, **held, **settings, "trace": [asdict(fault) for fault in faults]})
    for name, text in (
        ("held", f"slurmddp takes at most {GOAL} of its time without faults"),
        ("held_to_peer", f"slurmddp loses at most {GOAL_TO_PEER} of the best peer's loss"),
    ):
        print(f"{text}: {'held' if held[name] else 'not held'}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
