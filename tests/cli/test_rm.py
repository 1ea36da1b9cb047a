"""`slurmddp rm`: a run that has no job goes for good, and only with --yes."""

from __future__ import annotations

import json

import pytest

from slurmddp.cli.main import main
from slurmddp.control.json_encoding import from_json
from slurmddp.control.remove import Removed
from slurmddp.errors import EXIT_NO_RUN, EXIT_RUN_STATE, EXIT_SLURM, EXIT_USAGE
from slurmddp.runs.folder import code_snapshot
from slurmddp.runs.folder.history import UNANSWERED
from support.runs.cli_runs import end, local_process, start, submit
from support.runs.train_runs import BIG, only_run


@pytest.fixture
def ended(make_run, cluster):
    folder = make_run()
    submit(folder)
    start(folder)
    (folder.checkpoints_dir / "step-9").mkdir(parents=True)
    (folder.checkpoints_dir / "step-9" / "weights").write_bytes(b"x" * 5000)
    end(folder, "finished")
    return folder


def test_without_yes_nothing_is_removed(ended, capsys):
    assert main(["rm", "gpt"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "kB, 1 checkpoint) would be removed for good; nothing was removed." in error
    assert f"`slurmddp rm {ended.name} --yes`" in error and ended.config_file.exists()


def test_files_that_the_run_wrote_into_its_snapshot_are_named(ended, capsys):
    record = ended.code_dir / code_snapshot.RECORD
    record.mkdir(parents=True)
    (record / "files.json").write_text('["fit.py"]')
    (ended.code_dir / "logs").mkdir()
    for name in ("fit.py", *(f"logs/{number}.pt" for number in range(7))):
        (ended.code_dir / name).write_text("")
    assert main(["rm", "gpt"]) == EXIT_USAGE
    names = "logs/0.pt, logs/1.pt, logs/2.pt, logs/3.pt, logs/4.pt and 2 more"
    assert f"1 checkpoint, files that the run wrote into code/: {names}) would be" in capsys.readouterr().err


def test_with_yes_nothing_is_left(ended, capsys):
    beside = ended.path.with_name("gpt-ffffffff")
    beside.mkdir()
    assert main(["rm", "gpt", "--yes"]) == 0
    assert f"{ended.name} is removed (" in capsys.readouterr().out
    assert [*ended.path.parent.iterdir()] == [beside]
    assert main(["rm", "gpt", "--yes"]) == EXIT_NO_RUN


def test_the_json_of_a_removal_names_what_is_gone(ended, capsys):
    assert main(["rm", "gpt", "--yes", "--json"]) == 0
    removed = from_json(Removed, json.loads(capsys.readouterr().out))
    (run,) = removed.runs
    assert (run.name, run.path, run.checkpoints) == (ended.name, ended.path, 1) and run.size_bytes > 5000
    assert not removed.is_sweep and removed.kept == () and not ended.path.exists()


def test_links_in_a_run_are_not_followed(ended, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").write_text("")
    ended.code_dir.mkdir()
    (ended.code_dir / "data").symlink_to(tmp_path / "data")
    assert main(["rm", "gpt", "--yes"]) == 0
    assert (tmp_path / "data" / "kept").exists()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_an_active_run_is_refused(project, cluster, state, capsys):
    assert main(["train", *BIG]) == 0
    folder = only_run(project)
    cluster.set_state("1", state)
    assert main(["rm", folder.name, "--yes"]) == EXIT_RUN_STATE
    assert f"Run `slurmddp cancel {folder.name}` first" in capsys.readouterr().err
    assert folder.config_file.exists()


def test_a_local_run_at_work_is_refused(make_run, cluster, capsys):
    folder = make_run()
    with local_process(folder):
        assert main(["rm", "gpt", "--yes"]) == EXIT_RUN_STATE
    assert folder.config_file.exists()


def test_a_run_that_slurm_may_still_start_is_refused(project, cluster, capsys):
    assert main(["train", *BIG]) == 0
    folder = only_run(project)
    start(folder, job_id="1")
    end(folder, "finished", job_id="1")
    assert main(["rm", folder.name, "--yes"]) == EXIT_RUN_STATE
    assert "SLURM may still start job 1" in capsys.readouterr().err
    cluster.forget("1")
    folder.add_event(UNANSWERED, submitter="sbatch")
    assert main(["rm", folder.name, "--yes"]) == EXIT_SLURM
    assert folder.config_file.exists()


def test_a_damaged_run_can_be_removed(ended):
    ended.config_file.write_text(": [")
    assert main(["rm", ended.name, "--yes"]) == 0
    assert not ended.path.exists()


def test_an_interrupted_removal_says_where_the_rest_lies(ended, monkeypatch, capsys):
    """No command finds the rest by the name of the run."""

    def interrupted(path, ignore_errors=False):
        if not ignore_errors:
            raise KeyboardInterrupt

    monkeypatch.setattr("slurmddp.control.remove.shutil.rmtree", interrupted)
    assert main(["rm", "gpt", "--yes"]) == 130
    error = capsys.readouterr().err
    assert "the removal was interrupted" in error and f".removed-{ended.name}" in error


@pytest.mark.parametrize(
    ("elements", "inner", "stays"),
    [
        ("gpt-0123456789ab\n", "element", False),
        ("gpt-0123456789ab\n", "papers", True),
        ("hydrogen\nhelium\n", "element", True),
    ],
)
def test_a_hidden_folder_beside_the_runs_is_kept_unless_it_is_of_an_array(ended, elements, inner, stays):
    hidden = ended.path.parent / ".chemistry"
    (hidden / inner).mkdir(parents=True)
    (hidden / "elements").write_text(elements)
    assert main(["rm", "gpt", "--yes"]) == 0
    assert hidden.exists() == stays
