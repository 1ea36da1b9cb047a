"""The faults: what each one breaks, how it is done to a training, and their moments, drawn from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from chaos import disk
from chaos.training import Training
from slurmddp.checkpoint.files.manifest import WRITING, checkpoint_folders
from slurmddp.errors import ConfigError, SlurmError
from slurmddp.near_matches import near_matches
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.run_processes import ranks_of

TIMES_UP_S = 30
"""How long before its end a job learns that its time limit was changed."""
SAVE_WAIT_S = 60
_HANDED_OVER_S = 0.5
"""Within this time an agent begins to write a state that its ranks have handed over."""
WRITTEN_WAIT_S = 20
"""How long a fault waits for the end of such a write."""
START_WAIT_S = 120
"""How long a fault waits for the next attempt, or for the end of one."""
BATCH_HOST_CUT_S = (30.0, 45.0)
"""Longer than agents wait for each other, shorter than SLURM waits for a node."""
SERVER_STOP_S = (10.0, 60.0)
CLIENT_HANG_S = 5.0
"""Longer than an agent needs to end and report its exit code on an idle machine."""


@dataclass(frozen=True)
class Scene:
    """The objects that a fault may change."""

    sandbox: FaultySandbox
    training: Training
    disk: Path | None = None
    """The small file system that holds the project with its run folders, where there is one."""

    def ranks(self) -> list[psutil.Process]:
        return ranks_of(self.training.folder.path, self.training.attempt)


@dataclass(frozen=True)
class Struck:
    """A fault that happened: its description, its time, and whether the attempt must end (None: it may)."""

    what: str
    at: float
    interrupts: bool | None = True
    attempt: int | None = None
    """The last attempt that the fault ended, where it ended several."""
    broken: str = ""
    """A promise that did not hold while the fault was done, in words."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    purpose: str
    inject: Callable[[Scene, random.Random], Struck]
    needs_root: bool = False
    needs_shared: bool = False
    """Whether the nodes must see the project through clients of a shared file system."""


class MissedError(Exception):
    """The fault could not be done: what it needed was no longer there."""


def signal_rank(scene: Scene, luck: random.Random, sent: signal.Signals) -> Struck:
    ranks = scene.ranks()
    if not ranks:
        raise MissedError("no rank runs")
    number = luck.randrange(len(ranks))
    _send(ranks[number], sent)
    return Struck(f"{sent.name} to rank {number}", time.time())


def lose_node(scene: Scene, luck: random.Random, *, with_jobs: bool) -> Struck:
    node, away_s = luck.choice(scene.training.nodes), _absence(scene, luck)
    at = time.time()
    try:
        scene.sandbox.kill_node(node, with_jobs=with_jobs)
        time.sleep(away_s)
    finally:
        scene.sandbox.restore_node(node)
    what = "all processes" if with_jobs else "slurmd"
    return Struck(f"{what} of {node} killed, back after {away_s:.1f} s", at, with_jobs or None)


def cut_link(scene: Scene, luck: random.Random) -> Struck:
    return _cut(scene, luck.choice(scene.training.nodes), _absence(scene, luck))


def cut_batch_host(scene: Scene, luck: random.Random) -> Struck:
    return _cut(scene, scene.training.nodes[0], luck.uniform(*BATCH_HOST_CUT_S))


def _cut(scene: Scene, node: str, away_s: float) -> Struck:
    at = time.time()
    try:
        scene.sandbox.cut_link(node)
        time.sleep(away_s)
    finally:
        scene.sandbox.restore_link(node)
    return Struck(f"link of {node} cut for {away_s:.1f} s", at, None)


def _absence(scene: Scene, luck: random.Random) -> float:
    """Return for how long a node is away: half of the times until the job has gone on without it.

    SLURM gives a silent node up after twice its timeout and some seconds, ends the job elsewhere and holds it
    for 6 s. A node that comes back just when the job may start is given the job while it still ends the old
    one: SLURM then takes the node out of service and holds the job ("launch failed requeued held") until a
    person comes. Real sites hold a job for 120 s; here every third return hit that moment.
    """
    patience = scene.sandbox.request.slurmd_timeout_s
    return luck.uniform(1, patience / 2) if luck.random() < 0.5 else 2 * patience + luck.uniform(40, 50)


