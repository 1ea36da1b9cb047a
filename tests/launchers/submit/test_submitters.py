from __future__ import annotations

import pickle
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmddp.errors import ConfigError, SlurmError
from slurmddp.launchers.submit.fit import refuse_misfit
from slurmddp.launchers.submit.submitit import RunScript
from slurmddp.launchers.submit.submitter import build
from slurmddp.runs.folder.create import prepare
from slurmddp.runs.folder.excluded_nodes import exclude, share
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job
from slurmddp.slurm.limits.partitions import parse_partitions
from slurmddp.slurm.sbatch_options import sbatch_options
from slurmddp.slurm.script import outline, render
from support.slurm.slurm_in_memory import FakeSlurm
from support.slurm.slurm_jobs import PARTITIONS, make_job, options_in

# submitit looks for srun before it does anything.
pytestmark = pytest.mark.usefixtures("programs")

BOTH = pytest.mark.parametrize("name", ["sbatch", "submitit"])


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm(site=parse_partitions(PARTITIONS))


def prepared(tmp_path: Path, **changes: object) -> Job:
    values: dict[str, object] = {
        "run_dir": tmp_path / "runs" / "gpt-0123abcd",
        "project_dir": tmp_path,
        **changes,
    }
    job = make_job(**values)
    prepare(job, render(job))
    return job


