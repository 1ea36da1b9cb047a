"""A run folder, the SLURM around it, and the batch step in between, all in this process."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.batch.attempt import Attempt, read_settings
from slurmddp.batch.begin import begin
from slurmddp.batch.end import AttemptEnd
from slurmddp.batch.first_node import first_node_lost
from slurmddp.batch.slurm_job import SlurmJob
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.slurm.command import CommandResult
from slurmddp.slurm.script import settings
from support.slurm.slurm_jobs import make_job

RUNNING = "JobId=41 JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:05:00 TimeLimit=01:00:00"
ENDING = RUNNING.replace("RUNNING", "COMPLETING")
PREEMPTED = ENDING.replace("Restarts=0", "Restarts=9")
GIVEN_UP = "JobState=PENDING Reason=BeginTime Restarts=1 NodeList="
PARTITION = "PartitionName=low AllowGroups=ALL GraceTime=15 MaxTime=1-00:00:00 State=UP TotalNodes=4"
LONG_AGO = "2020-01-01T00:00:00"
SILENCE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def node(
    name: str, state: str = "ALLOCATED", began: str = LONG_AGO, *, address: str = "", port: int = 0
) -> str:
    """Return SLURM's description of a node."""
    where = f"NodeAddr={address} NodeHostName={name} " + (f"Port={port} " if port else "") if address else ""
    return f"NodeName={name} Arch=x86_64 {where}State={state} SlurmdStartTime={began} LastBusyTime=None\n"


class Killed(Exception):
    """Exception that imitates SIGTERM while the batch step waits for it."""


@dataclass(frozen=True)
class Step:
    """The actions of an attempt's ranks, such as writing files, and the exit code of srun."""

    actions: tuple[Callable[[Run], object], ...] = ()
    code: int = 0

    def __add__(self, other: Step) -> Step:
        return Step(self.actions + other.actions, other.code)


def do(action: Callable[[Run], object]) -> Step:
    return Step((action,))


def exits(code: int) -> Step:
    """Return a step in which srun ends with `code`, and no agent writes an exit code."""
    return Step(code=code)


def leave(codes: Mapping[int, int], code: int) -> Step:
    """Return a step in which agents write the exit codes `codes`, and srun ends with `code`."""

    def write(run: Run) -> None:
        for number, left in codes.items():
            (run.log_dir / f"exit-node-{number}").write_text(f"{left}\n")

    return Step((write,), code)


def leaves(*names: str) -> Step:
    """Return a step that creates files of these names in the attempt's log folder."""
    return do(lambda run: [(run.log_dir / name).touch() for name in names])


def records(failure: Mapping[str, Any]) -> Step:
    """Return a step in which an agent records the first failure."""
    return do(lambda run: (run.log_dir / "failure.json").write_text(json.dumps(failure, indent=1)))


def touches(name: str) -> Step:
    """Return a step that creates a file in the run folder."""
    return do(lambda run: (run.folder.path / name).touch())


def saves(step: int) -> Step:
    def write(run: Run) -> None:
        run.folder.checkpoints_dir.mkdir(exist_ok=True)
        (run.folder.checkpoints_dir / "latest").write_text(f"step-{step}\n")

    return do(write)


FINISH = leave({0: 0, 1: 0}, 0)
STOP = leave({0: 75, 1: 75}, 75)
SAVE = saves(9)
TRAIN = do(lambda run: run.folder.add_event("first_step", attempt=run.attempt, step=1))
STOP_ASKED = touches("stop")


