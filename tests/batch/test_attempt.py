"""The exit code of an attempt, from the records that its agents left and the code of srun."""

from __future__ import annotations

import pytest

from slurmddp.runs.failures.read import read_failure
from support.slurm.batch_run import ENDING, SAVE, Run, Step, do, exits, leave, leaves, records


@pytest.mark.parametrize("code", [0, 1, 75, 137, 143])
def test_a_recorded_failure_is_a_failure_whatever_srun_says(run: Run, code: int) -> None:
    step = records({"rank": 3, "exit_code": None, "signal": "SIGKILL"}) + exits(code)
    assert run.start(step) == (1 if code in (0, 75) else code)
    assert run.end == ("failed", "none")


@pytest.mark.parametrize(("code", "outcome"), [(78, "config"), (79, "no_progress")])
def test_a_refusal_is_kept_though_srun_killed_the_other_agents(run: Run, code: int, outcome: str) -> None:
    assert run.start(records({"exit_code": code, "signal": None}) + exits(143)) == code
    assert run.end == (outcome, "none")


def test_an_output_of_a_rank_is_not_taken_for_its_code(run: Run) -> None:
    assert run.start(records({"exit_code": 1, "last_lines": ['"exit_code": 78']}) + exits(1)) == 1
    assert run.end == ("failed", "none")


def test_a_record_that_was_cut_short_is_a_failure(run: Run) -> None:
    run.start(do(lambda run: (run.log_dir / "failure.json").write_text('{"exit_co')) + exits(0))
    assert run.end == ("failed", "none")


@pytest.mark.parametrize(
    ("codes", "srun", "end"),
    [
        ({0: 75, 1: 75}, 143, "stopped"),  # srun killed an agent that was leaving
        ({0: 75, 1: 75}, 0, "stopped"),
        ({0: 75, 1: 0}, 0, "stopped"),
        ({0: 0, 1: 75}, 75, "stopped"),
        ({0: 0, 1: 3}, 0, "failed"),
        # SLURM with task/cgroup calls each task `Out Of Memory`, also after another rank took its place.
        ({0: 0, 1: 0}, 1, "finished"),
        ({0: 0, 1: 1}, 1, "failed"),
        ({0: 0}, 1, "failed"),
        # An agent died or failed, and srun made the others stop.
        *(({0: 75, **other}, srun, "failed") for other in ({}, {1: 1}) for srun in (75, 137, 143)),
    ],
)
def test_an_attempt_ends_as_its_agents_say(run: Run, codes: dict[int, int], srun: int, end: str) -> None:
    expected = {"finished": 0, "stopped": 75, "failed": srun if srun not in (0, 75) else 1}
    assert run.start(leave(codes, srun)) == expected[end]
    assert run.end == (end, "requeue" if end == "stopped" else "none")


@pytest.mark.parametrize("codes", [{}, {0: 0}], ids=["none", "of the first"])
def test_srun_that_ends_with_0_without_the_code_of_every_agent_is_not_the_end(
    run: Run, codes: dict[int, int]
) -> None:
    """So it does when SLURM has given a node up and the others do not end in time."""
    assert run.start(SAVE + leaves("node-0.log", "node-1.log") + leave(codes, 0)) == 1
    assert run.end == ("failed", "requeue")
    assert run.asked() == ["requeue 41"]
    assert "The agent on n2 (node 1) recorded no exit code." in run.log()
    assert ("The agent on n1 (node 0) recorded no exit code." in run.log()) == (not codes)


def test_srun_that_ends_with_0_when_slurm_has_lost_a_node_is_no_failure(run: Run) -> None:
    run.slurm.job = ENDING.replace("Reason=None", "Reason=NodeDown")
    run.start(SAVE + leave({0: 0}, 0))
    assert run.end == ("stopped", "requeue")


def test_a_code_that_is_seen_late_is_waited_for(run: Run) -> None:
    run.on_sleep = lambda: (run.log_dir / "exit-node-1").write_text("0\n")
    assert run.start(leave({0: 0}, 0)) == 0
    assert run.end == ("finished", "none")


def peer_lost(text: str) -> Step:
    """Return a step in which node 1's agent vanishes and a rank of node 0 ends with `text`."""
    record = {"rank": 0, "host": "n1", "exit_code": 1, "signal": None, "last_lines": [text]}
    return records(record) + leaves("node-0.log", "node-1.log") + leave({0: 1}, 137)


def test_an_agent_that_vanished_is_named_instead_of_the_rank_that_lost_it(run: Run) -> None:
    run.start(peer_lost("Connection closed by peer [10.0.0.2]"))
    failure = read_failure(run.folder, 0)
    assert failure is not None
    assert failure.sentence == "the agent on n2 recorded no exit code: it was killed, or its host failed"
    assert "The agent on n2 (node 1) recorded no exit code." in run.log()
    (run.log_dir / "exit-node-1").write_text("1\n")  # seen late
    late = read_failure(run.folder, 0)
    assert late is not None and late.rank == 0


def test_a_rank_that_failed_by_itself_is_named_though_an_agent_left_no_code(run: Run) -> None:
    run.start(peer_lost("ValueError: mine"))
    failure = read_failure(run.folder, 0)
    assert failure is not None and failure.rank == 0
