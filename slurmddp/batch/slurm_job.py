"""The job that runs the batch step: what it asks of SLURM, and the facts that SLURM prints about it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from slurmddp.batch import requeue_policy
from slurmddp.environments.job_id import job_id
from slurmddp.errors import ConfigError
from slurmddp.slurm.command import CommandResult, run_command
from slurmddp.slurm.command_output import QueuedJob, parse_facts, parse_queue, queue_command
from slurmddp.slurm.job_script import may_be_of, script_of

_TIMEOUTS_S = {"scontrol": 20.0, "squeue": 30.0, "scancel": 30.0, "sbatch": 60.0, "sacctmgr": 20.0}
_CONNECT_S = 5.0
_EARLY_S = 60
"""SLURM may send the signal of `--signal` so many seconds early (sbatch(1))."""
_MOST_QUERIES = 40
"""Queries before giving up on an unreachable slurmctld (about 15 minutes with pauses)."""
_SCRIPT_KILLED = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
"""SLURM's reasons for the end of a job whose batch script was killed."""


_COMMAND = re.compile(r" Command=(.*?)(?: SubmitLine=| \w+=/|$)")
"""The script of a job in `scontrol -o show job`; newer SLURMs print the sbatch line after it."""
_Value = TypeVar("_Value")


def answers(address: str, port: str) -> bool:
    """Return whether a slurmd takes a connection; True if its address is not known."""
    import socket

    if not address or not port.isdigit():
        return True
    try:
        socket.create_connection((address, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


class SlurmJob:
    """This job. `poll` refreshes `facts`, `poll_patiently` also `fate`; all else asks SLURM at each call."""

    def __init__(
        self,
        environ: Mapping[str, str],
        command: Callable[[Sequence[str], Mapping[str, str], float], CommandResult] = run_command,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = print,
        names: Collection[str] = (),
    ) -> None:
        """Prepare the questions about the job.

        Args:
            environ: the variables of the job.
            command: runs one of SLURM's commands with variables and a time-out in seconds.
            sleep: waits.
            say: gets one line about a refusal.
            names: the name of the run and the name of its jobs, by which the job is recognized.
        """
        self.environ = environ
        self.id = job_id(environ) or ""
        self.restart_count = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.node_list = environ.get("SLURM_JOB_NODELIST", "")
        self.facts: dict[str, str] = {}
        self.fate = requeue_policy.RUNNING
        self.is_forgotten = False
        """Whether SLURM has given the job's id to another job: a controller lost its state."""
        self._names = names
        self.sleep, self.say = sleep, say
        self._command = command

    @property
    def hosts(self) -> list[str]:
        return hosts_of(self.node_list)

    @property
    def restarts(self) -> int:
        """The number of requeues of the job, according to SLURM."""
        found = self.facts.get("Restarts", "")
        return int(found) if found.isdigit() else 0

    def _run(self, command: Sequence[str]) -> CommandResult:
        return self._command(command, self.environ, _TIMEOUTS_S[command[0]])

    def scontrol(self, *words: str) -> CommandResult:
        return self._run(["scontrol", *words])

    def queue(self, *selection: str) -> list[QueuedJob] | None:
        """Return the selected jobs of this account; None if SLURM does not answer."""
        result = self._run(queue_command("--user", str(os.getuid()), *selection))
        return parse_queue(result.out) if result.code == 0 else None

    def sbatch(self, *words: str) -> CommandResult:
        from slurmddp.environments.scrub import scrub  # Most ends of an attempt submit nothing.

        return self._command(["sbatch", *words], scrub(self.environ), _TIMEOUTS_S["sbatch"])

    def scancel(self) -> CommandResult:
        return self._run(["scancel", self.id])

    @property
    def script_was_killed(self) -> bool:
        """Whether SLURM says that the batch script of the job was killed, alone or with its node."""
        return self.facts.get("Reason", "").startswith(_SCRIPT_KILLED)

    def is_near_limit(self, lead_s: float) -> bool:
        """Return whether SLURM may have sent the signal that comes `lead_s` before the time limit."""
        limit, ran = _limit_and_run_time(self.facts)
        return limit is not None and ran >= limit - lead_s - _EARLY_S

    def poll(self) -> CommandResult:
        """Ask SLURM about this job once and keep the facts, none without an answer."""
        answer = self.scontrol("-o", "show", "job", self.id)
        facts = parse_facts(answer.out) if answer.code == 0 else {}
        self.is_forgotten = bool(facts) and not self._is_own(facts, answer.out)
        self.facts = {} if self.is_forgotten else facts
        return answer

    def _is_own(self, facts: Mapping[str, str], text: str) -> bool:
        """Return whether `scontrol show job` tells of this job, and not of another one with its id."""
        command = _COMMAND.search(text)
        script = script_of(self.id, command[1]) if command else ""
        return not self._names or facts.get("JobName") in self._names or may_be_of(self._names, "", script)

    def poll_patiently(self) -> None:
        """Ask SLURM what it has done with the job; wait for a controller that is away."""
        for attempt in range(1, _MOST_QUERIES + 1):
            answer = self.poll()
            if answer.code == 0 or (attempt >= 3 and not answer.is_retryable):
                break
            if attempt < _MOST_QUERIES:
                self.sleep(min(attempt, 30))
        self.fate = fate_of(self.facts, self.restart_count, self._preemption_requeues)

    def config(self, key: str) -> str:
        """Return a value of SLURM's configuration; empty if it is not known."""
        return parse_facts(self.scontrol("show", "config").out).get(key, "")

    def partition(self, key: str) -> str:
        """Return a value of the job's partition; empty if it is not known."""
        name = self.environ.get("SLURM_JOB_PARTITION", "")
        return (
            parse_facts(self.scontrol("-a", "-o", "show", "partition", name).out).get(key, "") if name else ""
        )

    def preemption_grace(self) -> str:
        """Return the seconds between a preemption's SIGTERM and the end of the job; empty if not known.

        Where qualities of service decide who preempts whom, SLURM ignores the GraceTime of partitions, and
        only its database knows the GraceTime of a quality of service.
        """
        from slurmddp.slurm.units import parse_seconds  # Few sites have such a preemption.

        if self.config("PreemptType") != "preempt/qos":
            return self.partition("GraceTime")
        qos = self.environ.get("SLURM_JOB_QOS", "")
        if not qos:
            return ""

        answer = self._run(["sacctmgr", "-nP", "show", "qos", qos, "format=GraceTime"])
        grace = parse_seconds(answer.out.strip()) if answer.code == 0 else None
        return "" if grace is None else str(grace)

    def nodes(self, names: str) -> list[dict[str, str]]:
        """Return SLURM's facts about each node in a host list."""
        answer = self.scontrol("-a", "-o", "show", "nodes", names) if names else CommandResult(1)
        lines = answer.out.splitlines() if answer.code == 0 else []
        return [facts for facts in map(parse_facts, lines) if "NodeName" in facts]

    def _preemption_requeues(self) -> bool:
        """Return whether SLURM requeues a preempted job of this partition by itself."""
        return (
            self.facts.get("Requeue") == "1"
            and self.config("PreemptType") == "preempt/partition_prio"
            and "REQUEUE" in self.partition("PreemptMode").split(",")  # SLURM 26: `PRIORITY,REQUEUE`
        )

    def unanswering(self, nodes: Iterable[Mapping[str, str]]) -> set[str]:
        """Return the nodes that do not answer; ask all at once, as SLURM may kill this process soon."""
        asked = [*nodes]
        default = "" if all(node.get("Port") for node in asked) else self.config("SlurmdPort")

        def probe(node: Mapping[str, str]) -> Callable[[], bool]:
            return lambda: answers(node.get("NodeAddr", ""), node.get("Port") or default)

        found = ask_at_once({node["NodeName"]: probe(node) for node in asked}, limit_s=_CONNECT_S + 1.0)()
        return {node["NodeName"] for node in asked if not found.get(node["NodeName"])}


def ask_at_once(
    questions: Mapping[str, Callable[[], _Value]], limit_s: float = 60.0
) -> Callable[[], dict[str, _Value]]:
    """Ask all questions at once; the returned function waits for the answers that come within the limit."""
    import threading

    values: dict[str, _Value] = {}

    def ask(name: str) -> None:
        values[name] = questions[name]()

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in questions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + limit_s

    def answers() -> dict[str, _Value]:
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return {**values}

    return answers


def hosts_of(node_list: str) -> list[str]:
    """Return the names in a host list of SLURM; empty for `(null)` and for anything else."""
    from slurmddp.environments.hostlist import expand  # Most starts expand no list.

    try:
        return [] if node_list == "(null)" else list(expand(node_list))
    except ConfigError:
        return []


def fate_of(facts: Mapping[str, str], restart_count: int, preemption_requeues: Callable[[], bool]) -> str:
    """Return the job's fate: a state for SLURM at the end of the ranks.

    Args:
        facts: the output of `scontrol show job`; empty if SLURM did not answer.
        restart_count: the number of requeues at this start of the job.
        preemption_requeues: tells whether SLURM requeues a preempted job of this partition by itself.
    """
    restarts = facts.get("Restarts", "")
    if restarts.isdigit() and int(restarts) > restart_count:
        return requeue_policy.REQUEUED
    state = facts.get("JobState", "")
    preempted = facts.get("PreemptTime", "")[:1].isdigit()
    if state.startswith(("PENDING", "REQUEUED")):
        return requeue_policy.REQUEUED
    if state.startswith("RUNNING") and preempted:
        return requeue_policy.PREEMPTED  # The ranks left within the grace.
    if not state or state.startswith(("RUNNING", "CONFIGURING", "SUSPENDED")):
        return requeue_policy.RUNNING
    if state.startswith("CANCELLED"):
        return requeue_policy.CANCELLED
    if state.startswith("COMPLETING") and preempted:
        # The job ended during the grace of a preemption and was not requeued: a person has cancelled it.
        return requeue_policy.CANCELLED if preemption_requeues() else requeue_policy.PREEMPTED
    if state.startswith("PREEMPTED") or preempted:
        return requeue_policy.PREEMPTED
    # While a job is being ended, its state is COMPLETING and no longer says why.
    if state.startswith("NODE_FAIL") or facts.get("Reason", "").startswith(("NodeDown", *_SCRIPT_KILLED)):
        return requeue_policy.NODE_FAIL
    limit, ran = _limit_and_run_time(facts)
    if state.startswith("TIMEOUT") or (limit is not None and ran >= limit):
        return requeue_policy.TIMEOUT
    return requeue_policy.CANCELLED


def _limit_and_run_time(facts: Mapping[str, str]) -> tuple[float | None, float]:
    """Return the time limit of a job and the time that it has run, in seconds; None for no limit."""
    from slurmddp.slurm.units import parse_seconds  # `begin` has no use for it.

    limit, ran = (parse_seconds(facts.get(key, "").lower()) for key in ("TimeLimit", "RunTime"))
    return limit, ran or 0
