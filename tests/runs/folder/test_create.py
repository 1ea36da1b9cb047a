from __future__ import annotations

import errno
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from slurmddp.control.start import rename_earlier
from slurmddp.errors import ConfigError, SlurmddpError
from slurmddp.runs.folder import create, owner
from slurmddp.runs.folder.create import check_syntax, prepare, write_code_of_array
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job, Program
from slurmddp.slurm.script import render
from support.slurm.slurm_jobs import make_job


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "train.py").write_text("v = 1\n")
    return folder


def job_in(project: Path, **changes: object) -> Job:
    values: dict[str, object] = {
        "project_dir": project,
        "run_dir": project / "runs" / "gpt-0123abcd",
        "snapshot": True,
        **changes,
    }
    return make_job(**values)


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_everything_that_the_nodes_need_is_written(project: Path) -> None:
    job = job_in(project, overrides=("+cluster=here", "note=it's 5 $", "a=b\nc"))
    folder = prepare(job, render(job))
    assert content(folder.path) == {
        "config.yaml",
        "overrides.txt",
        "job.sbatch",
        "job.json",
        "job.pyz",
        "code.json",
        "code.txt",
        "code/train.py",
        "code/.slurmddp/commit.txt",
        "code/.slurmddp/files.json",
    }
    assert folder.config() == {"name": "gpt", "nodes": 2}
    assert folder.script_file.read_text() == render(job)
    assert shlex.split(folder.overrides_file.read_text()) == list(job.overrides)
    assert (folder.path / "logs").is_dir()


def test_a_local_run_has_no_batch_script(project: Path) -> None:
    folder = prepare(job_in(project, snapshot=False, launcher="local"), None)
    assert content(folder.path) == {"config.yaml", "overrides.txt", "code.json"}


def test_the_same_command_again_keeps_the_run_and_takes_the_new_settings(project: Path) -> None:
    folder = prepare(job_in(project), "#!/bin/bash\n# old\n")
    (folder.checkpoints_dir).mkdir()
    (folder.checkpoints_dir / "latest").write_text("step-1")
    folder.add_event("submitted", job_id="1")
    folder.log_dir(0).mkdir()
    folder.cancelled_file.touch()
    (project / "train.py").write_text("v = 2\n")
    (project / "new.py").write_text("")
    changed = Program(target="x", config={"name": "gpt", "time_limit": "2h"})
    again = prepare(job_in(project, program=changed, overrides=("time_limit=2h",)), "#!/bin/bash\n# new\n")
    assert again.path == folder.path
    assert (folder.checkpoints_dir / "latest").read_text() == "step-1"
    assert [event["event"] for event in folder.events()] == ["submitted"]
    assert folder.log_dir(0).is_dir()
    assert folder.config()["time_limit"] == "2h"
    assert folder.overrides_file.read_text() == "time_limit=2h\n"
    assert folder.script_file.read_text() == "#!/bin/bash\n# new\n"
    assert (folder.code_dir / "train.py").read_text() == "v = 2\n"
    assert (folder.code_dir / "new.py").exists()
    assert not folder.cancelled_file.exists()


def test_only_a_file_that_differs_is_replaced(project: Path) -> None:
    """A node that remembers a file which was replaced may get "Stale file handle" from the network."""
    folder = prepare(job_in(project), "#!/bin/bash\n")
    before = {path: path.stat().st_ino for path in folder.path.iterdir() if path.is_file()}
    prepare(job_in(project, overrides=("time_limit=2h",)), "#!/bin/bash\n")
    assert folder.overrides_file.read_text() == "time_limit=2h\n"
    after = {path: path.stat().st_ino for path in before}
    assert [path.name for path in before if before[path] != after[path]] == ["overrides.txt"]


def test_code_that_has_changed_is_named_once(project: Path) -> None:
    sentences: list[str] = []
    prepare(job_in(project), None, sentences.append)
    prepare(job_in(project), None, sentences.append)
    assert sentences == []
    (project / "train.py").write_text("v = 2\n")
    (project / "new.py").touch()
    (project / "losses.csv").write_text("written by the run")
    prepare(job_in(project), None, sentences.append)
    prepare(job_in(project), None, sentences.append)
    assert sentences == ["The code has changed since the last submission: new.py, train.py."]
    assert [path.name for path in (project / "runs").iterdir()] == ["gpt-0123abcd"], "no other entry"


def test_without_a_new_snapshot_the_old_code_does_not_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(job_in(project, launcher="local"), None)
    prepare(job_in(project, snapshot=False, launcher="local"), None)
    assert content(folder.path) == {"config.yaml", "overrides.txt", "code.json"}
    prepare(job_in(project), None)
    monkeypatch.setenv("PATH", str(project))  # git is gone
    prepare(job_in(project), None)
    assert not folder.code_dir.exists()
    assert "No snapshot" in (folder.path / "code.txt").read_text()


def test_what_a_job_has_written_beside_its_code_is_kept(project: Path) -> None:
    folder = prepare(job_in(project), None)
    (folder.code_dir / "out/deep").mkdir(parents=True)
    (folder.code_dir / "out/deep/weights.pt").write_text("weights")
    (folder.code_dir / "taken.py").write_text("of the job")
    (folder.code_dir / "__pycache__").mkdir()
    (folder.code_dir / "__pycache__/train.pyc").touch()
    (project / "taken.py").write_text("of the project")
    (project / "train.py").unlink()
    prepare(job_in(project), None)
    assert (folder.code_dir / "out/deep/weights.pt").read_text() == "weights"
    assert (folder.code_dir / "taken.py").read_text() == "of the project"
    assert not (folder.code_dir / "train.py").exists()
    assert not (folder.code_dir / "__pycache__").exists()
    prepare(job_in(project, snapshot=False, launcher="local"), None)
    assert (folder.path / "code.old-1/out/deep/weights.pt").read_text() == "weights"


