"""Read how the processes of an attempt ended: its first failure, its restarts in place, the end of each rank.

`failure.json` holds the final cause of an attempt. The files `failure-g<restart_count>.json` hold the
failures after which the ranks restarted in place. `exit-rank-<rank>` holds the end of each rank: srun's exit
code does not give it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.environments import hostlist
from slurmddp.errors import EXIT_STOPPED, SlurmddpError
from slurmddp.host.regular_file import open_regular, read_regular
from slurmddp.runs.failures import capture, causes
from slurmddp.runs.failures.failure import Failure, from_json, is_consequence
from slurmddp.runs.failures.kinds import LOST_NODES, STALLS, Cause
from slurmddp.runs.folder.history import RecordedAttempt
from slurmddp.runs.folder.late_files import names_in
from slurmddp.runs.folder.layout import RunFolder

_TAIL_BYTES = 16 * 1024
_SHOWN_LINES = 20
_CAN_NOT_BEGIN = re.compile(r"No module named [^)]*|execve\(\): .*")
_TASK_EXITED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): Exited with exit code (\d+)$")
_SLURMS_OWN = re.compile(r"slurmstepd\S*: |srun: ")
_KILLED = range(128, 193)
"""Exit codes by which shells and container runtimes report a signal; 255 is apptainer's own error."""
_SLURM_SAW_OOM = re.compile(r"oom[-_ ]kill|: Out Of Memory|exceeded (job )?memory limit", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Restart(Failure):
    """A failure after which the ranks of an attempt restarted in place."""

    attempt: int = 0
    """The number of the attempt."""
    reached: int | None = None
    """The last step before the failure; None if no step was seen."""

    @property
    def after(self) -> str:
        """A phrase with the last step before the failure, such as "after step 140"; empty if not known."""
        if self.reached is None:
            return ""
        return f"after step {self.reached}"


def read_failure(folder: RunFolder, attempt: int) -> Failure | None:
    """Return the failure that ended an attempt; None if no failure is recorded.

    A killed agent records no failure, and the other agents record that they lost it. So if the recorded
    failure may be a consequence, an agent that the `ended` event names as lost counts as the cause.
    """
    recorded = capture.read(folder, attempt) or _first_bad_exit(folder, attempt)
    if recorded is not None and _is_first_cause(recorded, folder, attempt):
        return recorded

    hosts = _hosts_of_lost_agents(folder, attempt)
    if not hosts:
        return recorded
    failed_start = _failed_start(folder, attempt, hosts)
    if failed_start is not None:
        return failed_start

    lost = Failure(rank=None, host=", ".join(hosts.values()), exit_code=None, signal=None)
    if not _slurm_saw_oom(folder, attempt):
        return lost
    cause = Cause.of("out_of_memory", "SLURM reports it")
    return replace(lost, signal="SIGKILL", kind=cause.kind, reason=cause.reason)


def _is_first_cause(recorded: Failure, folder: RunFolder, attempt: int) -> bool:
    """Return whether a recorded failure is the cause itself, not the consequence of an agent's death."""
    if recorded.kind in LOST_NODES:
        return not _slurm_saw_oom(folder, attempt)
    return recorded.kind in STALLS or not is_consequence(recorded)


def read_restarted(folder: RunFolder, attempt: int) -> list[Failure]:
    """Return the failures after which the ranks of an attempt were to restart in place, in order of time."""
    failures = map(_read, folder.log_dir(attempt).glob("failure-g*.json"))
    readable = [failure for failure in failures if failure is not None]
    return sorted(readable, key=lambda failure: (failure.restart_count, failure.time))


def read_restarts(folder: RunFolder, attempts: Iterable[RecordedAttempt]) -> tuple[Restart, ...]:
    """Return the restarts in place of the given attempts, in order of time."""
    # A failure without an entry in `reached` is left out: the attempt was stopped before its ranks restarted.
    return tuple(
        Restart(**vars(failure), attempt=attempt.number, reached=attempt.reached[failure.restart_count])
        for attempt in attempts
        if attempt.reached
        for failure in read_restarted(folder, attempt.number)
        if failure.restart_count in attempt.reached
    )


def rank_exits(folder: RunFolder, attempt: int) -> list[Failure]:
    """Return how each rank of an attempt last ended, even without failure, in the order of ranks."""
    ends = map(_read, folder.log_dir(attempt).glob("exit-rank-*"))
    readable = [end for end in ends if end is not None and end.rank is not None]
    return sorted(readable, key=lambda end: end.rank or 0)


def describe_other_ranks(ends: Sequence[Failure], first: Failure) -> str:
    """Return a phrase about the ends of all other ranks, such as "of the other ranks: 2 killed by SIGTERM".

    The phrase is empty if there are no other ranks.

    Args:
        ends: the ends of all ranks (see `rank_exits`).
        first: the failure of the rank that failed first.
    """
    counts = Counter(
        f"killed by {end.signal}" if end.signal else f"exit code {end.exit_code}"
        for end in ends
        if end.rank != first.rank
    )
    if not counts:
        return ""
    return "of the other ranks: " + ", ".join(f"{count} {end}" for end, count in counts.items())


def _first_bad_exit(folder: RunFolder, attempt: int) -> Failure | None:
    """Return the end of the rank that failed first, for an attempt whose agents recorded no failure.

    The result is None if no rank failed, or if the ranks restarted in place after the failure.
    """
    ends = rank_exits(folder, attempt)
    newest = max((end.restart_count for end in ends), default=0)
    # If the ranks were to restart in place after a failure, their recorded ends are those before the restart,
    # and show nothing about the end of the attempt.
    if any(failure.restart_count >= newest for failure in read_restarted(folder, attempt)):
        return None

    bad = [end for end in ends if end.exit_code not in (0, EXIT_STOPPED) and end.restart_count == newest]
    bad = [end for end in bad if end.kind != "ended_by_agent"]
    return min(bad, key=lambda end: end.time, default=None)


def _read(path: Path) -> Failure | None:
    try:
        return from_json(read_regular(path).decode("utf-8", errors="replace"))
    except OSError:
        return None


def _hosts_of_lost_agents(folder: RunFolder, attempt: int) -> dict[int, str]:
    """Return the hosts, by node number, of agents without exit code that the `ended` event names as lost."""
    lost: dict[str, str] = {}
    with suppress(SlurmddpError, OSError):
        for event in folder.events():
            if event.get("event") == "ended" and event.get("attempt") == attempt:
                lost |= event.get("lost") or {}

    hosts = {int(node): host or f"node-{node}" for node, host in lost.items()}
    # The exit codes are looked up again: a shared file system may have shown one only after the event.
    silent = folder.silent_nodes(attempt, max(hosts, default=-1) + 1)
    return {node: hosts[node] for node in silent if node in hosts}


def _failed_start(folder: RunFolder, attempt: int, hosts: Mapping[int, str]) -> Failure | None:
    """Return the failure of an agent that could not start, from messages of srun, Python or a container.

    The result is None if there is no such message.

    Args:
        folder: the run folder.
        attempt: the number of the attempt.
        hosts: the hosts of the lost agents, by node number.
    """
    codes = _exit_codes(folder, attempt)
    names = names_in(folder.log_dir(attempt))
    for node in sorted(hosts, key=lambda node: (node not in codes, node)):
        code = codes.get(node)
        # An agent with this file did start and was killed later, whatever its log says.
        if code is None and folder.begun_file(attempt, node).name in names:
            continue

        lines = _tail(folder.node_log(attempt, node))
        cause, meant_code = _cause_at_start(code, lines)
        if cause.reason or code is not None:
            return Failure(
                rank=None,
                node_rank=node,
                host=hosts[node],
                exit_code=meant_code,
                signal=None,
                kind=cause.kind,
                reason=cause.reason,
                last_lines=tuple(lines[-_SHOWN_LINES:]),
            )
    return None


def _cause_at_start(code: int | None, lines: Sequence[str]) -> tuple[Cause, int]:
    """Return why an agent could not start, and its exit code.

    Args:
        code: the exit code of the agent; None if srun has not reported it.
        lines: the last lines of the agent's log, which other programs have written.
    """
    refusals = [match[0] for match in map(_CAN_NOT_BEGIN.search, lines) if match]
    if refusals:
        refusal = refusals[-1]
        default_code = 2 if refusal.startswith("execve") else 1
        return Cause.of("wrong_python", refusal), code or default_code

    cause = causes.find_cause(code or 1, None, lines)
    if code is not None and not cause.reason:
        # If no message is known, show the last line. A container runtime may have written it, or a script
        # that is named as the Python interpreter.
        last = next((line for line in reversed(lines) if line and not _SLURMS_OWN.match(line)), "")
        cause = Cause("other", last)
    return cause, code or 1


def _exit_codes(folder: RunFolder, attempt: int) -> dict[int, int]:
    """Return the exit codes by node number that srun has reported, without codes that stand for a signal."""
    codes: dict[int, int] = {}
    for line in _tail(folder.batch_log(attempt)):
        match = _TASK_EXITED.match(line)
        if match and int(match[2]) not in _KILLED:
            codes |= {int(node): int(match[2]) for node in hostlist.expand(f"[{match[1]}]")}
    return codes


def _slurm_saw_oom(folder: RunFolder, attempt: int) -> bool:
    """Return whether SLURM has reported an out-of-memory kill in the batch log or in the log of a node."""
    logs = [folder.batch_log(attempt), *folder.log_dir(attempt).glob("node-*.log")]
    return any(_SLURM_SAW_OOM.search(line) for path in logs for line in _tail(path))


def _tail(path: Path) -> list[str]:
    try:
        # Only a regular file is read: another account may have created a link or a pipe with this name.
        with open_regular(path) as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
