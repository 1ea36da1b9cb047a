"""The first start of an element of a sweep's array: the run folder gets the files of the array."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmddp.batch.element import fill
from slurmddp.runs.folder.layout import RunFolder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / ".gpt.1/element"
    (folder / "code/package").mkdir(parents=True)
    (folder / "code/package/fit.py").write_text("pass\n")
    (folder / "code/data").symlink_to("/data")
    (folder / "job.pyz").write_bytes(b"\xff")
    for name in ("job.json", "job.sbatch"):
        (folder / name).write_text("run /runs/gpt-0000abcd\n")
    (folder.parent / "elements").write_text("gpt-0000ffff\ngpt-1234ffff\n")
    return folder


def run_beside(shared: Path) -> RunFolder:
    run = RunFolder(shared.parents[1] / "gpt-1234ffff")
    run.path.mkdir()
    run.config_file.write_text("seed: 1\n")
    return run


def test_the_mark_of_a_whole_run_comes_last_and_a_second_start_replaces_the_files(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_beside(shared)
    really, renamed = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if path.name == ".job.sbatch" and not renamed:
            renamed.append(sorted(one.name for one in run.path.iterdir()))
            raise OSError("The node is gone.")
        return really(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="node is gone"):
        fill(run, shared, "0000abcd")
    assert renamed == [[".job.sbatch", "code", "config.yaml", "job.json", "job.pyz", "logs"]]
    (run.code_dir / "package/fit.py").unlink()
    before = os.umask(0)
    try:
        fill(run, shared, "0000abcd")
    finally:
        os.umask(before)
    assert run.script_file.read_text() == run.job_file.read_text() == "run /runs/gpt-1234ffff\n"
    assert run.code_dir.joinpath("data").readlink() == Path("/data")
    files = [path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path.stat().st_nlink for path in files] == [1] * 5, "a run that writes into a file is alone"
    assert (run.code_dir / "package/fit.py").read_text() == "pass\n"
    assert run.batch_file.read_bytes() == b"\xff"
    assert sorted(one.name for one in run.path.iterdir()) == [
        "code",
        "config.yaml",
        "job.json",
        "job.pyz",
        "job.sbatch",
        "logs",
    ]
    assert not any(file.stat().st_mode & 0o022 for file in (run.script_file, run.job_file))


@pytest.mark.parametrize("name", ["gpt-1234ffff", "", "gpt-0000beef"])
def test_a_folder_that_is_no_run_of_the_array_is_left_alone(shared: Path, tmp_path: Path, name: str) -> None:
    """A run that was removed is not made again, and an empty name would mean the folder of all runs."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/thesis.py").write_text("mine\n")
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    if name == "gpt-0000beef":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 1\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match="is no run folder of the array"):
        fill(RunFolder(f"{tmp_path}/{name}"), shared, "0000abcd")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_has_its_files_keeps_what_it_wrote_into_them(shared: Path) -> None:
    """The script may see no file of a shared file system that fails for a moment."""
    run = run_beside(shared)
    fill(run, shared, "0000abcd")
    (run.code_dir / "results.csv").write_text("written by the run\n")
    fill(run, shared, "0000abcd")
    assert (run.code_dir / "results.csv").read_text() == "written by the run\n"