def preempt(scene: Scene, luck: random.Random) -> Struck:
    nodes, seconds = scene.training.nodes, luck.randint(1, 3)
    scene.sandbox.command(
        "sbatch",
        "--partition=high",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        "--exclusive",
        "--output=/dev/null",
        f"--wrap=sleep {seconds}",
    )
    return Struck(f"a job of higher priority takes the nodes for {seconds} s", time.time())


def preempt_start(scene: Scene, luck: random.Random) -> Struck:
    """Preempt the training, and the next two attempts before their first step."""
    training = scene.training
    preempt(scene, luck)
    for _ in range(2):
        attempt = training.attempt
        if not training.wait(partial(_starts, training, attempt), START_WAIT_S):
            raise MissedError("no attempt was seen to start")
        preempt(scene, luck)
    return Struck("preempted, then twice more at the start", time.time(), attempt=training.attempt)


def _starts(training: Training, than: int) -> bool:
    """Say whether an attempt after `than` has an agent; MissedError when it has taken a step."""
    attempt = training.attempt
    if attempt <= than:
        return False
    if any(event["attempt"] == attempt for event in training.events("first_step")):
        raise MissedError("the attempt had taken its first step already")
    log = training.folder.log_dir(attempt) / "node-0.log"
    return log.exists() and log.stat().st_size > 0


def set_down(scene: Scene, luck: random.Random) -> Struck:
    node, away_s, at = luck.choice(scene.training.nodes), luck.uniform(1, 5), time.time()
    update = ("scontrol", "update", f"NodeName={node}")
    scene.sandbox.command(*update, "State=DOWN", "Reason=chaos")
    try:
        time.sleep(away_s)
    finally:
        with contextlib.suppress(SlurmError):  # A slurmd that registers again brings its node back.
            scene.sandbox.command(*update, "State=RESUME")
    return Struck(f"{node} set DOWN, resumed after {away_s:.1f} s", at)


def submit_at_once(scene: Scene, luck: random.Random) -> Struck:
    """Stop the training, then resume it twice and train it once more at the same moment."""
    training, at = scene.training, time.time()
    training.place.command("stop", training.folder.name)
    if not training.wait(lambda: training.history().settled, START_WAIT_S):
        raise MissedError("the training did not stop")
    if training.finished:
        raise MissedError("the training had finished already")
    training.place.at_once(training.resume_words, training.resume_words, training.train_words)
    jobs = scene.sandbox.jobs()
    broken = "" if len(jobs) == 1 else f"SLURM has {len(jobs)} jobs of the run, not one"
    return Struck("stopped, then two resumes and a train at once", at, broken=broken)


