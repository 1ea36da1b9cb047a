"""Messages between agents keep their fields over JSON; the log lines of failures are cut to what fits."""

from __future__ import annotations

import json

import pytest

from slurmddp.launchers.coordinator.messages import (
    AgentUnable,
    HungAtExit,
    Leave,
    Message,
    PaceReported,
    StacksReported,
    StartWorkers,
    WorkersFailed,
    decode,
    encode,
)
from slurmddp.launchers.link.connection import MAX_MESSAGE_BYTES
from slurmddp.launchers.watchdog.stragglers import Pace
from slurmddp.launchers.watchdog.stuck_rank import RankReport
from slurmddp.runs.failures.failure import Failure

REPORT = RankReport(
    rank=1, host="n0", phase="step", step=3, seconds=400.0, limit_s=None,
    stack=("a.py:1 in main",), worker=("b.py:2 in get",),
)  # fmt: skip
PACE = Pace(host="n0", step=20, steps=20, step_s=20.0, wait_s=1.0, forward_s=2.0)
LINES = tuple(f"{number} " + "\u00fc" * 390 for number in range(30))


def failed(rank: int, lines: tuple[str, ...] = LINES) -> Failure:
    return Failure(
        rank=rank, local_rank=rank, node_rank=0, host="n1", exit_code=1, signal=None,
        reason="ValueError: " + "\u00fc" * 300, last_lines=lines,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 16, 64])
def test_all_that_fell_together_are_told_at_once(ranks: int) -> None:
    failures = tuple(failed(rank) for rank in range(ranks))
    text = json.dumps(encode(WorkersFailed(failures=failures, left=failures)))
    assert len(text) < MAX_MESSAGE_BYTES
    message = decode(json.loads(text))
    assert isinstance(message, WorkersFailed)
    heard = message.failures
    assert [(one.rank, one.reason) for one in heard] == [(one.rank, one.reason) for one in failures]
    for one in heard:
        assert set(one.last_lines) <= set(LINES)


def test_what_fits_is_told_whole() -> None:
    failures = tuple(failed(rank, ("a", "b")) for rank in range(128))
    for message in (WorkersFailed(failures=failures), WorkersFailed(failures=(failed(0),))):
        assert decoded(message) == message


def decoded(message: Message) -> Message | None:
    return decode(json.loads(json.dumps(encode(message))))


@pytest.mark.parametrize(
    "message",
    [
        StartWorkers(restart_count=2, agents=(0, 3), master=("n0", 4711), preflight=False, excluded=(1,)),
        WorkersFailed(failures=(), unhealthy={1: "it is hot."}),
        StacksReported(reports=(REPORT,), left=(failed(1, ()),)),
        PaceReported(paces={7: PACE}, step=3, silent_s=0.5),
        HungAtExit(reports=(REPORT,), codes=(0, 75)),
        AgentUnable(failure=failed(0, ("a",))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_each_field_keeps_its_type(message: Message) -> None:
    assert decoded(message) == message


def test_an_unknown_kind_is_ignored_and_so_is_an_unknown_field() -> None:
    assert decode({"kind": "of a later version"}) is None
    assert decode({"kind": "Leave", "code": 1, "more": 2}) == Leave(code=1)
    with pytest.raises(TypeError, match="code"):
        decode({"kind": "Leave"})
