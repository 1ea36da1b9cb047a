"""`slurmddp train --dry-run` prints the script byte for byte, with notes, and writes nothing."""

from __future__ import annotations

import subprocess

import pytest

from slurmddp.cli.main import main
from slurmddp.config.checks import signatures
from slurmddp.config.composition.compose import compose
from slurmddp.config.job import build_job
from slurmddp.slurm import client
from slurmddp.slurm.limits.partitions import Partition
from slurmddp.slurm.script import render
from support.runs.train_runs import BIG, slurmddp


def test_a_dry_run_prints_the_bytes_that_a_submission_sends(project, cluster, capsys):
    assert main(["train", "--dry-run", *BIG]) == 0
    shown = capsys.readouterr()
    assert not (project / "runs").exists() and not cluster.submissions
    job = build_job(compose(BIG, project), project_dir=project, overrides=BIG)
    assert shown.out == render(job)
    assert main(["train", *BIG]) == 0
    assert cluster.submissions[0].script == shown.out
    assert subprocess.run(["bash", "-n"], input=shown.out, text=True).returncode == 0


def test_a_job_gets_the_paths_that_the_person_sees_not_those_behind_links(
    project, cluster, tmp_path, monkeypatch, capsys
):
    (tmp_path / "home").symlink_to(project.parent)
    seen = tmp_path / "home" / project.name
    monkeypatch.chdir(seen)
    monkeypatch.setenv("PWD", str(seen))
    assert main(["train", *BIG]) == 0
    (submission,) = cluster.submissions
    assert str(project) not in submission.script
    assert submission.script.count(f"{seen}/runs/first-") > 3 and str(submission.path).startswith(str(seen))
    (run,) = (seen / "runs").glob("first-*")
    assert f"project_dir: {seen}\n" in (run / "config.yaml").read_text()


def test_a_dry_run_prints_what_submitit_sends(project, cluster, programs, capsys):
    asked = [*BIG, "submitter=submitit", "account=a b", "+cluster.sbatch.wckey=k", "time_limit=90"]
    assert main(["train", "--dry-run", *asked]) == 0
    shown = capsys.readouterr()
    assert not (project / "runs").exists() and not cluster.submissions
    assert (
        "runs/first-" in shown.err and "job.sbatch, which a dry run with submitter=sbatch prints" in shown.err
    )
    assert main(["train", *asked]) == 0
    assert cluster.submissions[0].script == shown.out
    assert "submitit.core._submit" in shown.out


def test_a_dry_run_shows_submitits_script_where_there_is_no_slurm(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(project))
    assert main(["train", "--dry-run", *BIG, "submitter=submitit"]) == 0
    assert "submitit.core._submit" in capsys.readouterr().out


def test_a_dry_run_repeats_the_lines_that_settings_decide(project, cluster, capsys):
    assert main(["train", "--dry-run", *BIG, "+cluster.srun.cpu-bind=cores"]) == 0
    shown = capsys.readouterr()
    chosen = [line.strip() for line in shown.err.splitlines()[1:]]
    script = [line.strip() for line in shown.out.splitlines()]
    assert [line for line in chosen if line.startswith("#SBATCH")] == [
        line for line in script if line.startswith("#SBATCH")
    ]
    assert {"export A=1", "module load cuda"} <= set(chosen) & set(script)
    assert chosen[-1].startswith("srun --nodes=3 ") and "--cpu-bind=cores" in chosen[-1]


def test_a_dry_run_says_how_many_nodes_go_on_when_one_is_lost(project, cluster, capsys):
    elastic = ["train", "--dry-run", *BIG, "nodes=8", "elastic=true"]
    assert main(elastic) == 0
    assert (
        "it continues on 4 of the other 7 nodes, because 7 nodes can't share the 1024 samples"
        in capsys.readouterr().err
    )
    for silent in (["train.global_batch=896"], ["elastic=false"], ["nodes=1"]):
        assert main([*elastic, *silent]) == 0
        assert "note" not in capsys.readouterr().err, silent


@pytest.mark.parametrize(
    ("own", "is_noted"),
    [
        ([], True),
        (["cpus_per_node=2"], False),
        (["ranks_per_node=1"], False),
        (["+cluster.sbatch.exclusive=true"], False),
    ],
)
def test_ranks_that_share_one_cpu_by_default_are_noted(project, cluster, capsys, own, is_noted):
    assert main(["train", "--dry-run", "+cluster=sandbox", "ranks_per_node=2", *own]) == 0
    assert ("Set cpus_per_node=2 for one CPU each" in capsys.readouterr().err) == is_noted


def test_a_dry_run_says_whether_this_slurm_would_take_it(project, cluster, capsys):
    cluster.site = {"gpu": Partition(name="gpu", max_nodes=2, max_time_min=60)}
    assert main(["train", "--dry-run", *BIG]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n")
    notes = [line for line in shown.err.splitlines() if "note" in line]
    assert len(notes) == 2 and all(
        note.startswith("slurmddp: note: This SLURM would never") for note in notes
    )
    cluster.silence = "it is asleep"
    assert main(["train", "--dry-run", *BIG]) == 0
    assert "The limits of this SLURM were not checked: it is asleep" in capsys.readouterr().err


def test_a_dry_run_here_prints_commands_that_a_shell_can_read(project, capsys):
    size = ["nodes=2", "gpus_per_node=2", "launcher=local"]
    assert main(["train", "--dry-run", *BIG, *size, "cluster.env.B='a b'"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("-m slurmddp.launchers.agent") == 2
    assert "SLURM_STEP_NUM_NODES=2" in shown and "B='a b'" in shown
    assert subprocess.run(["bash", "-n"], input=shown, text=True).returncode == 0
    assert not (project / "runs").exists()


def test_a_misspelled_option_of_sbatch_is_noted_without_slurm(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(project))
    own = ["+cluster.sbatch.qoss=1", "+cluster.sbatch.mail_type=FAIL", "+cluster.sbatch.of-a-plugin=1"]
    assert main(["train", "--dry-run", *BIG, *own]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "not an option" in line]
    assert (
        len(notes) == 1
        and "cluster.sbatch.qoss is not an option of SLURM's sbatch. Did you mean qos" in notes[0]
    )


def test_a_dry_run_names_the_clusters_that_are_too_many(project, programs, monkeypatch, capsys):
    monkeypatch.setattr(client, "on_path", lambda: True)
    monkeypatch.setenv("SLURM_CLUSTERS", "a,b")
    assert main(["train", "--dry-run", *BIG]) == 0
    assert "SLURM_CLUSTERS=a,b names several clusters" in capsys.readouterr().err


def test_a_value_that_no_shell_reads_is_noted(project, cluster, capsys):
    assert (
        main(["train", "--dry-run", *BIG, "+cluster.env.HF_HOME='$SCRATCH/hf'", "+cluster.env.B='5$'"]) == 0
    )
    told = capsys.readouterr().err
    assert "cluster.env.HF_HOME is the text $SCRATCH/hf, because no shell reads it." in told
    assert "export HF_HOME=$SCRATCH/hf" in told and "cluster.env.B" not in told


def test_a_dry_run_loads_only_what_it_needs(project, cluster, monkeypatch):
    """Modules about other runs, and the sources of torch, would take a quarter of its time."""
    output = slurmddp(project, "train", "--dry-run", *BIG, PYTHONPROFILEIMPORTTIME="1")
    assert "slurmddp.slurm.script" in output and "slurmddp.runs.status" not in output

    monkeypatch.setattr(signatures, "_parsed", lambda file, *version: pytest.fail(f"{file} is parsed"))
    assert main(["train", "--dry-run", *BIG]) == 0