def reach_time_limit(scene: Scene, luck: random.Random) -> Struck:
    training, job, attempt = scene.training, scene.training.job_id, scene.training.attempt
    at = time.time()
    scene.sandbox.command("scontrol", "update", f"JobId={job}", f"EndTime=now+{TIMES_UP_S}")
    training.wait(lambda: training.attempt > attempt or training.history().settled, 3 * TIMES_UP_S)
    if not training.history().settled:
        scene.sandbox.command("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    told = [event["time"] for event in training.events("signalled") if event.get("attempt") == attempt]
    return Struck(f"its time limit moved to {TIMES_UP_S} s from then", told[-1] if told else at)


def restart_controller(scene: Scene, luck: random.Random) -> Struck:
    down_s, at = luck.uniform(0, 5), time.time()
    scene.sandbox.restart_controller(down_s)
    return Struck(f"slurmctld restarted, away for {down_s:.1f} s", at, None)


def fill_disk(scene: Scene, luck: random.Random) -> Struck:
    if scene.disk is None:
        raise MissedError("there is no small file system to fill")
    training, attempt, full_s = scene.training, scene.training.attempt, luck.uniform(1, 6)
    spare = luck.choice((0, 0, luck.randrange(1 << 20)))
    at = time.time()
    with disk.full(scene.disk, spare):
        time.sleep(full_s)
    what = f"the disk of the run was full for {full_s:.1f} s, with {spare} bytes left"
    return Struck(what, at, True if training.attempt > attempt else None)


def stop_server(scene: Scene, luck: random.Random) -> Struck:
    """Let the file server answer nobody for a while."""
    stopped_s = luck.uniform(*SERVER_STOP_S)
    at = time.time()
    # Nothing may look at the project meanwhile: on GlusterFS this machine is a client as well.
    with scene.sandbox.stopped_file_server():
        time.sleep(stopped_s)
    return Struck(f"the file server stopped for {stopped_s:.1f} s", at, None)


def hang_client_at_end(scene: Scene, luck: random.Random) -> Struck:
    """Preempt the training, and let the file client of a node hang when the first rank has ended."""
    node = luck.choice(scene.training.nodes)
    rank_count = len(scene.ranks())
    struck = preempt(scene, luck)
    if not scene.training.wait(lambda: len(scene.ranks()) < rank_count, START_WAIT_S):
        raise MissedError("no rank ended")
    with scene.sandbox.hung_file_client(node):
        time.sleep(CLIENT_HANG_S)
    return Struck(
        f"{struck.what}; the file client of {node} hung for {CLIENT_HANG_S:.0f} s at the end", struck.at
    )


def remove_open_files(scene: Scene, luck: random.Random) -> Struck:
    """Remove the rank logs and the oldest checkpoint on the server: open handles of them become stale."""
    folder = scene.training.folder
    checkpoints = checkpoint_folders(folder.checkpoints_dir)
    if len(checkpoints) < 2:
        raise MissedError("there is one checkpoint only")
    at = time.time()
    logs = sorted(folder.log_dir(scene.training.attempt).glob("rank-*"))
    for log in logs:
        log.unlink(missing_ok=True)
    shutil.rmtree(checkpoints[-1], ignore_errors=True)
    return Struck(f"{len(logs)} logs of ranks and {checkpoints[-1].name} removed on the server", at, None)


def flip_bit(path: Path, luck: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at, bit = luck.randrange(len(content)), luck.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} flipped in"


def truncate_file(path: Path, luck: random.Random) -> str:
    size = luck.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"cut to {size} bytes:"


def damage(scene: Scene, luck: random.Random, act: Callable[[Path, random.Random], str]) -> Struck:
    """Damage a file of the newest checkpoint while all ranks stand still, then kill them: it is read next."""
    victims = scene.ranks()
    try:
        for victim in victims:
            _send(victim, signal.SIGSTOP)
        root = scene.training.folder.checkpoints_dir
        time.sleep(_HANDED_OVER_S)  # A checkpoint that an agent still writes would be the newest one.
        scene.training.wait(lambda: not [*root.glob(f"{WRITING}*")], WRITTEN_WAIT_S)
        folder = checkpoint_folders(root)[0]
        path = luck.choice(sorted(file for file in folder.iterdir() if file.is_file()))
        before = path.stat()
        what = act(path, luck)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        for victim in victims:
            _send(victim, signal.SIGKILL)
    return Struck(f"{what} {folder.name}/{path.name}, ranks killed", time.time())


def kill_during_save(scene: Scene, luck: random.Random) -> Struck:
    ranks, shape = scene.ranks(), scene.training.shape
    if len(ranks) < shape.nodes * shape.ranks_per_node:
        raise MissedError("a rank is gone")
    folder, delay_s = scene.training.folder.checkpoints_dir, luck.choice((0.0, luck.uniform(0, 0.002)))
    deadline = time.monotonic() + SAVE_WAIT_S
    while not (writing := _writing(folder)):
        if time.monotonic() > deadline or not ranks[0].is_running():
            raise MissedError("no checkpoint was written any more")
    time.sleep(delay_s)
    _send(ranks[0], signal.SIGKILL)
    at = time.time()
    caught = "inside" if writing & _writing(folder) else "just after"
    return Struck(f"SIGKILL to rank 0 {1000 * delay_s:.1f} ms into a save ({caught})", at)


def _writing(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.name.startswith(f"{WRITING}step-")}


def _send(process: psutil.Process, sent: signal.Signals) -> None:
    try:
        process.send_signal(sent)
    except psutil.NoSuchProcess as error:
        raise MissedError("the rank was gone already") from error


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-rank", "SIGKILL to one rank", partial(signal_rank, sent=signal.SIGKILL)),
        Fault("sigterm-rank", "SIGTERM to one rank", partial(signal_rank, sent=signal.SIGTERM)),
        Fault("preempt", "a job of higher priority takes the nodes", preempt),
        Fault("preempt-start", "preempted, then twice more before the first step", preempt_start),
        Fault("submit-at-once", "stopped, then submitted by three commands at once", submit_at_once),
        Fault("time-limit", "the job reaches its time limit", reach_time_limit),
        Fault(
            "kill-slurmd", "kill -9 of a node's slurmd; its jobs live on", partial(lose_node, with_jobs=False)
        ),
        Fault("kill-node", "power cut: all processes of a node die", partial(lose_node, with_jobs=True)),
        Fault("cut-link", "a node is off the network for a while", cut_link, needs_root=True),
        Fault("cut-batch-host", "the first node is off the network for 30 to 45 s", cut_batch_host, True),
        Fault("set-down", "a node is set DOWN by hand and resumed", set_down),
        Fault("restart-controller", "slurmctld is restarted", restart_controller),
        Fault("fill-disk", "the disk under the run folder is full for a while", fill_disk, needs_root=True),
        Fault(
            "flip-bit",
            "a bit of the newest checkpoint flips, then all ranks die",
            partial(damage, act=flip_bit),
        ),
        Fault(
            "truncate",
            "a file of the newest checkpoint is cut short, then all ranks die",
            partial(damage, act=truncate_file),
        ),
        Fault("kill-during-save", "SIGKILL to rank 0 while it writes a checkpoint", kill_during_save),
        Fault(
            "stop-server",
            "the file server stops for 10 to 60 s",
            stop_server,
            needs_root=True,
            needs_shared=True,
        ),
        Fault(
            "hang-client",
            "preempted, and a node's file client hangs for 5 s at the end",
            hang_client_at_end,
            needs_root=True,
            needs_shared=True,
        ),
        Fault(
            "remove-files",
            "logs and a checkpoint vanish on the file server (ESTALE)",
            remove_open_files,
            needs_root=True,
            needs_shared=True,
        ),
    )
}


