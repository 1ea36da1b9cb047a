from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from slurm_jobs import CONFIG, PARTITIONS, PROGRAMS, FakePrograms

from slurmddp.errors import SlurmError
from slurmddp.slurm import client
from slurmddp.slurm.client import RETRY_DELAYS_S, Slurm, SlurmClient, parse_job_id
from slurmddp.slurm.fake import FakeSlurm
from slurmddp.slurm.limits import parse_limits


class Site(Protocol):
    """A SLURM that a test can steer from behind."""

    slurm: Slurm

    def set_state(self, job_id: str, state: str, reason: str = "", nodes: str = "") -> None: ...
    def forget(self, job_id: str) -> None: ...
    def refuse(self, words: str) -> None: ...
    def lack_nodes(self) -> None: ...
    def fall_silent(self, words: str) -> None: ...


class ProgramsSite:
    def __init__(self, programs: FakePrograms) -> None:
        self.programs = programs
        self.slurm: Slurm = SlurmClient(sleep=lambda _: None)
        programs.write("partitions", PARTITIONS)
        programs.write("config", CONFIG)

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


class MemorySite:
    def __init__(self) -> None:
        self.fake = FakeSlurm(site=parse_limits(PARTITIONS, CONFIG))
        self.slurm: Slurm = self.fake

    def set_state(self, job_id: str, state: str, reason: str = "", nodes: str = "") -> None:
        self.fake.set_state(job_id, state, reason=reason, nodes=nodes)

    def forget(self, job_id: str) -> None:
        self.fake.forget(job_id)

    def refuse(self, words: str) -> None:
        self.fake.refusal = words

    def lack_nodes(self) -> None:
        self.fake.lacks_nodes = True

    def fall_silent(self, words: str) -> None:
        self.fake.silence = words


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    fake = FakePrograms(tmp_path / "slurm")
    for name, value in fake.environ.items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.fixture(params=["programs", "memory"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param == "memory":
        yield MemorySite()
    else:
        yield ProgramsSite(request.getfixturevalue("programs"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n")
    return path


# --- The contract: the real client and the shipped fake pass the same tests. ---


def test_a_submitted_job_is_pending_with_its_reason(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="t:1")
    job = site.slurm.jobs([job_id])[job_id]
    assert (job.job_id, job.state, job.reason, job.terminal) == (job_id, "PENDING", "Priority", False)


def test_a_job_is_known_as_the_job_of_its_run(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="slurmddp:gpt-0a1b2c3d:0123456789ab")
    assert site.slurm.jobs([job_id])[job_id].run == "gpt-0a1b2c3d"


def test_two_submissions_are_two_jobs(site: Site, script: Path) -> None:
    ids = [site.slurm.submit(script, token=f"t:{number}") for number in range(2)]
    assert set(site.slurm.jobs(ids)) == set(ids)
    assert len(set(ids)) == 2


def test_a_running_job_shows_its_nodes(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="t:1")
    site.set_state(job_id, "RUNNING", nodes="n[1-2]")
    job = site.slurm.jobs([job_id])[job_id]
    assert (job.state, job.nodes) == ("RUNNING", "n[1-2]")


def test_a_job_that_slurm_does_not_know_is_left_out(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="t:1")
    site.forget(job_id)
    assert site.slurm.jobs([job_id]) == {}
    assert site.slurm.jobs(["4711", "4712"]) == {}
    assert site.slurm.jobs([]) == {}


def test_what_slurm_would_take_is_asked_without_queueing_it(site: Site, script: Path) -> None:
    assert site.slurm.would_take(script, ["--exclude=n1"])
    site.lack_nodes()
    assert not site.slurm.would_take(script, ["--exclude=n1"])
    assert site.slurm.submit(script, token="t:1") == "1"


@pytest.mark.parametrize("words", ["sbatch: error: Invalid account", "sbatch: error: Socket timed out"])
def test_a_slurm_that_gives_no_clear_answer_would_not_take_it(site: Site, script: Path, words: str) -> None:
    site.refuse(words)
    assert not site.slurm.would_take(script)


def test_cancel_ends_a_job(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="t:1")
    site.slurm.cancel(job_id)
    assert site.slurm.jobs([job_id])[job_id].state == "CANCELLED"


def test_cancelling_what_is_over_or_unknown_is_no_error(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="t:1")
    site.set_state(job_id, "COMPLETED")
    site.slurm.cancel(job_id)
    site.slurm.cancel("4711")
    assert site.slurm.jobs([job_id])[job_id].state == "COMPLETED"


def test_a_refusal_gives_slurms_own_words(site: Site, script: Path) -> None:
    site.refuse("sbatch: error: invalid partition specified: hihg")
    with pytest.raises(SlurmError, match="invalid partition specified: hihg") as caught:
        site.slurm.submit(script, token="t:1")
    assert caught.value.hint
    assert caught.value.exit_code == 69


def test_silence_is_an_error_and_never_a_state(site: Site, script: Path) -> None:
    job_id = site.slurm.submit(script, token="t:1")
    site.fall_silent("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    for ask in (
        lambda: site.slurm.jobs([job_id]),
        lambda: site.slurm.cancel(job_id),
        lambda: site.slurm.limits(),
        lambda: site.slurm.submit(script, token="t:2"),
    ):
        with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
            ask()


def test_limits_are_told(site: Site) -> None:
    limits = site.slurm.limits()
    assert set(limits.partitions) == {"low", "high", "old"}
    assert limits.max_array_size == 1001


# --- The real client only: its commands and their many ways to answer. ---


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def slurm(programs: FakePrograms, sleeps: list[float]) -> SlurmClient:
    return SlurmClient(sleep=sleeps.append)


@pytest.mark.parametrize(
    "stdout",
    [
        "42\n",
        "42;alpha\n",
        "Submitted batch job 42\n",
        "Submitted batch job 42 on cluster alpha\n",
        "*** Maintenance on 1 May: 17 racks down ***\n42\n",
        "sbatch: 3 GPU hours left\n42;alpha\n\nThank you.\n",
    ],
)
def test_the_job_id_is_found_among_what_a_site_prints(stdout: str) -> None:
    assert parse_job_id(stdout) == "42"


@pytest.mark.parametrize("stdout", ["", "no job\n", "job 12 is fine\n", "1.5\n"])
def test_no_job_id_is_guessed(stdout: str) -> None:
    assert parse_job_id(stdout) is None


def test_a_banner_does_not_hide_the_job(programs: FakePrograms, slurm: SlurmClient, script: Path) -> None:
    programs.write("banner", "Welcome to 9 nodes of joy\n")
    programs.write("suffix", ";alpha")
    assert slurm.submit(script, token="t:1") == "1"


def test_sbatch_gets_options_token_and_script_in_this_order(
    programs: FakePrograms, slurm: SlurmClient, script: Path
) -> None:
    slurm.submit(script, token="t:1", options=["--comment=my words", "--hold"])
    assert programs.read("sbatch.argv").splitlines() == [
        "--parsable",
        "--comment=my words",
        "--hold",
        "--comment=t:1 my words",
        str(script),
    ]


def test_a_job_submitted_from_inside_another_inherits_nothing_of_it(
    programs: FakePrograms, slurm: SlurmClient, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CPU_BIND", "SLURM_STEP_ID", "SBATCH_TIMELIMIT", "PMIX_RANK", "RANK"):
        monkeypatch.setenv(name, "leaked")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    slurm.submit(script, token="t:1")
    environment = programs.read("sbatch.env")
    assert "leaked" not in environment
    assert "SLURM_CONF=/etc/other.conf" in environment


def test_queries_do_not_see_the_persons_formats(
    programs: FakePrograms, slurm: SlurmClient, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    monkeypatch.setenv("SACCT_FORMAT", "User")
    programs.write("accounting", "7|COMPLETED|0:0|n1\n")
    job_id = slurm.submit(script, token="t:1")
    assert set(slurm.jobs([job_id, "7"])) == {job_id, "7"}


def test_a_timeout_is_retried_until_sbatch_answers(
    programs: FakePrograms, slurm: SlurmClient, sleeps: list[float], script: Path
) -> None:
    programs.write("timeouts", "2")
    assert slurm.submit(script, token="t:1") == "1"
    assert programs.calls("sbatch") == 3
    assert sleeps == list(RETRY_DELAYS_S[:2])


def test_a_job_that_was_queued_although_sbatch_timed_out_is_not_queued_again(
    programs: FakePrograms, slurm: SlurmClient, script: Path
) -> None:
    programs.write("timeouts", "1")
    programs.write("queued-anyway", "")
    assert slurm.submit(script, token="t:1", options=["--comment=mine"]) == "1"
    assert programs.calls("sbatch") == 1


def test_another_runs_token_is_not_taken_for_ours(
    programs: FakePrograms, slurm: SlurmClient, script: Path
) -> None:
    programs.write("jobs/90", "RUNNING|n1||t:10 x\n")
    programs.write("timeouts", "1")
    assert slurm.submit(script, token="t:1") == "1"


def test_nothing_is_queued_again_while_slurm_does_not_say_what_it_has(
    programs: FakePrograms, slurm: SlurmClient, script: Path
) -> None:
    programs.write("timeouts", "1")
    programs.write("squeue-timeouts", "99")
    with pytest.raises(SlurmError, match="did not say whether the job is in its queue") as caught:
        slurm.submit(script, token="t:1")
    assert caught.value.may_be_queued
    assert programs.calls("sbatch") == 1


def test_retries_end(programs: FakePrograms, slurm: SlurmClient, script: Path) -> None:
    programs.write("timeouts", "99")
    with pytest.raises(SlurmError, match="Socket timed out"):
        slurm.submit(script, token="t:1")
    assert programs.calls("sbatch") == len(RETRY_DELAYS_S)


def test_a_refusal_is_not_retried(programs: FakePrograms, slurm: SlurmClient, script: Path) -> None:
    programs.write("refusal", "sbatch: error: Invalid qos specification")
    with pytest.raises(SlurmError, match="Invalid qos") as caught:
        slurm.submit(script, token="t:1")
    assert not caught.value.may_be_queued
    assert programs.calls("sbatch") == 1
    assert "qos=" in caught.value.hint


def test_a_program_that_hangs_is_no_answer(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SlurmError, match=r"squeue gave no answer within 0\.2 s"):
        SlurmClient(timeout_s=0.2).jobs(["1"])


def test_accounting_answers_for_what_squeue_has_forgotten(
    programs: FakePrograms, slurm: SlurmClient, script: Path
) -> None:
    programs.write("jobs/1", "RUNNING|n1||\n")
    lines = [
        "2|CANCELLED by 1000|0:15|n[1-2]",
        "3|FAILED|78:0|n3",
        "4|PENDING|0:0|None assigned",
        "33|FAILED|1:0|n",
    ]
    programs.write("accounting", "\n".join(lines) + "\n")
    jobs = slurm.jobs(["1", "2", "3", "4"])
    assert {job_id: job.state for job_id, job in jobs.items()} == {
        "1": "RUNNING",
        "2": "CANCELLED",
        "3": "FAILED",
        "4": "PENDING",
    }
    assert (jobs["2"].exit_code, jobs["2"].signal, jobs["2"].nodes) == (0, 15, "n[1-2]")
    assert (jobs["3"].exit_code, jobs["3"].signal) == (78, None)
    assert jobs["4"].nodes == ""


def test_without_accounting_unknown_jobs_are_left_out(programs: FakePrograms, slurm: SlurmClient) -> None:
    programs.write("jobs/1", "RUNNING|n1||\n")
    assert set(slurm.jobs(["1", "2"])) == {"1"}


def test_a_broken_accounting_is_an_error(programs: FakePrograms, slurm: SlurmClient) -> None:
    programs.write("accounting-down", "")
    with pytest.raises(SlurmError, match="Problem talking to the database"):
        slurm.jobs(["2"])


def test_a_missing_sacct_is_an_accounting_that_is_off(
    programs: FakePrograms, slurm: SlurmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = tmp_path / "bin"
    only.mkdir()
    (only / "squeue").symlink_to(PROGRAMS / "squeue")
    for tool in ("bash", "cat"):
        (only / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(only))
    assert slurm.jobs(["2"]) == {}


def test_many_jobs_are_asked_for_in_portions(
    programs: FakePrograms, slurm: SlurmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_IDS_PER_QUERY", 2)
    for number in range(1, 6):
        programs.write(f"jobs/{number}", "RUNNING|n1||\n")
    assert set(slurm.jobs(["1", "2", "3", "4", "5", "5"])) == {"1", "2", "3", "4", "5"}


def test_without_slurm_the_error_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not client.on_path()
    with pytest.raises(SlurmError, match="no squeue") as caught:
        SlurmClient().jobs(["1"])
    assert "slurmddp sandbox up" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "account=",
        ),
        ("Batch job submission failed: Invalid qos specification", "qos="),
        ("invalid partition specified: gpuu", "partition="),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "gpu_request"),
        ("Batch job submission failed: Memory specification can not be satisfied", "mem_request"),
        ("Batch job submission failed: Requested node configuration is not available", "cpus_per_node"),
        (
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "time_limit=",
        ),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit ...)", "QOS"),
        ("Batch job submission failed: Invalid wckey specification", "wckey"),
        ("sbatch: unrecognized option '--exclusiv'", "`sbatch:`"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("something new", "SLURM's own words"),
    ],
)
def test_common_rejections_come_with_advice(
    programs: FakePrograms, slurm: SlurmClient, script: Path, words: str, advice: str
) -> None:
    programs.write("refusal", f"sbatch: error: {words}\n")
    with pytest.raises(SlurmError) as caught:
        slurm.submit(script, token="t:1")
    assert words in caught.value.message
    assert advice in caught.value.hint