def test_an_error_leaves_nothing_of_a_new_run_and_an_existing_run_as_it_was(project: Path) -> None:
    folder = prepare(job_in(project), "#!/bin/bash\n")
    (project / "weights.bin").touch()
    os.truncate(project / "weights.bin", 300_000_000)
    before = {name: (folder.path / name).read_bytes() for name in content(folder.path)}
    with pytest.raises(ConfigError, match=r"weights\.bin"):
        prepare(job_in(project, overrides=("new",)), "#!/bin/bash\n# other\n")
    with pytest.raises(ConfigError, match=r"weights\.bin"):
        prepare(job_in(project, run_dir=project / "runs/new"), None)
    assert list((project / "runs").iterdir()) == [folder.path]
    assert {name: (folder.path / name).read_bytes() for name in content(folder.path)} == before


def test_a_script_that_bash_cannot_read_is_refused_before_anything_is_written(project: Path) -> None:
    job = job_in(project, setup=("source 'env/bin/activate",))
    with pytest.raises(ConfigError, match="bash can't read") as caught:
        prepare(job, render(job))
    assert "setup" in caught.value.hint
    assert not (project / "runs").exists()
    check_syntax(render(make_job(setup=("module load cuda", "if true; then", "  :", "fi"))))


def test_a_folder_that_cannot_be_written_is_a_wrong_value(project: Path) -> None:
    (project / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"can't be written in .*/runs: File exists") as caught:
        prepare(job_in(project), None)
    assert "runs_dir=" in caught.value.hint


def test_an_existing_run_that_cannot_be_written_is_named_itself(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(job_in(project), None)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("slurmddp.runs.folder.create.replacing", refuse)
    with pytest.raises(ConfigError, match=f"written in {folder.path}: Permission denied") as caught:
        prepare(job_in(project, overrides=("seed=2",)), None)
    assert "runs_dir" not in caught.value.hint


def test_values_of_the_configuration_survive_as_plain_yaml(project: Path) -> None:
    config = {"text": "a: 'b' $HOME\n; rm -rf /", "é": [1, 2.5, None, True], "time": "24:00:00"}
    folder = prepare(job_in(project, program=Program(target="x", config=config)), None)
    assert yaml.safe_load(folder.config_file.read_text()) == config


def test_runs_kept_in_the_project_folder_itself_do_not_copy_each_other(project: Path) -> None:
    for name in ("a-1", "b-2"):
        folder = prepare(job_in(project, run_dir=project / name), None)
    assert {path for path in content(folder.code_dir) if not path.startswith(".")} == {"train.py"}


def test_a_config_that_was_cut_off_is_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.write_text("name: x\ngpus_per_node\n  : [{")
    with pytest.raises(SlurmddpError, match="is not a YAML mapping"):
        folder.config()


def test_a_run_of_somebody_else_is_left_as_it_is(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(project)
    folder = prepare(job, render(job))
    folder.stop_file.touch()
    before = {name: (folder.path / name).read_bytes() for name in content(folder.path)}
    monkeypatch.setattr(owner.os, "geteuid", lambda: 54321)
    message = r"gpt-0123abcd belongs to .*runs as account 54321\. Nothing was written.*name="
    (project / "train.py").write_text("v = 2\n")
    with pytest.raises(ConfigError, match=message):
        prepare(job, render(job))
    with pytest.raises(ConfigError, match=message):
        rename_earlier(folder)
    assert {name: (folder.path / name).read_bytes() for name in content(folder.path)} == before
    assert [path.name for path in folder.path.parent.iterdir()] == [folder.name]


def test_a_run_of_an_array_is_as_a_run_alone(project: Path) -> None:
    def job_of(runs: Path) -> Job:
        program = Program(target="x.y", config={"name": "gpt", "text": "\x85", "note": "a: b"})
        return job_in(project, run_name="gpt-1234", run_dir=runs / "gpt-1234", program=program)

    alone = job_of(project / "alone")
    assert create.create(alone, render(alone))
    new = job_of(project / "runs")
    assert create.create(new, render(new), with_code=False)
    assert not create.create(new, render(new), with_code=False), "the run exists"
    settings_files = {"config.yaml", "overrides.txt", "job.sbatch", "job.json"}
    assert content(new.run_dir) == settings_files and (new.run_dir / "logs").is_dir()

    array = project / "runs/.gpt.1"
    array.mkdir()
    code = write_code_of_array(array / "element", new, [new.run_dir])
    assert {*settings_files, *content(code.path)} == content(alone.run_dir)
    existing = job_of(project / "existing")
    prepare(existing, render(existing), code=code)
    assert content(existing.run_dir) == content(alone.run_dir)
    for name in content(alone.run_dir) - {"job.sbatch"}:
        assert (existing.run_dir / name).read_bytes() == (alone.run_dir / name).read_bytes(), name
        assert (existing.run_dir / name).stat().st_nlink == 1, "a script may write into its own files"
    assert yaml.safe_load((new.run_dir / "config.yaml").read_text()) == new.program.config


def test_a_file_of_the_project_that_this_account_can_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "core.123"
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(create, "write_code", refuse)
    with pytest.raises(ConfigError, match=f"{file} is in the project and can't be read") as caught:
        prepare(make_job(run_dir=tmp_path / "runs" / "first", project_dir=tmp_path), None)
    assert ".gitignore" in caught.value.hint
