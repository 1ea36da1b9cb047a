"""The client of a view that stays open asks SLURM at a bounded pace."""

from __future__ import annotations

import pytest

from slurmddp.errors import SlurmError
from slurmddp.slurm.paced_client import PacedClient


class Clock:
    """A clock that the test sets."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def paced(programs, clock):
    programs.write("jobs/7", "RUNNING|n1||\n")
    return PacedClient(now=clock)


def test_squeue_runs_once_in_30_seconds_however_often_it_is_asked(paced, programs, clock):
    for clock.at in range(0, 120, 5):
        assert paced.jobs(["7"])["7"].state == "RUNNING"
    assert programs.calls("squeue") == 4
    assert paced.due_in_s == 5.0


def test_the_answer_is_the_newest_one(paced, programs, clock):
    paced.jobs(["7"])
    programs.write("jobs/7", "COMPLETED|n1||\n")
    clock.at = 29.0
    assert paced.jobs(["7"])["7"].state == "RUNNING"
    clock.at = 30.0
    assert paced.jobs(["7"])["7"].state == "COMPLETED"


def test_a_job_that_is_newer_than_the_answer_is_named(paced, programs, clock):
    paced.jobs(["7"])
    programs.write("jobs/8", "PENDING|||\n")
    assert (set(paced.jobs(["7", "8"])), paced.not_asked) == ({"7"}, {"8"})
    clock.at = 30.0
    assert (set(paced.jobs(["7", "8"])), paced.not_asked) == ({"7", "8"}, set())


def test_a_silent_slurm_is_asked_ever_less_often_and_its_error_stays(paced, programs, clock):
    paced.jobs(["7"])
    programs.write("silence", "slurm_load_jobs error: Unable to contact slurm controller")
    tries = []
    for clock.at in range(30, 1300, 5):
        with pytest.raises(SlurmError, match="Unable to contact"):
            paced.jobs(["7"])
        if programs.calls("squeue") > len(tries) + 1:
            tries.append(clock.at)
    assert tries == [30, 60, 120, 240, 480, 780, 1080]
    (programs.folder / "silence").unlink()
    for clock.at in (1380, 1409, 1410):
        assert paced.jobs(["7"])["7"].state == "RUNNING"
    assert programs.calls("squeue") == 1 + len(tries) + 2


def test_many_jobs_need_several_commands_and_so_a_longer_pause(paced, programs, clock, monkeypatch):
    monkeypatch.setattr("slurmddp.slurm.client.IDS_PER_QUERY", 2)
    monkeypatch.setattr("slurmddp.slurm.paced_client.IDS_PER_QUERY", 2)
    for clock.at in range(0, 360, 5):
        paced.jobs(["7", "8", "9", "10", "11"])
    assert programs.calls("squeue") == 12
