"""What agents tell each other of failures fits into a message, however much the ranks have said."""

from __future__ import annotations

import json

import pytest

from slurmddp.launchers.coordinator.messages import all_as_facts, as_failure
from slurmddp.launchers.link.wire import MAX_MESSAGE_BYTES
from slurmddp.runs.failures.model import Failure

LINES = tuple(f"{number} " + "\u00fc" * 390 for number in range(30))


def fallen(rank: int, lines: tuple[str, ...] = LINES) -> Failure:
    return Failure(
        rank=rank, local_rank=rank, node_rank=0, host="n1", exit_code=1, signal=None,
        reason="ValueError: " + "\u00fc" * 300, last_lines=lines,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 16, 64])
def test_all_that_fell_together_are_told_at_once(ranks: int) -> None:
    failures = [fallen(rank) for rank in range(ranks)]
    told = all_as_facts(failures)
    assert len(json.dumps({"failures": told, "left": told})) < MAX_MESSAGE_BYTES
    heard = [as_failure(facts) for facts in told]
    assert [(one.rank, one.reason) for one in heard] == [(one.rank, one.reason) for one in failures]
    for one in heard:
        assert set(one.last_lines) <= set(LINES)


def test_what_fits_is_told_whole() -> None:
    failures = [fallen(rank, ("a", "b")) for rank in range(128)]
    assert [as_failure(facts) for facts in all_as_facts(failures)] == failures
    assert [as_failure(facts) for facts in all_as_facts([fallen(0)])] == [fallen(0)]
    assert all_as_facts([]) == []
