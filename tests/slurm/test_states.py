from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.slurm import states
from slurmddp.slurm.command_output import parse_run
from slurmddp.slurm.states import JobState, clean_reason, parse_exit, parse_state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", "RUNNING"),
        (" pending \n", "PENDING"),
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("COMPLETED", "COMPLETED"),
        ("COMPLETING", "COMPLETING"),
        ("RUNNING,COMPLETING", "RUNNING"),
        ("NODE_FAIL", "NODE_FAIL"),
        ("", "UNKNOWN"),
        ("SLEEPING", "UNKNOWN"),
    ],
)
def test_states_are_read_as_slurm_spells_them(text: str, state: str) -> None:
    assert parse_state(text) == state


@pytest.mark.parametrize("state", sorted(states.ALL))
def test_every_state_is_read_as_itself(state: str) -> None:
    assert parse_state(state) == state


def test_a_state_is_waiting_active_or_over() -> None:
    groups = [states.PENDING, states.ACTIVE, states.TERMINAL]
    assert sum(len(group) for group in groups) == len(states.ALL)


def test_a_word_that_is_no_state_is_never_an_end() -> None:
    assert not JobState(job_id="1", state=parse_state("GONE")).terminal
    assert JobState(job_id="1", state="TIMEOUT").terminal
    assert JobState(job_id="1", state="REQUEUED").pending


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0:9", 0), ("78:0", 78), (" 1:15 ", 1), ("", None), ("x", None)],
)
def test_exit_codes(text: str, expected: int | None) -> None:
    assert parse_exit(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [("(Priority)", "Priority"), ("None", ""), ("(null)", ""), (" Resources ", "Resources")],
)
def test_reasons(text: str, reason: str) -> None:
    assert clean_reason(text) == reason


@pytest.mark.parametrize(
    ("comment", "run"),
    [
        ("slurmddp:gpt-0a1b2c3d:0123456789ab", "gpt-0a1b2c3d"),
        ("slurmddp:gpt-0a1b2c3d:0123456789ab a word of mine", "gpt-0a1b2c3d"),
        ("slurmddp:after-7-0", ""),
        ("mine", ""),
        ("", ""),
        ("(null)", ""),
    ],
)
def test_a_token_tells_whose_job_it_is(comment: str, run: str) -> None:
    assert parse_run(comment) == run


def test_a_job_without_a_token_may_be_of_any_run() -> None:
    assert JobState(job_id="1", state="RUNNING").may_be_of(Path("/runs/gpt"))
    assert JobState(job_id="1", state="RUNNING", run="a-b").may_be_of(Path("/runs/a b"))
    assert not JobState(job_id="1", state="RUNNING", run="gpt-1").may_be_of(Path("/runs/gpt-2"))
    assert not JobState(job_id="1", state="RUNNING", script="/runs/gpt-1/job.sbatch").may_be_of(
        Path("/runs/gpt-2")
    )