@BOTH
def test_submissions_are_queued_recorded_and_marked(name: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(tmp_path)
    assert [build(name, slurm).submit(job) for _ in range(2)] == ["1", "2"]
    recorded = [(one["event"], one["job_id"], one["submitter"]) for one in RunFolder(job.run_dir).events()]
    assert recorded == [("submitted", "1", name), ("submitted", "2", name)]
    tokens = {submission.token for submission in slurm.submissions}
    assert len(tokens) == 2 and all(token.startswith("slurmddp:gpt-0123abcd:") for token in tokens)


@BOTH
def test_a_refusal_of_slurm_is_passed_on_and_not_recorded(
    name: str, slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.refusal = "sbatch: error: Invalid account"
    job = prepared(tmp_path)
    with pytest.raises(SlurmError, match="Invalid account"):
        build(name, slurm).submit(job)
    assert RunFolder(job.run_dir).events() == []


def test_a_job_that_would_never_start_is_refused_if_slurm_answers(slurm: FakeSlurm) -> None:
    job = make_job(nodes=9, time_limit_min=99999)
    with pytest.raises(ConfigError, match="nodes=9"):
        refuse_misfit(job, slurm)
    slurm.silence = "scontrol failed: Access denied"
    assert refuse_misfit(job, slurm) == []


def test_sbatch_gets_the_script_of_the_run_folder(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(tmp_path)
    build("sbatch", slurm).submit(job)
    assert slurm.submissions[0].script == render(job)


def submitit_script(slurm: FakeSlurm, job: Job) -> list[str]:
    build("submitit", slurm).submit(job)
    return slurm.submissions[-1].script.splitlines()


def test_submitit_asks_slurm_for_the_same(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(
        tmp_path,
        partition="low",
        account="a",
        gpus_per_node=2,
        gpu_request="gres",
        gpu_type="a100",
        mem_gb=8,
        cpus_per_node=4,
        time_limit_min=90,
        signal_lead_s=33,
        sbatch={"exclusive": True, "mail-type": "END", "nice": 5},
    )
    options = options_in("\n".join(submitit_script(slurm, job)))
    asked = dict(shlex.split(option)[0].removeprefix("--").partition("=")[::2] for option in options)
    wanted = {key: "" if value is True else str(value) for key, value in sbatch_options(job).items()}
    assert {key.replace("_", "-"): value for key, value in asked.items()} == wanted


def test_submitit_sends_no_time_and_no_workload_key_unless_set(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert not re.search("--time|wckey", "\n".join(submitit_script(slurm, prepared(tmp_path))))
    assert "#SBATCH --wckey=mine" in submitit_script(slurm, prepared(tmp_path, sbatch={"wckey": "mine"}))


def test_a_dry_run_spells_the_time_limit_as_its_summary_does(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(tmp_path, time_limit_min=10)
    line = "#SBATCH --time=00:10:00"
    assert line in outline(job)
    assert line in build("submitit", slurm).script(job).splitlines()
    assert line in submitit_script(slurm, job)


def test_submitits_shell_outlives_signals_and_calls_the_interpreter_of_the_job(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    lines = submitit_script(slurm, prepared(tmp_path, python="/my env/bin/python"))
    assert [line for line in lines if line.startswith("trap : TERM USR1 USR2")]
    assert lines[-1].startswith("'/my env/bin/python' -u -m submitit.core._submit ")
    assert not [line for line in lines if line.startswith("srun")]


def test_submitits_files_stay_inside_the_run_folder_and_name_only_the_script(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    job = prepared(tmp_path)
    build("submitit", slurm).submit(job)
    names = {path.name for path in (job.run_dir / "submitit").iterdir() if not path.name.startswith(".")}
    assert names == {"1_submitted.pkl", "1_submission.sh"}
    task = pickle.loads((job.run_dir / "submitit/1_submitted.pkl").read_bytes())
    assert isinstance(task.function, RunScript)
    assert task.function.script == str(job.run_dir / "job.sbatch")


@pytest.mark.parametrize("code", [0, 75, 78])
def test_submitits_job_ends_with_the_code_of_the_script(tmp_path: Path, code: int) -> None:
    """Started twice from one pickle, as SLURM does after a requeue, with the signals of a preemption."""
    (tmp_path / "job.sbatch").write_text(
        f"kill -TERM $PPID; kill -CONT $PPID; kill -USR2 $PPID; exit {code}\n"
    )
    folder = tmp_path / "submitit"
    folder.mkdir()
    probe = (
        "import sys; from submitit.core.utils import DelayedSubmission as D\n"
        "from slurmddp.launchers.submit.submitit import RunScript\n"
        f"D(RunScript({str(tmp_path / 'job.sbatch')!r})).dump({str(folder / '7_submitted.pkl')!r})\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
    environ = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-u", "-m", "submitit.core._submit", str(folder)],
            env=environ,
            capture_output=True,
        )
        assert done.returncode == code


def test_without_slurm_submitit_says_where_to_go(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepared(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="finds no SLURM") as caught:
        build("submitit", slurm).submit(job)
    assert "sandbox up" in caught.value.hint


def test_an_unknown_submitter_is_refused_with_the_near_names() -> None:
    with pytest.raises(ConfigError, match="'submitt'") as caught:
        build("submitt")
    assert "submitit" in caught.value.hint


def fail(job: Job, node: str, *, lasts_s: float = 3600) -> None:
    entry = {
        "time": 1,
        "node": node,
        "reason": "SLURM shows its state as DOWN",
        "expires": time.time() + lasts_s,
    }
    append_line(RunFolder(job.run_dir).excluded_file, entry)


@BOTH
def test_nodes_that_failed_under_the_run_are_excluded(name: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(tmp_path, sbatch={"comment": "thesis, ch. 3", "exclude": "n[7-8]"})
    for node in ("n2", "n1", "n1"):
        fail(job, node)
    fail(job, "n3", lasts_s=-1)
    build(name, slurm).submit(job)
    assert slurm.submissions[0].options == ("--exclude=n[7-8],n1,n2",)
    (line,) = re.findall("^#SBATCH --comment=(.*)$", slurm.submissions[0].script, re.MULTILINE)
    assert shlex.split(line) == ["thesis, ch. 3"], "the comment is the person's alone"


def test_a_failed_node_that_a_person_asks_for_is_not_excluded(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(tmp_path, sbatch={"nodelist": "n[1-2]"})
    for node in ("n2", "n3"):
        fail(job, node)
    build("sbatch", slurm).submit(job)
    assert slurm.submissions[0].options == ("--exclude=n3",)


@BOTH
def test_nodes_that_failed_under_another_run_of_the_cluster_are_excluded(
    name: str, slurm: FakeSlurm, tmp_path: Path
) -> None:
    job, other = prepared(tmp_path / "one"), prepared(tmp_path / "two")
    for cluster, node in (("alpha", "n1"), ("beta", "n2")):
        exclude(RunFolder(other.run_dir), node, "SLURM shows its state as DOWN", hours=1)
        share(RunFolder(other.run_dir), cluster, since=0)
        RunFolder(other.run_dir).excluded_file.unlink()
    build(name, slurm).submit(job)
    assert slurm.submissions[0].options == ("--exclude=n1",)


@pytest.mark.parametrize(
    ("changes", "lacks_nodes"),
    [({}, True), ({"exclude_failed_h": 0}, False), ({"sbatch": {"exclude": "/home/ada/bad-nodes"}}, False)],
    ids=["no others", "policy", "file"],
)
def test_failed_nodes_are_taken_where_there_are_no_others_or_a_person_wants_them(
    slurm: FakeSlurm, tmp_path: Path, changes: dict[str, object], lacks_nodes: bool
) -> None:
    job = prepared(tmp_path, **changes)
    fail(job, "n1")
    slurm.lacks_nodes = lacks_nodes
    assert build("sbatch", slurm).submit(job) == "1"
    assert slurm.submissions[0].options == ()


def test_a_damaged_list_of_failed_nodes_stops_nobody(slurm: FakeSlurm, tmp_path: Path) -> None:
    job = prepared(tmp_path)
    RunFolder(job.run_dir).excluded_file.write_text("mended by hand: n1\n")
    build("sbatch", slurm).submit(job)
    assert slurm.submissions[0].options == ()
