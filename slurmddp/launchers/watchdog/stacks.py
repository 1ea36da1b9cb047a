"""The Python stacks of ranks that hang, and of their loader workers, requested by a signal.

Each rank arms faulthandler at its start (`arm_stacks`). The handler runs in C at once, whatever thread holds
the interpreter. Loader workers that a rank forks inherit it. It writes behind the rank's heartbeat page
(`host/heartbeat_page.py`). Because all processes of a rank share that place, the agent asks one after the
other. It never waits: its loop calls `poll`.
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
_MOST_PROCESSES = 17
"""A rank and sixteen of its workers."""
_MOST_FRAMES = 30
_FRAME_CHARS = 240
_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_FETCHING = "/torch/utils/data/_utils/fetch.py"
_BEGUN_BY = "/slurmddp/launchers/agent/worker.py:"
"""Frames below this one are the agent's, which the rank has inherited by its fork."""


@dataclass(frozen=True)
class RankStacks:
    """The answer of one rank."""

    state: str = ""
    """The kernel's letter for it; `t` while a debugger holds it."""
    stack: tuple[str, ...] = ()
    """The main thread, innermost first, as `path:line in function`; empty without an answer."""
    worker: tuple[str, ...] = ()
    """The main thread of a loader worker that was fetching data."""
    text: str = ""
    """All threads of all its processes."""


class StackRequest:
    """Asks ranks for their stacks. Call `poll` every few hundredths of a second until it returns True."""

    def __init__(self, ranks: Mapping[int, tuple[int, HeartbeatPage]]) -> None:
        """`ranks` holds pid and page of each rank by its number."""
        self._until = time.monotonic() + _TOGETHER_S
        groups = _groups({pid for pid, _ in ranks.values()})
        self._asked = {rank: _Rank(pid, page, groups[pid]) for rank, (pid, page) in ranks.items()}

    def poll(self) -> bool:
        """Take answers and ask the next processes; return whether all have answered or the time is over."""
        now = time.monotonic()
        done = [rank.advance(now) for rank in self._asked.values()]
        return all(done) or now >= self._until

    def stacks(self) -> dict[int, RankStacks]:
        """Return the answers so far, by rank."""
        return {rank: asked.result() for rank, asked in self._asked.items()}


@dataclass
class _Rank:
    """The processes of one rank, asked in turn."""

    pid: int
    page: HeartbeatPage
    left: list[int]
    state: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    _now_asked: int | None = None
    _begin: int = 0
    _seen: int = 0
    _changed: float = 0.0

    def __post_init__(self) -> None:
        self.state = _read_status(self.pid).state
        self.page.forget_stacks()

    def advance(self, now: float) -> bool:
        if self._now_asked is not None and not self._has_answered(now):
            return False
        while self.left:
            pid = self.left.pop(0)
            if _read_status(pid).answers:
                with suppress(ProcessLookupError):
                    os.kill(pid, STACKS_SIGNAL)
                    self._now_asked, self._begin, self._changed = pid, self._seen, now
                    return False
        return True

    def _has_answered(self, now: float) -> bool:
        size = self.page.stacks_bytes()
        if size != self._seen:
            self._seen, self._changed = size, now
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
        return RankStacks(
            state=self.state,
            stack=main_thread(self.texts.get(self.pid, "")),
            worker=fetching[0] if fetching else (),
            text="\n".join(
                f"{'rank' if pid == self.pid else 'process of the rank'}, pid {pid}\n{text or 'no answer'}"
                for pid, text in self.texts.items()
            ),
        )


def main_thread(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread in what faulthandler wrote: the thread that it names last.

    The frames end where the rank was started.
    """
    frames: list[str] = []
    for line in text.splitlines():
        if found := _FRAME.match(line):
            frames.append(f"{found['path']}:{found['line']} in {found['name']}"[-_FRAME_CHARS:])
        elif "(most recent call first)" in line:
            frames = []
    begun = next((number for number, frame in enumerate(frames) if _BEGUN_BY in frame), len(frames))
    return tuple(frames[: min(begun, _MOST_FRAMES)])


@dataclass(frozen=True)
class _Status:
    """The kernel's status of a process."""

    state: str = ""
    answers: bool = False


def _read_status(pid: int) -> _Status:
    """Return the state, and whether the process has a handler: without one the signal would end it."""
    try:
        text = (process.PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return _Status()
    facts = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    state = facts.get("State", "?")[:1]
    caught = int(facts.get("SigCgt", "0"), 16) >> (STACKS_SIGNAL - 1) & 1
    traced = facts.get("TracerPid", "0").strip() != "0"
    return _Status("t" if traced else state, bool(caught) and state not in "TtZ")


def _groups(leaders: set[int]) -> dict[int, list[int]]:
    """Return the processes of each process group, its leader first."""
    groups = {leader: [leader] for leader in leaders}
    for pid, fields in process.all_stats().items():
        if pid not in leaders and (group := int(fields[2])) in groups:
            groups[group].append(pid)
    return {leader: [leader, *sorted(pids[1:])][:_MOST_PROCESSES] for leader, pids in groups.items()}


def write(log_dir: Path, stacks: Mapping[int, RankStacks], generation: int) -> None:
    """Append the answers to `stacks-rank-R.txt` of each rank; an error of the disk is ignored."""
    for rank, one in sorted(stacks.items()):
        head = f"== restart count {generation}, rank {rank}, state {one.state or 'unknown'}"
        with suppress(OSError), (log_dir / f"stacks-rank-{rank}.txt").open("a", encoding="utf-8") as stream:
            stream.write("\n".join([head, one.text or "It did not answer.", ""]))
