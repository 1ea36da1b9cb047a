"""Query and command SLURM about the job that runs the batch step."""

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
"""Time-out in seconds of a connection to the slurmd of a node."""
_EARLY_S = 60
"""Seconds by which SLURM may send the signal of `--signal` too early (sbatch(1))."""
_MOST_QUERIES = 40
"""Queries before giving up on an unreachable slurmctld (about 15 minutes with pauses)."""
_SCRIPT_KILLED = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
"""SLURM's reasons for the end of a job whose batch script was killed."""
_COMMAND = re.compile(r" Command=(.*?)(?: SubmitLine=| \w+=/|$)")
"""The script of a job in `scontrol -o show job`; newer SLURMs print the sbatch line after it."""
_Value = TypeVar("_Value")


def is_reachable(address: str, port: str) -> bool:
    """Return whether a slurmd accepts a connection; True if its address is not known."""
    import socket

    if not address or not port.isdigit():
        return True

    try:
        socket.create_connection((address, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


class SlurmJob:
    """The SLURM job in which this process runs: queries and commands for it, and the newest replies.

    `poll` refreshes `facts`, and `poll_patiently` also refreshes `state`. The other queries ask SLURM at each
    call.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        command: Callable[[Sequence[str], Mapping[str, str], float], CommandResult] = run_command,
        sleep: Callable[[float], None] = time.sleep,
        log: Callable[[str], None] = print,
        names: Collection[str] = (),
    ) -> None:
        """Prepare the queries about the job.

        Args:
            environ: the environment variables of the job.
            command: a function that runs a command of SLURM; it gets the command, its environment variables
                and a time-out in seconds.
            sleep: a function that waits for a number of seconds.
            log: called with each line for the log of the batch step.
            names: the name of the run and the name of its jobs, by which the job is recognized.
        """
        self.environ = environ
        self.sleep = sleep
        self.log = log
        self.id = job_id(environ) or ""
        self.restart_count = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.node_list = environ.get("SLURM_JOB_NODELIST", "")
        self.facts: dict[str, str] = {}
        """The newest output of `scontrol show job`; empty without a reply."""
        self.state = requeue_policy.RUNNING
        """The job's state after the end of its ranks, such as `TIMEOUT`: a state name of `requeue_policy`."""
        self.is_forgotten = False
        """Whether SLURM has given the job's id to another job, because slurmctld has lost its state."""
        self._names = names
        self._command = command

    @property
    def hosts(self) -> list[str]:
        return hosts_of(self.node_list)

    @property
    def restarts(self) -> int:
        """The number of times that SLURM has requeued the job, read from `facts`; 0 if unknown."""
        restarts = self.facts.get("Restarts", "")
        return int(restarts) if restarts.isdigit() else 0

    def _run(self, command: Sequence[str]) -> CommandResult:
        return self._command(command, self.environ, _TIMEOUTS_S[command[0]])

    def scontrol(self, *arguments: str) -> CommandResult:
        return self._run(["scontrol", *arguments])

    def queue(self, *selection: str) -> list[QueuedJob] | None:
        """Return this account's jobs that options of squeue select; None if SLURM does not answer."""
        reply = self._run(queue_command("--user", str(os.getuid()), *selection))
        return parse_queue(reply.out) if reply.code == 0 else None

    def sbatch(self, *arguments: str) -> CommandResult:
        """Run sbatch without the variables of this job."""
        # Imported here, because most attempts end without a submission.
        from slurmddp.environments.scrub import scrub

        return self._command(["sbatch", *arguments], scrub(self.environ), _TIMEOUTS_S["sbatch"])

    def scancel(self) -> CommandResult:
        return self._run(["scancel", self.id])

    @property
    def script_was_killed(self) -> bool:
        """Whether SLURM reports that the batch script of the job was killed, alone or with its node."""
        return self.facts.get("Reason", "").startswith(_SCRIPT_KILLED)

    def is_near_limit(self, lead_s: float) -> bool:
        """Return whether SLURM may have sent the signal that comes `lead_s` before the time limit."""
        limit_s, run_time_s = _limit_and_run_time(self.facts)
        return limit_s is not None and run_time_s >= limit_s - lead_s - _EARLY_S

    def poll(self) -> CommandResult:
        """Run `scontrol show job` once, store its output in `facts` and return its result.

        `facts` is empty if SLURM does not answer, or has given the id to another job.
        """
        reply = self.scontrol("-o", "show", "job", self.id)
        facts = parse_facts(reply.out) if reply.code == 0 else {}
        self.is_forgotten = bool(facts) and not self._is_this_job(facts, reply.out)
        if self.is_forgotten:
            facts = {}
        self.facts = facts
        return reply

    def _is_this_job(self, facts: Mapping[str, str], text: str) -> bool:
        """Return whether `scontrol show job` shows this job, and not another job with its id."""
        if not self._names or facts.get("JobName") in self._names:
            return True

        # A job that was renamed is recognized by the path of its script.
        command = _COMMAND.search(text)
        script = script_of(self.id, command[1]) if command else ""
        return may_be_of(self._names, "", script)

    def poll_patiently(self) -> None:
        """Query SLURM until it answers, for about 15 minutes at most; then refresh `facts` and `state`."""
        for attempt in range(1, _MOST_QUERIES + 1):
            reply = self.poll()
            if reply.code == 0 or (attempt >= 3 and not reply.is_retryable):
                break
            if attempt < _MOST_QUERIES:
                self.sleep(min(attempt, 30))

        self.state = state_of(self.facts, self.restart_count, self._preemption_requeues)

    def config(self, key: str) -> str:
        """Return a value of SLURM's configuration; empty if it is not known."""
        return parse_facts(self.scontrol("show", "config").out).get(key, "")

    def partition(self, key: str) -> str:
        """Return a value of the job's partition; empty if it is not known."""
        name = self.environ.get("SLURM_JOB_PARTITION", "")
        if not name:
            return ""

        # Without -a scontrol shows no partition that is hidden or that the account may not use.
        reply = self.scontrol("-a", "-o", "show", "partition", name)
        return parse_facts(reply.out).get(key, "")

    def preemption_grace(self) -> str:
        """Return the seconds between a preemption's SIGTERM and the end of the job; empty if not known.

        Where qualities of service decide who preempts whom, SLURM ignores the GraceTime of partitions, and
        only its database holds the GraceTime of a quality of service.
        """
        # Imported here, because preemption by quality of service is rare.
        from slurmddp.slurm.units import parse_seconds

        if self.config("PreemptType") != "preempt/qos":
            return self.partition("GraceTime")

        grace_s = parse_seconds(self._quality_of_service("GraceTime"))
        return "" if grace_s is None else str(grace_s)

    def _quality_of_service(self, key: str) -> str:
        """Return a value of the job's quality of service; empty if it is not known."""
        name = self.environ.get("SLURM_JOB_QOS", "")
        if not name:
            return ""
        reply = self._run(["sacctmgr", "-nP", "show", "qos", name, f"format={key}"])
        return reply.out.strip() if reply.code == 0 else ""

    def nodes(self, names: str) -> list[dict[str, str]]:
        """Return the fields of `scontrol show nodes` for each node of a host list; empty without a reply."""
        if not names:
            return []

        reply = self.scontrol("-a", "-o", "show", "nodes", names)
        if reply.code != 0:
            return []
        return [facts for facts in map(parse_facts, reply.out.splitlines()) if "NodeName" in facts]

    def _preemption_requeues(self) -> bool:
        """Return whether SLURM requeues this job by itself at a preemption; False if that is not known."""
        if self.facts.get("Requeue") != "1":
            return False

        mode = ""
        preempt_type = self.config("PreemptType")
        if preempt_type == "preempt/partition_prio":
            mode = self.partition("PreemptMode")
        elif preempt_type == "preempt/qos":
            mode = self._quality_of_service("PreemptMode")
            # `cluster` means that the quality of service has no mode of its own.
            if mode == "cluster":
                mode = self.config("PreemptMode")
        # A flag may precede the mode: `GANG,REQUEUE`, `WITHIN,REQUEUE`, since 25.05 `PRIORITY,REQUEUE`.
        return "REQUEUE" in mode.upper().split(",")

    def unanswering(self, nodes: Iterable[Mapping[str, str]]) -> set[str]:
        """Return the names of the nodes whose slurmd accepts no connection."""
        probed = [*nodes]
        default_port = "" if all(node.get("Port") for node in probed) else self.config("SlurmdPort")

        def probe(node: Mapping[str, str]) -> Callable[[], bool]:
            return lambda: is_reachable(node.get("NodeAddr", ""), node.get("Port") or default_port)

        # All nodes are probed at once, because SLURM may kill this process soon.
        await_replies = ask_at_once(
            {node["NodeName"]: probe(node) for node in probed}, limit_s=_CONNECT_S + 1.0
        )
        replies = await_replies()
        return {node["NodeName"] for node in probed if not replies.get(node["NodeName"])}


def ask_at_once(
    queries: Mapping[str, Callable[[], _Value]], limit_s: float = 60.0
) -> Callable[[], dict[str, _Value]]:
    """Start all queries at once, each in a thread of its own, and return without waiting for them.

    Args:
        queries: functions that return a value each, by name.
        limit_s: seconds after which a query is no longer waited for.

    Returns:
        A function that waits for the queries, and returns the values that came within the limit, by name.
    """
    import threading

    values: dict[str, _Value] = {}

    def ask(name: str) -> None:
        values[name] = queries[name]()

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in queries]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s

    def await_values() -> dict[str, _Value]:
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A copy, because a late thread may still add its value.
        return {**values}

    return await_values


def hosts_of(node_list: str) -> list[str]:
    """Return the names in a host list of SLURM; empty for `(null)` and for any other text."""
    # Imported here, because most starts of the batch step expand no host list.
    from slurmddp.environments.hostlist import expand

    if node_list == "(null)":
        return []
    try:
        return list(expand(node_list))
    except ConfigError:
        return []


def state_of(facts: Mapping[str, str], restart_count: int, preemption_requeues: Callable[[], bool]) -> str:
    """Return the state of a job whose ranks have ended, such as `TIMEOUT`: a state name of `requeue_policy`.

    Args:
        facts: the output of `scontrol show job`; empty if SLURM did not answer.
        restart_count: the number of requeues before this start of the job.
        preemption_requeues: returns whether SLURM requeues a preempted job of this partition by itself.
    """
    restarts = facts.get("Restarts", "")
    if restarts.isdigit() and int(restarts) > restart_count:
        return requeue_policy.REQUEUED

    state = facts.get("JobState", "")
    preempted = facts.get("PreemptTime", "")[:1].isdigit()
    if state.startswith(("PENDING", "REQUEUED")):
        return requeue_policy.REQUEUED
    # SLURM preempts the job, and its ranks ended within the grace time.
    if state.startswith("RUNNING") and preempted:
        return requeue_policy.PREEMPTED
    if not state or state.startswith(("RUNNING", "CONFIGURING", "SUSPENDED")):
        return requeue_policy.RUNNING
    if state.startswith("CANCELLED"):
        return requeue_policy.CANCELLED
    if state.startswith("COMPLETING") and preempted:
        # SLURM ends the job and does not requeue it. If the partition requeues preempted jobs, a person must
        # have cancelled this job during the grace time.
        return requeue_policy.CANCELLED if preemption_requeues() else requeue_policy.PREEMPTED
    if state.startswith("PREEMPTED") or preempted:
        return requeue_policy.PREEMPTED
    # While a job is being ended, its state is COMPLETING and no longer shows why; only the reason does.
    if state.startswith("NODE_FAIL") or facts.get("Reason", "").startswith(("NodeDown", *_SCRIPT_KILLED)):
        return requeue_policy.NODE_FAIL

    limit_s, run_time_s = _limit_and_run_time(facts)
    if state.startswith("TIMEOUT") or (limit_s is not None and run_time_s >= limit_s):
        return requeue_policy.TIMEOUT
    return requeue_policy.CANCELLED


def _limit_and_run_time(facts: Mapping[str, str]) -> tuple[float | None, float]:
    """Return a job's time limit (None: no limit) and the time that it has run, both in seconds."""
    # Imported here, because `begin` does not need this module.
    from slurmddp.slurm.units import parse_seconds

    limit_s = parse_seconds(facts.get("TimeLimit", "").lower())
    run_time_s = parse_seconds(facts.get("RunTime", "").lower())
    return limit_s, run_time_s or 0
