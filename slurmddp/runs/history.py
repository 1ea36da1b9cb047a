"""The events of a run, folded into one value per attempt: status, logs, cancel and report start here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmddp.runs.folder import RunFolder

AGAIN = frozenset({"requeue", "resubmit"})
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused)|broken pipe|peer (has )?closed|gloo.*(timed? ?out|failed)"
    r"|nccl.*(abort|remote|timed? ?out)|store.*(closed|reset)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What the first failing rank of an attempt left."""

    rank: int | None
    host: str
    exit_code: int | None
    signal: str | None
    last_lines: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        # Before the ranks exist, what fails is the agent that starts them.
        who = "the agent" if self.rank is None else f"rank {self.rank}"
        if self.signal is None and self.exit_code is None:
            return (
                f"{who} on {self.host or 'an unknown host'} left no word: it was killed, or its host is gone"
            )
        how = f"was killed by {self.signal}" if self.signal else f"ended with exit code {self.exit_code}"
        return f"{who} on {self.host or 'an unknown host'} {how}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the job; None means: not (yet) written."""

    number: int
    job_id: str | None = None
    launcher: str | None = None
    nodes: str | None = None
    pid: int | None = None
    host: str | None = None
    started: float | None = None
    ended: float | None = None
    seen: float | None = None
    """When its last event was written."""
    first_step: int | None = None
    resumed_step: int | None = None
    saved_step: int | None = None
    saved: float | None = None
    signal: str | None = None
    exit_code: int | None = None
    outcome: str | None = None
    next: str | None = None

    @property
    def is_open(self) -> bool:
        return self.ended is None

    @property
    def start_step(self) -> int | None:
        """The step it went on from: 0 for a fresh start."""
        if self.resumed_step is not None:
            return self.resumed_step
        return 0 if self.first_step is not None else None


@dataclass(frozen=True, kw_only=True)
class History:
    """All attempts of a run, and who was asked to run it."""

    attempts: tuple[Attempt, ...] = ()
    last: str | None = None
    """The newest of submitted, started, ended, cancelled."""
    job_id: str | None = None
    """The job that runs, or will run, the newest attempt."""
    open_jobs: tuple[str, ...] = ()
    """Jobs whose end is not written, or that SLURM is to start again: what a cancel must end."""
    created: float | None = None
    """When the run was first submitted or started."""

    @property
    def newest(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def goes_on(self) -> bool:
        """Whether something may still happen: an open attempt, a queued job, or one that is to come back."""
        if self.last in (None, "cancelled"):
            return False
        newest = self.newest
        return self.last != "ended" or newest is None or newest.next in AGAIN

    @property
    def may_live(self) -> bool:
        """Whether its job or process may be there: what goes on, or was cancelled and takes time to leave."""
        leaving = self.last == "cancelled" and self.newest is not None and self.newest.is_open
        return self.goes_on or leaving

    @property
    def settled(self) -> bool:
        """Whether the folder alone says how the run ended."""
        return self.last is not None and not self.goes_on


@dataclass
class _Draft:
    attempts: dict[int, Attempt] = field(default_factory=dict)
    open_jobs: dict[str, None] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    last: str | None = None
    job_id: str | None = None
    created: float | None = None


def read_history(folder: RunFolder) -> History:
    """Read the events of a run."""
    return fold(folder.events())


def fold(events: Iterable[Mapping[str, Any]]) -> History:
    """Fold events into a History; events and facts that this version does not know are passed over."""
    draft = _Draft()
    for event in events:
        if isinstance(event, Mapping):
            _apply(draft, event)
    return History(
        attempts=tuple(draft.attempts[number] for number in sorted(draft.attempts)),
        last=draft.last,
        job_id=draft.job_id,
        open_jobs=tuple(draft.open_jobs),
        created=draft.created,
    )


def _apply(draft: _Draft, event: Mapping[str, Any]) -> None:
    kind = event.get("event")
    if kind == "submitted" and str(event.get("job_id")) in draft.started:
        return  # The job was faster than the one who submitted it and wrote first.
    if kind in ("submitted", "started", "ended", "cancelled"):
        draft.last = kind
    job_id = event.get("job_id")
    if kind == "started":
        draft.started.add(str(job_id))
    if job_id is not None and kind in ("submitted", "started"):
        draft.job_id = str(job_id)
        draft.open_jobs[str(job_id)] = None
        draft.created = event.get("time") if draft.created is None else draft.created
    if kind == "ended" and event.get("next") != "requeue":
        draft.open_jobs.pop(str(job_id), None)
    number = event.get("attempt")
    if isinstance(number, int):
        known = draft.attempts.get(number, Attempt(number=number))
        draft.attempts[number] = replace(known, seen=event.get("time"), **_facts(known, event))


def _facts(known: Attempt, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an attempt that one event settles."""
    kind, time, step = event.get("event"), event.get("time"), event.get("step")
    if kind == "started":
        facts = {name: event.get(name) for name in ("launcher", "pid", "host")}
        nodes = event.get("nodes")
        job_id = None if event.get("job_id") is None else str(event["job_id"])
        return {**facts, "nodes": None if nodes is None else str(nodes), "job_id": job_id, "started": time}
    if kind == "ended":
        return {"ended": time, **{name: event.get(name) for name in ("exit_code", "outcome", "next")}}
    if kind == "saved":
        return {"saved_step": step, "saved": time}
    if kind == "resumed":
        return {"resumed_step": step}
    if kind == "first_step":
        return {"first_step": step if known.first_step is None else known.first_step}
    return {"signal": event.get("signal")} if kind == "signalled" else {}


def reads_like_a_lost_peer(last_lines: Sequence[str]) -> bool:
    """Whether the last lines of a process are those of one that only lost another."""
    return any(_LOST_PEER.search(line) for line in last_lines[-5:])


def read_failure(folder: RunFolder, attempt: int) -> Failure | None:
    """Return what the first failing rank of an attempt left, or None; an agent that is gone leaves nothing.

    Then others fail because they lost it, and the batch script has noted which one left no exit code.
    """
    left = _recorded(folder, attempt)
    if left is not None and (
        left.signal not in (None, "SIGABRT") or not reads_like_a_lost_peer(left.last_lines)
    ):
        return left
    hosts = _hosts_of_lost_agents(folder, attempt)
    return Failure(rank=None, host=", ".join(hosts), exit_code=None, signal=None) if hosts else left


def _hosts_of_lost_agents(folder: RunFolder, attempt: int) -> list[str]:
    logs = folder.log_dir(attempt)
    # A shared file system may have shown an exit code late.
    lost = [
        path for path in logs.glob("lost-node-*") if not (logs / path.name.replace("lost", "exit")).exists()
    ]
    return [
        path.read_text(encoding="utf-8").strip() or path.name.removeprefix("lost-") for path in sorted(lost)
    ]


def _recorded(folder: RunFolder, attempt: int) -> Failure | None:
    path = folder.failure_file(attempt)
    try:
        left = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    if not isinstance(left, dict):
        return None
    return Failure(
        rank=left.get("rank"),
        host=str(left.get("host") or ""),
        exit_code=left.get("exit_code"),
        signal=left.get("signal"),
        last_lines=tuple(str(line) for line in left.get("last_lines") or ()),
    )
