"""The contract of a SLURM: the real client and the shipped fake pass the same tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.errors import SlurmError
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.limits.partitions import parse_partitions
from slurmddp.slurm.limits.queries import partitions
from support.slurm.slurm_in_memory import FakeSlurm
from support.slurm.slurm_jobs import PARTITIONS, FakePrograms


class ProgramsSite(SlurmClient):
    """A SLURM of fake programs that a test can steer from behind, as it does the SLURM in memory."""

    def __init__(self, programs: FakePrograms) -> None:
        super().__init__(sleep=lambda _: None)
        self.programs = programs
        programs.write("partitions", PARTITIONS)

    def set_state(self, job_id: str, state: str, reason: str = "", nodes: str = "") -> None:
        self.programs.write(f"jobs/{job_id}", f"{state}|{nodes}|{reason}|\n")

    def forget(self, job_id: str) -> None:
        (self.programs.folder / "jobs" / job_id).unlink()

    def refuse(self, words: str) -> None:
        self.programs.write("refusal", words)

    def lack_nodes(self) -> None:
        words = "allocation failure: Requested node configuration is not available"
        self.programs.write("test-only", f'[[ "$*" == *--exclude=n1* ]] && echo "{words}" >&2 && exit 1')

    def fall_silent(self, words: str) -> None:
        self.programs.write("silence", words)
        self.refuse(words)


class MemorySite(FakeSlurm):
    def refuse(self, words: str) -> None:
        self.refusal = words

    def lack_nodes(self) -> None:
        self.lacks_nodes = True

    def fall_silent(self, words: str) -> None:
        self.silence = words


Site = ProgramsSite | MemorySite


@pytest.fixture(params=["programs", "memory"])
def site(request: pytest.FixtureRequest) -> Site:
    if request.param == "memory":
        return MemorySite(site=parse_partitions(PARTITIONS))
    return ProgramsSite(request.getfixturevalue("programs"))


def test_a_submitted_job_is_pending_with_its_reason(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="t:1")
    job = site.jobs([job_id])[job_id]
    assert (job.job_id, job.state, job.reason, job.terminal) == (job_id, "PENDING", "Priority", False)


def test_a_job_is_known_as_the_job_of_its_run(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="slurmddp:gpt-0a1b2c3d:0123456789ab")
    assert site.jobs([job_id])[job_id].run == "gpt-0a1b2c3d"


def test_two_submissions_are_two_jobs(site: Site, script: Path) -> None:
    ids = [site.submit(script, token=f"t:{number}") for number in range(2)]
    assert set(site.jobs(ids)) == set(ids)
    assert len(set(ids)) == 2


def test_a_running_job_shows_its_nodes(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="t:1")
    site.set_state(job_id, "RUNNING", nodes="n[1-2]")
    job = site.jobs([job_id])[job_id]
    assert (job.state, job.nodes) == ("RUNNING", "n[1-2]")


def test_a_job_that_slurm_does_not_know_is_left_out(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="t:1")
    site.forget(job_id)
    assert site.jobs([job_id]) == {}
    assert site.jobs(["4711", "4712"]) == {}
    assert site.jobs([]) == {}


def test_what_slurm_would_take_is_asked_without_queueing_it(site: Site, script: Path) -> None:
    assert site.would_take(script, ["--exclude=n1"])
    site.lack_nodes()
    assert not site.would_take(script, ["--exclude=n1"])
    assert site.submit(script, token="t:1") == "1"


@pytest.mark.parametrize("words", ["sbatch: error: Invalid account", "sbatch: error: Socket timed out"])
def test_a_slurm_that_gives_no_clear_answer_would_not_take_it(site: Site, script: Path, words: str) -> None:
    site.refuse(words)
    assert not site.would_take(script)


def test_cancel_ends_a_job(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="t:1")
    site.cancel(job_id)
    assert site.jobs([job_id])[job_id].state == "CANCELLED"


def test_cancelling_what_is_over_or_unknown_is_no_error(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="t:1")
    site.set_state(job_id, "COMPLETED")
    site.cancel(job_id)
    waiting = site.submit(script, token="t:2")
    site.cancel("4711", job_id, waiting)
    assert [site.jobs([one])[one].state for one in (job_id, waiting)] == ["COMPLETED", "CANCELLED"]


def test_a_refusal_gives_slurms_own_words(site: Site, script: Path) -> None:
    site.refuse("sbatch: error: invalid partition specified: hihg")
    with pytest.raises(SlurmError, match="invalid partition specified: hihg") as caught:
        site.submit(script, token="t:1")
    assert caught.value.hint
    assert caught.value.exit_code == 69


def test_silence_is_an_error_and_never_a_state(site: Site, script: Path) -> None:
    job_id = site.submit(script, token="t:1")
    site.fall_silent("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    for ask in (
        lambda: site.jobs([job_id]),
        lambda: site.cancel(job_id),
        lambda: partitions(site),
        lambda: site.submit(script, token="t:2"),
    ):
        with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
            ask()


def test_limits_are_told(site: Site) -> None:
    assert set(partitions(site)) == {"low", "high", "old"}