def choose(names: str | None, *, root: bool, shared: bool = False) -> list[str]:
    """Return the kinds of faults to inject.

    Args:
        names: the value of --kinds; None: all kinds that are possible.
        root: whether this process may use namespaces and mounts.
        shared: whether the nodes see the project through clients of a shared file system.

    Raises:
        ConfigError: a name is unknown, or its fault is impossible.
    """
    if names is None:
        return [
            name
            for name, fault in FAULTS.items()
            if (root or not fault.needs_root) and (shared or not fault.needs_shared)
        ]

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in FAULTS:
            raise ConfigError(f"There is no fault {name!r}.", hint=near_matches(name, FAULTS))
        if FAULTS[name].needs_root and not root:
            raise ConfigError(f"{name} needs root on this machine.", hint="Leave it out of --kinds.")
        if FAULTS[name].needs_shared and not shared:
            raise ConfigError(
                f"{name} needs a shared file system.", hint="Add --shared, or leave it out of --kinds."
            )
    if not chosen:
        raise ConfigError("--kinds names no fault.", hint=f"Known: {', '.join(FAULTS)}.")
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Planned:
    """One fault to come: its kind, the steps to let pass before it, and where its own luck starts."""

    number: int
    kind: str
    after_steps: int
    seed: str

    def luck(self) -> random.Random:
        """Return the random numbers of this fault; the same ones at every call."""
        return random.Random(self.seed)


def draw(kinds: Sequence[str], faults: int, seed: int, most_steps: int) -> list[Planned]:
    """Return `faults` planned faults: every kind once in each round, rounds in random order.

    `most_steps` is the largest number of steps to let pass between progress and the next fault.
    """
    luck = random.Random(seed)
    order: list[str] = []
    while len(order) < faults:
        order += luck.sample(kinds, len(kinds))
    return [
        Planned(number, kind, luck.randint(1, most_steps), f"{seed}/{number}")
        for number, kind in enumerate(order[:faults])
    ]
