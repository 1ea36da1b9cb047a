"""The client of the real SLURM: its commands and their many ways to answer."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slurmddp.errors import SlurmError
from slurmddp.host.process import OpenFiles
from slurmddp.slurm import client, command
from slurmddp.slurm.client import RETRY_DELAYS_S, SlurmClient, parse_job_id
from slurmddp.slurm.command import CommandResult
from slurmddp.slurm.limits import queries
from support.slurm.slurm_jobs import PROGRAMS, FakePrograms


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts a program on PATH which prints words and then hangs."""
    folder = tmp_path / "hanging"
    folder.mkdir()

    def add(name: str, words: str = "") -> None:
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{words}" >&2\nexec sleep 30\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return add


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
    slurm.submit(script, token="t:1", options=["--exclude=n1", "--hold"])
    assert programs.read("sbatch.argv").splitlines() == [
        "--parsable",
        "--exclude=n1",
        "--hold",
        str(script),
        "t:1",
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
    assert slurm.submit(script, token="t:1", options=["--hold"]) == "1"
    assert programs.calls("sbatch") == 1


@pytest.mark.parametrize(("token", "submissions"), [("t:1", 1), ("t:2", 2)])
def test_the_job_is_found_where_squeue_shows_no_arguments(
    programs: FakePrograms, slurm: SlurmClient, script: Path, token: str, submissions: int
) -> None:
    for name in ("queued-anyway", "no-arguments"):
        programs.write(name, "")
    programs.write("timeouts", "1")
    programs.write("job", f"JobId=1 SubmitLine=sbatch --parsable {script} t:1 WorkDir=/\n")
    assert slurm.submit(script, token=token) == str(submissions)
    assert programs.calls("sbatch") == submissions


@pytest.mark.parametrize(
    ("state", "known", "job_id"),
    [("PENDING", (), "7"), ("PENDING", ("7",), "8"), ("COMPLETED", (), "8"), ("CANCELLED", (None,), "8")],
)
def test_a_new_job_of_the_script_is_the_one_where_slurm_shows_arguments_nowhere(
    programs: FakePrograms,
    slurm: SlurmClient,
    script: Path,
    state: str,
    known: tuple[str | None, ...],
    job_id: str,
) -> None:
    """An earlier job of the same script is known, or has ended."""
    (programs.folder / "scripts").mkdir()
    programs.write("no-arguments", "")
    programs.write("timeouts", "1")
    programs.write("last-id", "7")
    programs.write("jobs/7", f"{state}|n1||\n")
    programs.write("scripts/7", f"{script}\n")
    programs.write("job", f"JobId=7 Command={script} WorkDir=/\n")
    assert slurm.submit(script, token="t:1", known=known) == job_id


@pytest.mark.parametrize(("folder", "job_id"), [("other", "8"), ("link", "7")])
def test_only_a_job_of_the_same_file_is_the_one_where_slurm_shows_arguments_nowhere(
    programs: FakePrograms, slurm: SlurmClient, tmp_path: Path, folder: str, job_id: str
) -> None:
    """Two projects may have runs of one name."""
    for name in ("mine", "other"):
        (tmp_path / name / "gpt").mkdir(parents=True)
        (tmp_path / name / "gpt" / "job.sbatch").touch()
    (tmp_path / "link").symlink_to("mine")
    (programs.folder / "scripts").mkdir()
    programs.write("no-arguments", "")
    programs.write("timeouts", "1")
    programs.write("last-id", "7")
    programs.write("jobs/7", "PENDING|||\n")
    programs.write("scripts/7", f"{tmp_path}/{folder}/gpt/job.sbatch\n")
    programs.write("job", "JobId=7 Command=/gone WorkDir=/\n")
    assert slurm.submit(tmp_path / "mine/gpt/job.sbatch", token="t:1") == job_id


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
    with pytest.raises(SlurmError, match="did not answer whether the job is in its queue") as caught:
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


def test_a_person_is_told_of_a_wait_and_a_query_gives_up_early(
    hanging: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging("squeue")
    monkeypatch.setattr(client, "QUERY_TIMEOUT_S", 0.4)
    monkeypatch.setattr(command, "_ANNOUNCED_AFTER_S", 0.1)
    said: list[str] = []
    with pytest.raises(SlurmError, match=r"squeue gave no answer within 0\.4 s\. \w") as caught:
        SlurmClient(report=said.append).jobs(["1"])
    assert said == ["squeue has not answered yet; waiting up to 0.4 s for it."]
    assert "scontrol ping" in caught.value.hint


def test_a_silent_sbatch_may_have_queued_the_job_and_its_words_are_quoted(
    programs: FakePrograms,
    hanging: Callable[..., None],
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sbatch tries again by itself, for instance while the site has too many jobs."""
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (0.0,))
    hanging("sbatch", "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying")
    slurm = SlurmClient(timeout_s=1.0, sleep=lambda _: None, report=lambda _: None)
    with pytest.raises(
        SlurmError, match=r"within 1 s\. It printed: sbatch: error: .* retrying\. \w"
    ) as caught:
        slurm.submit(script, token="t:1")
    assert caught.value.may_be_queued and "MaxJobCount" in caught.value.hint


def test_a_person_learns_why_a_job_is_submitted_without_its_exclusion(
    programs: FakePrograms, script: Path
) -> None:
    said: list[str] = []
    slurm = SlurmClient(report=said.append)
    assert slurm.would_take(script, ["--exclude=n1"])
    assert said == []
    words = "allocation failure: Requested node configuration is not available"
    programs.write("test-only", f'[[ "$*" == *--exclude* ]] && echo "{words}" >&2 && exit 1')
    assert not slurm.would_take(script, ["--exclude=n1"])
    assert said == [
        "The job does not avoid the nodes that failed recently (--exclude=n1): "
        "with these options SLURM would refuse it. "
        f"sbatch failed: {words}."
    ]


def test_an_exclusion_is_not_blamed_for_another_refusal(programs: FakePrograms, script: Path) -> None:
    said: list[str] = []
    programs.write("test-only", 'echo "sbatch: error: Do not use --mem here." >&2; exit 1')
    assert not SlurmClient(report=said.append).would_take(script, ["--exclude=n1"])
    assert said == []


def test_a_waiting_job_says_when_it_starts(programs: FakePrograms, slurm: SlurmClient, script: Path) -> None:
    job_id = slurm.submit(script, token="t:1")
    assert slurm.jobs([job_id])[job_id].start == ""
    programs.write("start", "2026-11-22T23:03:10\n")
    assert slurm.jobs([job_id])[job_id].start == "2026-11-22 23:03:10"
    for held in ("JobHeldAdmin", "JobHeldUser", "(job requeued in held state)"):  # The start is a begin time.
        programs.write(f"jobs/{job_id}", f"PENDING||{held}|\n")
        assert slurm.jobs([job_id])[job_id].start == ""
    programs.write(f"jobs/{job_id}", "RUNNING|n1||\n")
    assert slurm.jobs([job_id])[job_id].start == ""


def test_every_command_asks_the_cluster_that_a_person_selects(
    programs: FakePrograms, slurm: SlurmClient, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "beta")
    programs.write("suffix", ";beta")
    programs.write("accounting", "7|COMPLETED|0:0|n1\n")
    job_id = slurm.submit(script, token="t:1")
    assert "SLURM_CLUSTERS=beta" in programs.read("sbatch.env")
    assert set(slurm.jobs([job_id, "7"])) == {job_id, "7"}


@pytest.mark.parametrize("clusters", ["all", "alpha,beta"])
def test_several_clusters_at_once_are_refused_before_anything_is_queued(
    clusters: str, programs: FakePrograms, slurm: SlurmClient, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", clusters)
    with pytest.raises(SlurmError, match=f"SLURM_CLUSTERS={clusters} names several"):
        slurm.submit(script, token="t:1")
    assert programs.calls("sbatch") == 0


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
    assert (jobs["2"].exit_code, jobs["2"].nodes) == (0, "n[1-2]")
    assert jobs["3"].exit_code == 78
    assert jobs["4"].nodes == ""


def test_accounting_names_the_elements_of_an_array_that_never_started(
    programs: FakePrograms, slurm: SlurmClient
) -> None:
    programs.write("jobs/99", "RUNNING||None|\n")
    programs.write("accounting", "7_1|COMPLETED|0:0|n1\n7_[2-4,9%2]|CANCELLED by 0|0:0|None assigned\n")
    found = slurm.jobs(["7_1", "7_3", "7_9", "7_5"])
    assert {job_id: job.state for job_id, job in found.items()} == {
        "7_1": "COMPLETED",
        "7_3": "CANCELLED",
        "7_9": "CANCELLED",
    }


def test_the_element_of_an_array_is_found_by_the_names_beside_its_script(
    programs: FakePrograms, slurm: SlurmClient, tmp_path: Path
) -> None:
    runs = [tmp_path / "runs" / name for name in ("gpt-1", "gpt-2", "gpt-3")]
    array = tmp_path / "runs" / ".array"
    array.mkdir(parents=True)
    (array / "elements").write_text("gpt-1\ngpt-2\ngpt-3\n")
    (programs.folder / "scripts").mkdir()
    for job_id, script in (("7_0", array), ("7_2", array), ("8", runs[0])):
        programs.write(f"jobs/{job_id}", "PENDING||Priority|\n")
        programs.write(f"scripts/{job_id}", f"{script}/job.sbatch\n")
    found = slurm.jobs_of_each(runs)
    assert [set(found[run]) for run in runs] == [{"7_0", "8"}, set(), {"7_2"}]


def test_a_job_with_an_id_of_ours_is_known_by_its_script(
    programs: FakePrograms, slurm: SlurmClient, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "runs/.gpt.1", tmp_path / "other/.gpt.1"
    for folder, name in ((ours, "gpt-1"), (theirs, "mlp-1")):
        folder.mkdir(parents=True)
        (folder / "elements").write_text(f"{name}\n")
    (programs.folder / "scripts").mkdir()
    for job_id, script in (
        ("7_0", f"{ours}/a.sh"),
        ("8_0", f"{theirs}/a.sh"),
        ("9_0", "/a.sh"),
        ("9", "(null)"),
    ):
        programs.write(f"jobs/{job_id}", "RUNNING|n1||slurmddp:array-0123456789ab mine|too\n")
        programs.write(f"scripts/{job_id}", f"{script}\n")
    tokens = ("array-0123456789ab", "gpt-1:0123456789ab", "mlp-1:0123456789ab")
    lines = [
        *(f"1{job}_0|FAILED|1:0|n1|sbatch --comment=slurmddp:{tokens[0]} {folder}/a.sh"
          for job, folder in enumerate((ours, theirs))),
        *(f"2{job}|FAILED|1:0|n1|sbatch --parsable --comment=slurmddp:{token} /no/a.sh"
          for job, token in enumerate(tokens[1:])),
        "30|FAILED|1:0|n1|sbatch --wrap sleep 1", "31|FAILED|1:0|n1|",
    ]  # fmt: skip
    programs.write("accounting", "\n".join(lines) + "\n")
    found = slurm.jobs(["7_0", "8_0", "9_0", "9", "10_0", "11_0", "20", "21", "30", "31"])
    assert len(found) == 10
    assert [one for one, job in found.items() if job.may_be_of(tmp_path / "runs/gpt-1")] == [
        "7_0",
        "10_0",
        "20",
        "31",
    ]


def test_without_accounting_unknown_jobs_are_left_out(programs: FakePrograms, slurm: SlurmClient) -> None:
    programs.write("jobs/1", "RUNNING|n1||\n")
    assert set(slurm.jobs(["1", "2"])) == {"1"}


def test_a_silent_accounting_leaves_only_forgotten_jobs_unknown(
    programs: FakePrograms, slurm: SlurmClient
) -> None:
    programs.write("accounting-down", NO_SLURMDBD)
    programs.write("jobs/1", "RUNNING|n1||\n")
    jobs = slurm.jobs(["1", "2"])
    assert (jobs["1"].state, jobs["1"].error) == ("RUNNING", "")
    assert (jobs["2"].state, jobs["2"].error) == (
        "UNKNOWN",
        "sacct failed: sacct: error: Problem talking to the database: Connection refused.",
    )


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
    monkeypatch.setattr(client, "IDS_PER_QUERY", 2)
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
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "wait until your other jobs have ended",
        ),
        ("Problem talking to the database: Connection refused", "accounting (slurmdbd) does not answer"),
        ("Batch job submission failed: Invalid wckey specification", "wckey"),
        ("Batch job submission failed: Invalid feature specification", "constraint"),
        ("Batch job submission failed: Requested reservation is invalid", "reservation"),
        ("Batch job submission failed: Access denied to requested reservation", "reservation"),
        ("Batch job submission failed: Invalid license specification", "licenses"),
        ("error: Use of --mem is not allowed here: memory comes with the CPUs", "mem_request: none"),
        ("sbatch: unrecognized option '--exclusiv'", "`sbatch:`"),
        ("error: Invalid --begin specification", "`sbatch:`"),
        ("Batch job submission failed: Job dependency problem", "`sbatch:`"),
        ("Batch job submission failed: Invalid node name specified", "`nodelist` or `exclude`"),
        ("sbatch: fatal: Could not establish a configuration source", "launcher=local"),
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
    assert f"{words}. " in str(caught.value)
    assert advice in caught.value.hint


def test_a_fatal_error_is_told_without_the_tries_before_it(
    programs: FakePrograms, slurm: SlurmClient
) -> None:
    programs.write("silence", NO_SLURM)
    with pytest.raises(SlurmError) as caught:
        queries.partitions(slurm)
    assert (
        caught.value.message
        == "scontrol failed: scontrol: fatal: Could not establish a configuration source."
    )
    assert "go to a login node" in caught.value.hint


NO_SLURM = """\
scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
scontrol: error: fetch_config: DNS SRV lookup failed
scontrol: error: _establish_config_source: failed to fetch config
scontrol: fatal: Could not establish a configuration source
"""
"""SLURM's programs print this on a machine without slurm.conf and without a controller."""


NO_SLURMDBD = """\
sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:127.0.0.1:25315: Connection refused
sacct: error: Sending PersistInit msg: Connection refused
sacct: error: Problem talking to the database: Connection refused
"""  # noqa: E501
"""sacct 22.05 prints this while slurmdbd is away."""


@pytest.mark.parametrize("between", ["", "a "], ids=["22.05", "26.05"])
def test_a_test_of_a_script_queues_nothing_and_tells_the_start(
    programs: FakePrograms, slurm: SlurmClient, between: str
) -> None:
    words = (
        f"sbatch: Job 7 to start at 2026-11-25T07:49:25 {between}using 8 processors on nodes n[1-2] "
        "in partition low"
    )
    programs.write("test-only", f'grep -q "nodes=2" "${{@: -1}}" && echo "{words}" >&2')
    assert slurm.test("#SBATCH --nodes=2\n") == "at 2026-11-25 07:49:25 with 8 processors on nodes n[1-2]"
    programs.write("test-only", "")
    assert slurm.test("#SBATCH --nodes=2\n") == ""
    programs.write("refusal", "allocation failure: Invalid license specification\n")
    with pytest.raises(SlurmError, match="Invalid license"):
        slurm.test("")
    assert programs.calls("sbatch") == 0


@pytest.mark.parametrize(("option", "near"), [("mailtype", "Did you mean mail-type? "), ("mail-type", "")])
def test_an_unknown_option_is_told_with_near_options_of_the_sites_own_sbatch(
    programs: FakePrograms, slurm: SlurmClient, script: Path, option: str, near: str
) -> None:
    programs.write("refusal", f"sbatch: unrecognized option '--{option}=END'\n")
    with pytest.raises(SlurmError) as caught:
        slurm.submit(script, token="t:1")
    assert caught.value.hint == f"{near}Correct the option under `sbatch:` in the cluster file."


@pytest.mark.parametrize(("own", "ahead"), [("7", 1), ("9", 0), ("0", 2)])
def test_jobs_ahead_have_a_higher_priority_in_the_same_partition(
    programs: FakePrograms, slurm: SlurmClient, own: str, ahead: int
) -> None:
    for job_id, place in {"1": f"gpu|{own}", "2": "gpu|8", "3": "gpu|7", "4": "cpu|99"}.items():
        programs.write(f"jobs/{job_id}", "PENDING||Priority|\n")
        programs.write(f"place-{job_id}", place)
    assert slurm.jobs_ahead("1") == ahead
    assert slurm.jobs_ahead("77") is None


def test_jobs_that_wait_for_a_time_or_a_job_or_are_held_are_not_ahead(
    programs: FakePrograms, slurm: SlurmClient
) -> None:
    reasons = ["BeginTime", "Dependency", "DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin"]
    for job_id, reason in enumerate([*reasons, "Resources", "Priority"], start=1):
        programs.write(f"jobs/{job_id}", f"PENDING||{reason}|\n")
    assert slurm.jobs_ahead("7") == 1
    assert [slurm.jobs_ahead(job_id) for job_id in "12345"] == [None] * 5


def test_jobs_ahead_of_equal_priority_have_lower_ids(programs: FakePrograms, slurm: SlurmClient) -> None:
    for job_id in ("9", "10_2", "10_9", "10_10", "11"):
        programs.write(f"jobs/{job_id}", "PENDING||JobArrayTaskLimit|\n")
    assert [slurm.jobs_ahead(job_id) for job_id in ("9", "10_9", "10_10", "11")] == [0, 2, 3, 4]


def test_a_sacct_of_before_21_08_is_asked_without_the_submit_line(
    programs: FakePrograms, slurm: SlurmClient
) -> None:
    programs.write("accounting", "7|COMPLETED|0:0|n1\n")
    programs.write("no-field", "SubmitLine")
    assert slurm.jobs(["7"])["7"].state == "COMPLETED"


def test_a_submission_waits_for_a_slow_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query has ten seconds at most, but the answer to a submission is worth a minute."""
    limits = []

    def answer(command: Sequence[str], environ: object, timeout_s: float, **_: object) -> CommandResult:
        limits.append(timeout_s)
        return CommandResult(0)

    monkeypatch.setattr(client, "run_command", answer)
    SlurmClient().jobs_of_each([tmp_path])
    SlurmClient().jobs(["1"])
    assert limits[:2] == [60.0, 10.0]


def test_a_job_gets_the_limit_of_open_files_that_the_command_began_with(
    programs: FakePrograms, slurm: SlurmClient, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lock of an array is an open file, but a node with a lower limit would complain of a higher one."""
    sbatch = tmp_path / "own" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\nulimit -Sn > {tmp_path}/limit\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(OpenFiles, "first", None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(900, hard), hard))
    try:
        assert OpenFiles.allow_most() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert slurm.submit(script, token="t:1") == "7"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "limit").read_text().strip() == "900"
