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
    return folder


def test_the_mark_of_a_whole_run_comes_last_and_a_second_start_replaces_the_files(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "gpt-1234ffff")
    run.path.mkdir()
    really, renamed = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if path.name == ".job.sbatch" and not renamed:
            renamed.append(sorted(one.name for one in run.path.iterdir()))
            raise OSError("The node is gone.")
        return really(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="node is gone"):
        fill(run, shared, "0000abcd")
    assert renamed == [[".job.sbatch", "code", "job.json", "job.pyz", "logs"]]
    (run.code_dir / "package/fit.py").unlink()
    before = os.umask(0)
    try:
        fill(run, shared, "0000abcd")
    finally:
        os.umask(before)
    assert run.script_file.read_text() == run.job_file.read_text() == "run /runs/gpt-1234ffff\n"
    assert run.code_dir.joinpath("data").readlink() == Path("/data")
    assert run.batch_file.samefile(shared / "job.pyz")
    assert (run.code_dir / "package/fit.py").samefile(shared / "code/package/fit.py")
    assert sorted(one.name for one in run.path.iterdir()) == [
        "code",
        "job.json",
        "job.pyz",
        "job.sbatch",
        "logs",
    ]
    assert not any(file.stat().st_mode & 0o022 for file in (run.script_file, run.job_file))


def test_a_run_that_was_removed_is_not_made_again(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fill(RunFolder(tmp_path / "gpt-1234ffff"), shared, "0000abcd")
    assert not (tmp_path / "gpt-1234ffff").exists()


def test_files_are_copied_where_no_hard_links_are(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no hard links")

    monkeypatch.setattr(os, "link", refuse)
    run = RunFolder(tmp_path / "gpt-1234ffff")
    run.path.mkdir()
    fill(run, shared, "0000abcd")
    assert (run.code_dir / "package/fit.py").read_text() == "pass\n"
    assert run.batch_file.read_bytes() == b"\xff" and run.batch_file.stat().st_nlink == 1
    assert run.code_dir.joinpath("data").is_symlink()
