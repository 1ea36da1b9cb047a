"""Ranks that get on while they are asked what they do: nobody has stopped, and nobody is ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurmddp.host.heartbeat_page import Beat
from slurmddp.launchers.agent.node_watch import Watch
from slurmddp.launchers.coordinator.messages import HangSuspected, StacksReported
from slurmddp.launchers.watchdog.diagnosis import Inquiry

STEP = Beat("step", 100.0, 7, 0, 7, 100.0, 7.0, 0.0, watched=True)


def test_a_rank_that_got_on_since_the_last_look_does_not_stand(tmp_path: Path) -> None:
    """The signal that asks for stacks may itself end a call that hung."""
    beats = {0: STEP, 1: STEP}
    watch = Watch(2.0, tmp_path, "n1", beats=lambda: beats, processes=dict)
    told = [message for now in range(100, 103) for message in watch.look(float(now))]
    assert told[-1] == HangSuspected()
    inquiry = Inquiry((0,))
    inquiry.begin(102.0)
    watch.ask(generation=0)
    beats[1] = replace(STEP, since=102.05, step=8, steps=8)
    (answer,) = watch.look(102.1)
    assert isinstance(answer, StacksReported)
    inquiry.take(0, answer.reports)
    assert [one.seconds for one in answer.reports] == [2.0, 0.0]
    assert inquiry.verdict(102.1) is None
