"""Ask ranks that hang, and their loader workers, for their Python stacks, by a signal.

Each rank arms faulthandler at its start (`arm_stacks`). The handler runs in C at once, whatever thread holds
the interpreter. Loader workers that a rank forks inherit the handler. The handler writes into the shared
memory behind the rank's heartbeat page (`host/heartbeat_page.py`). All processes of a rank share this memory,
so the agent asks them one after the other. The agent never waits: its loop calls `poll`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.host import process
from slurmddp.host.heartbeat_page import STACKS_SIGNAL, HeartbeatPage

_ANSWER_S = 1.0
"""Seconds for a process to begin its answer."""
_REST_S = 0.05
"""Seconds without another byte after which a stack is complete."""
_TOGETHER_S = 8.0
"""Seconds for all processes of a node."""
_MAX_PROCESSES = 17
"""The largest number of processes of a rank that are asked: the rank and sixteen of its workers."""
_MAX_FRAMES = 30
_FRAME_CHARS = 240
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_FETCHING = "/torch/utils/data/_utils/fetch.py"
_BEGUN_BY = "/slurmddp/launchers/agent/worker.py:"
"""Frames below this frame belong to the agent; the rank has inherited them by its fork."""


@dataclass(frozen=True)
class RankStacks:
    """The state of a rank's process, and the Python stacks with which the rank has answered."""

    state: str = ""
    """The kernel's letter for the rank's state; `t` while a debugger holds the rank."""
    stack: tuple[str, ...] = ()
    """The frames of the main thread, innermost first, as `path:line in function`; empty without an answer."""
    worker: tuple[str, ...] = ()
    """The frames of the main thread of a loader worker that was fetching data."""
    text: str = ""
    """The stacks of all threads of all processes of the rank."""


class StackRequest:
    """A request for the stacks of ranks; call `poll` every 0.02 s until it returns True.

    Args:
        ranks: the pid and the heartbeat page of each rank, by global rank.
    """

    def __init__(self, ranks: Mapping[int, tuple[int, HeartbeatPage]]) -> None:
        self._until = time.monotonic() + _TOGETHER_S
        groups = _groups({pid for pid, _ in ranks.values()})
        self._asked = {rank: _Rank(pid, page, groups[pid]) for rank, (pid, page) in ranks.items()}

    def poll(self) -> bool:
        """Read the answers that have come, and ask the next process of each rank.

        Returns:
            Whether all processes were asked and had time to answer, or `_TOGETHER_S` have passed.
        """
        now = time.monotonic()
        done = [rank.advance(now) for rank in self._asked.values()]
        return all(done) or now >= self._until

    def stacks(self) -> dict[int, RankStacks]:
        """Return the answers so far, by global rank; a rank without an answer has empty stacks."""
        return {rank: asked.result() for rank, asked in self._asked.items()}