class FakeSlurm:
    """SLURM's commands for one job. Attributes are replies, which functions in `on` may replace."""

    def __init__(self) -> None:
        self.job = RUNNING
        """Reply of `scontrol show job`; `down`: no reply."""
        self.nodes = self.config = self.partition = ""
        self.qos: dict[str, str] = {}
        """Replies of `sacctmgr show qos` by field, such as `GraceTime`; an absent field gets no reply."""
        self.silence = ""
        self.refusal = ""
        """Error text with which sbatch refuses; empty: it accepts the job."""
        self.jobs: dict[str, str] = {}
        """By id of each job in the queue: `STATE|NODES|COMMENT`, perhaps followed by `|SCRIPT`."""
        self.lost_submissions = 0
        """Number of submissions that get no answer; with `queued_anyway` SLURM queues their jobs."""
        self.queued_anyway = False
        self.shows_arguments = True
        """Whether squeue shows scripts with their arguments, which 24.11 and 26.05 do not."""
        self.shows_submissions = True
        """Whether `scontrol show job` shows sbatch's command line, which 24.11 does not."""
        self.silent_queue = 0
        self.on: dict[str, Callable[[], CommandResult | None]] = {}
        """By the beginning of a command (`show job`, `requeue`, `update`, `test-only`, `sbatch`), its
        reply."""
        self.calls: list[list[str]] = []
        self.submitted_with: Mapping[str, str] = {}

    def __call__(self, command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> CommandResult:
        self.calls.append([*command])
        if self.silence and command[0] in ("scontrol", "squeue"):
            return CommandResult(1, err=self.silence)
        return getattr(self, f"_{command[0]}")([*command[1:]], environ)

    def _hook(self, name: str) -> CommandResult | None:
        return self.on[name]() if name in self.on else None

    def _scontrol(self, arguments: list[str], environ: Mapping[str, str]) -> CommandResult:
        if arguments[0] in ("requeue", "update", "release"):
            return self._hook(arguments[0]) or CommandResult(0)

        what = [word for word in arguments if not word.startswith("-")][1]
        if (
            what == "job"
            and not self.shows_arguments
            and arguments[-1] in self.jobs
            and arguments[-1] != "41"
        ):
            script = self.jobs[arguments[-1]].split("|")[-1]
            submission = f"SubmitLine=sbatch {script}" if self.shows_submissions else ""
            return CommandResult(
                0, f"JobId={arguments[-1]} JobState=PENDING Reason=None {submission} WorkDir=/\n"
            )

        if what == "job":
            reply = self._hook("show job")
            return reply or (
                CommandResult(1) if self.job.startswith("down") else CommandResult(0, self.job + "\n")
            )

        if what == "nodes":
            return CommandResult(0, self.nodes)

        return CommandResult(0, {"config": self.config, "partition": self.partition}[what])

    def _sacctmgr(self, arguments: list[str], environ: Mapping[str, str]) -> CommandResult:
        value = self.qos.get(arguments[-1].removeprefix("format="))
        if value is None:
            return CommandResult(1, err="sacctmgr: error: Connection refused")
        return CommandResult(0, f"{value}\n")

    def _squeue(self, arguments: list[str], environ: Mapping[str, str]) -> CommandResult:
        if self.silent_queue:
            self.silent_queue -= 1
            return CommandResult(1, err="slurm_load_jobs error: Socket timed out on send/recv operation")

        asked = (
            arguments[arguments.index("--jobs") + 1].split(",") if "--jobs" in arguments else list(self.jobs)
        )
        if len(asked) == 1 and asked[0] not in self.jobs and "--jobs" in arguments:
            return CommandResult(1, err="slurm_load_jobs error: Invalid job id specified")

        rows = [self._row(job_id) for job_id in asked if job_id in self.jobs]
        return CommandResult(0, "".join(f"{row}\n" for row in rows))

    def _row(self, job_id: str) -> str:
        state, nodes, comment, script = [*self.jobs[job_id].split("|"), "", "", ""][:4]
        shown = script if self.shows_arguments else script.partition(" resubmitted")[0]
        return f"{job_id}|{state}|{nodes}|None|N/A|{comment}|{shown}"

    def _scancel(self, arguments: list[str], environ: Mapping[str, str]) -> CommandResult:
        self.jobs[arguments[0]] = "CANCELLED||"
        return CommandResult(0)

    def _sbatch(self, arguments: list[str], environ: Mapping[str, str]) -> CommandResult:
        assert "SLURM_JOB_ID" not in environ
        if "--test-only" in arguments:
            return self._hook("test-only") or CommandResult(1 if self.refusal else 0, err=self.refusal)

        self.submitted_with = environ
        reply = self._hook("sbatch")
        if reply or self.refusal:
            return reply or CommandResult(1, err=self.refusal)
        if self.lost_submissions:
            self.lost_submissions -= 1
            if self.queued_anyway:
                self._queue(arguments)
            return CommandResult(1, err="sbatch: error: Batch job submission failed: Socket timed out")

        return CommandResult(0, f"{self._queue(arguments)}\n")

    def _queue(self, arguments: list[str]) -> str:
        script = " ".join(word for word in arguments if not word.startswith("-"))
        new = str(len([job_id for job_id in self.jobs if job_id.isdigit() and int(job_id) < 40]) + 1)
        self.jobs[new] = f"PENDING|||{script}"
        return new

    def of(self, *arguments: str) -> list[list[str]]:
        """Return the calls that contain all these arguments."""
        return [call for call in self.calls if set(arguments) <= set(call)]


def refused(text: str = "") -> CommandResult:
    return CommandResult(1, err=text)


class Run:
    """A run folder with a fake SLURM; `start` begins an attempt, lets the ranks do a `Step`, and ends it."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.slurm = FakeSlurm()
        self.folder = RunFolder(tmp_path / "runs" / "it's 50%j")
        self.folder.path.mkdir(parents=True)
        self.project = tmp_path / "project"
        self.project.mkdir()
        values = {"run_dir": self.folder.path, "project_dir": self.project, "run_name": self.folder.name}
        self.folder.job_file.write_text(json.dumps(settings(make_job(**{**values, **changes}))))
        self.environ = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1-2]"}
        self.attempt = -1
        self.said: list[str] = []
        """Lines that the batch step printed before it had claimed an attempt."""
        self.exported: dict[str, str] = {}
        """What `begin` printed for the shell."""
        self.slept: list[float] = []
        self.on_sleep: Callable[[], object] = lambda: None

    @property
    def log_dir(self) -> Path:
        return self.folder.log_dir(self.attempt)

    def log(self, attempt: int = 0) -> str:
        path = self.folder.log_dir(attempt) / "batch.log"
        return path.read_text() if path.exists() else ""

    def _log(self, text: str) -> None:
        with (self.log_dir / "batch.log").open("a") as stream:
            stream.write(f"{text}\n")

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.on_sleep()

    def job(self, log: Callable[[str], None] | None = None, **environ: str) -> SlurmJob:
        names = {read_settings(self.folder).name, self.folder.path.name}
        environ = {**self.environ, **environ}
        return SlurmJob(environ, self.slurm, self._sleep, log or self._log, names=names)

    def attempt_of(self, job: SlurmJob) -> Attempt:
        return Attempt(self.folder, self.attempt, read_settings(self.folder), job.id, job.log)

    def begin(self, *, started_as: str = "", **environ: str) -> int:
        """Begin an attempt and return the exit code; `exported` holds the variables for the shell."""
        with _signals_kept(), contextlib.redirect_stdout(io.StringIO()) as printed:
            code = begin(self.folder, self.job(self.said.append, **environ), started_as=started_as)
        self.exported = dict(re.findall(r"^export SLURMDDP_(\w+)=(.*)$", printed.getvalue(), re.MULTILINE))
        self.exported = {name: value.strip("'") for name, value in self.exported.items()}
        return code

    def start(
        self, step: Step = FINISH, *, started_as: str = "", terminated: bool = False, **environ: str
    ) -> int:
        """Run an attempt with `step` in place of the ranks and return the exit code of the script."""
        code = self.begin(started_as=started_as, **environ)
        if not self.exported:
            return code

        self.attempt = int(self.exported["ATTEMPT"])
        for action in step.actions:
            action(self)
        job = self.job(**environ)
        try:
            with _signals_kept():
                return AttemptEnd(self.attempt_of(job), job, terminated=terminated).conclude(step.code)
        except Killed:
            return -signal.SIGTERM

    def succeed(self) -> int:
        """Run the script as a resubmitted job, with ranks that finish."""
        return self.start(started_as="resubmitted", SLURM_JOB_ID="42")

    def lose_first_node(self, **environ: str) -> list[str]:
        """Let an agent react to the loss of the batch script, and return the changes requested from SLURM."""
        self.slurm.jobs["41"] = "RUNNING||"
        self.attempt = 0
        self.log_dir.mkdir(parents=True, exist_ok=True)
        job = self.job(**environ)
        first_node_lost(self.attempt_of(job), job)
        return [*self.asked(), *(["scancel"] if "CANCELLED" in self.slurm.jobs["41"] else [])]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.events() if event["event"] == name]

    @property
    def end(self) -> tuple[str, str]:
        return self.ends[-1]

    @property
    def ends(self) -> list[tuple[str, str]]:
        return [(event["outcome"], event["next"]) for event in self.events("ended")]

    def asked(self) -> list[str]:
        """Return the changes that were requested from SLURM."""
        changes = [call[1:] for call in self.slurm.calls if {"requeue", "update"} & {*call[1:2]}]
        return [" ".join(call) for call in changes] + ["sbatch"] * len(self.submissions())

    def submissions(self) -> list[list[str]]:
        return [call for call in self.slurm.calls if call[0] == "sbatch" and "--test-only" not in call]

    def questions_to_sbatch(self) -> list[list[str]]:
        """Return the calls of `sbatch --test-only`."""
        return self.slurm.of("--test-only")

    def excluded(self) -> list[dict[str, Any]]:
        path = self.folder.excluded_file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore this process's handler of SIGTERM after the block, because the batch step changes it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