@dataclass
class _Rank:
    """A rank's process and its loader workers, which are asked for their stacks one after the other."""

    pid: int
    page: HeartbeatPage
    left: list[int]
    """The processes that have not been asked for their stacks yet."""
    state: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    """The answers by pid."""
    _now_asked: int | None = None
    _begin: int = 0
    """Where the answer of the asked process begins, in bytes."""
    _seen: int = 0
    """How many bytes of all answers have been seen."""
    _changed: float = 0.0
    """When the last new byte of the answer was seen, on the monotonic clock."""

    def __post_init__(self) -> None:
        self.state = _read_status(self.pid).state
        # Remove the answers to an earlier request.
        self.page.forget_stacks()

    def advance(self, now: float) -> bool:
        """Read the answer of the asked process; once it is complete, ask the next process.

        Returns:
            Whether all processes were asked and had time to answer.
        """
        if self._now_asked is not None and not self._has_answered(now):
            return False

        while self.left:
            pid = self.left.pop(0)
            # Only a process with a handler is asked: the signal would kill any other process.
            if _read_status(pid).answers:
                with suppress(ProcessLookupError):
                    os.kill(pid, STACKS_SIGNAL)
                    self._now_asked = pid
                    self._begin = self._seen
                    self._changed = now
                    return False

        return True

    def _has_answered(self, now: float) -> bool:
        size = self.page.stacks_bytes()
        if size != self._seen:
            self._seen = size
            self._changed = now

        # Nothing marks the end of an answer, so it counts as complete after `_REST_S` without a new byte.
        wait_s = _REST_S if self._seen > self._begin else _ANSWER_S
        if now - self._changed < wait_s:
            return False

        if self._now_asked is not None:
            self.texts[self._now_asked] = self.page.stacks(self._begin, self._seen)

        self._now_asked = None
        return True

    def result(self) -> RankStacks:
        workers = [main_thread(text) for pid, text in self.texts.items() if pid != self.pid]
        fetching = [stack for stack in workers if any(_FETCHING in frame for frame in stack)]

        texts = []
        for pid, text in self.texts.items():
            title = "rank" if pid == self.pid else "process of the rank"
            texts.append(f"{title}, pid {pid}\n{text or 'no answer'}")

        return RankStacks(
            state=self.state,
            stack=main_thread(self.texts.get(self.pid, "")),
            worker=fetching[0] if fetching else (),
            text="\n".join(texts),
        )


def main_thread(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread, which faulthandler prints last, innermost frame first.

    Frames of the agent, which a forked rank has inherited, are left out. At most `_MAX_FRAMES` are returned.
    """
    frames: list[str] = []
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match:
            frames.append(f"{match['path']}:{match['line']} in {match['name']}"[-_FRAME_CHARS:])
        elif "(most recent call first)" in line:
            frames = []

    begun = next((number for number, frame in enumerate(frames) if _BEGUN_BY in frame), len(frames))
    return tuple(frames[: min(begun, _MAX_FRAMES)])


@dataclass(frozen=True)
class _Status:
    """The kernel's state of a process, and whether the process can answer a request for stacks."""

    state: str = ""
    answers: bool = False
    """Whether the process has a handler for the signal and can run it."""


def _read_status(pid: int) -> _Status:
    """Return the status of a process, from /proc; an empty status if the process has ended."""
    try:
        text = (process.PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return _Status()

    facts = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    state = facts.get("State", "?")[:1]
    has_handler = bool(int(facts.get("SigCgt", "0"), 16) >> (STACKS_SIGNAL - 1) & 1)
    answers = has_handler and state not in "TtZ"

    is_traced = facts.get("TracerPid", "0").strip() != "0"
    return _Status("t" if is_traced else state, answers)


def _groups(leaders: set[int]) -> dict[int, list[int]]:
    """Return the pids of each process group by the pid of its leader.

    The leader comes first. At most `_MAX_PROCESSES` of a group are returned.
    """
    groups = {leader: [leader] for leader in leaders}
    # A rank leads its process group, to which its loader workers belong.
    for pid, fields in process.all_stats().items():
        group = int(fields[2])
        if pid not in leaders and group in groups:
            groups[group].append(pid)

    return {leader: [leader, *sorted(pids[1:])][:_MAX_PROCESSES] for leader, pids in groups.items()}


def write(log_dir: Path, stacks: Mapping[int, RankStacks], restart_count: int) -> None:
    """Append each rank's stacks to its file `stacks-rank-R.txt` in `log_dir`; OSErrors are ignored."""
    # Append, because the file may hold the stacks of an earlier hang of the same rank.
    for rank, answer in sorted(stacks.items()):
        head = f"== restart count {restart_count}, rank {rank}, state {answer.state or 'unknown'}"
        path = log_dir / f"stacks-rank-{rank}.txt"
        with suppress(OSError), path.open("a", encoding="utf-8") as stream:
            stream.write("\n".join([head, answer.text or "It did not answer.", ""]))
