from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from slurmddp.control.ssh.files_to_send import files_to_send
from slurmddp.errors import ConfigError
from slurmddp.runs.folder import project_files
from slurmddp.runs.folder.code_snapshot import take
from slurmddp.runs.folder.project_files import sources


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def no_settings_of_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setattr(metadata, "distributions", list)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "pkg/model.py").write_text("x = 1\n")
    (folder / ".gitignore").write_text("data/\n*.pt\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def taken(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }


RECORD = {".slurmddp/commit.txt", ".slurmddp/diff.patch", ".slurmddp/files.json"}


def links(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path.readlink() for path in folder.rglob("*") if path.is_symlink()}


def test_tracked_and_new_files_are_copied_and_ignored_ones_are_linked(project: Path, tmp_path: Path) -> None:
    (project / "new.py").write_text("new\n")
    (project / "train.py").write_text("print(2)\n")
    (project / "data").mkdir()
    (project / "data/big.bin").write_text("x")
    (project / "model.pt").write_text("x")
    (project / "pkg/model.py").unlink()
    note = take(project, tmp_path / "code")
    assert taken(tmp_path / "code") == {"train.py", "new.py", ".gitignore", "data", "model.pt"} | RECORD
    assert links(tmp_path / "code") == {name: project / name for name in ("data", "model.pt")}
    assert "Linked to the project, not copied: data, model.pt." in note
    assert (tmp_path / "code/train.py").read_text() == "print(2)\n"
    assert "Snapshot of 3 files" in note


def test_the_commit_and_the_difference_are_recorded(project: Path, tmp_path: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")
    assert take(project, tmp_path / "clean").endswith(f"commit {commit}.")
    assert (tmp_path / "clean/.slurmddp/diff.patch").read_text() == ""
    (project / "train.py").write_text("print(2)\n")
    assert f"commit {commit}, with uncommitted changes" in take(project, tmp_path / "code")
    assert (tmp_path / "code/.slurmddp/commit.txt").read_text() == f"{commit}\n"
    assert "+print(2)" in (tmp_path / "code/.slurmddp/diff.patch").read_text()


def test_a_repository_without_commits_is_taken_too(tmp_path: Path) -> None:
    project = tmp_path / "fresh"
    project.mkdir()
    (project / "a.py").write_text("")
    git(project, "init", "-q")
    assert take(project, tmp_path / "code") == f"Snapshot of 1 file of {project}: no commit."
    assert "no commit" in (tmp_path / "code/.slurmddp/commit.txt").read_text()


def test_outside_a_repository_and_without_git_nothing_is_taken(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not in a git repository" in take(tmp_path, tmp_path / "code")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no git" in take(project, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_only_the_project_folder_of_a_larger_repository_is_taken(project: Path, tmp_path: Path) -> None:
    take(project / "pkg", tmp_path / "code")
    assert taken(tmp_path / "code") == {"model.py"} | RECORD


def test_hostile_names_links_and_programs_survive(project: Path, tmp_path: Path) -> None:
    name = 'it\'s "a" $HOME\n\té.py'
    (project / name).write_text("odd\n")
    (project / "dangling").symlink_to("nowhere")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    take(project, tmp_path / "code")
    assert (tmp_path / "code" / name).read_text() == "odd\n"
    assert (tmp_path / "code/dangling").is_symlink()
    assert os.access(tmp_path / "code/run.sh", os.X_OK)


def test_nested_repositories_are_code_too(project: Path, tmp_path: Path) -> None:
    inner = project / "vendored"
    inner.mkdir()
    (inner / "lib.py").write_text("")
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "inner")
    take(project, tmp_path / "code")
    assert "vendored/lib.py" in taken(tmp_path / "code")


def test_run_folders_are_no_code_wherever_they_lie(project: Path, tmp_path: Path) -> None:
    for folder in ("runs/gpt-1", "gpt-2"):
        (project / folder / "checkpoints").mkdir(parents=True)
        for name in ("config.yaml", "overrides.txt", "checkpoints/state"):
            (project / folder / name).write_text("x")
    (project / "runs/notes.txt").write_text("x")
    take(project, tmp_path / "code", exclude=[project / "runs"])
    assert taken(tmp_path / "code") == {"train.py", "pkg/model.py", ".gitignore"} | RECORD


def test_data_beside_the_code_is_found_and_written_through_file(project: Path, tmp_path: Path) -> None:
    (project / "data").mkdir()
    (project / "data/x.txt").write_text("x")
    (project / "pkg/data/out").mkdir(parents=True)
    program = "from pathlib import Path\nhere = Path(__file__).parent\n"
    program += "print((here / '../data/x.txt').read_text())\n(here / 'data/out/y').write_text('y')\n"
    (project / "pkg/run.py").write_text(program)
    take(project, tmp_path / "code")
    done = subprocess.run([sys.executable, tmp_path / "code/pkg/run.py"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("x\n", "")
    assert (project / "pkg/data/out/y").read_text() == "y"


def test_caches_environments_and_run_folders_are_not_linked(project: Path, tmp_path: Path) -> None:
    for name in (
        "pkg/__pycache__/a.pyc",
        ".venv/bin/x",
        "mine/pyvenv.cfg",
        "conda/conda-meta/x",
        "a.egg-info/x",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    for name in ("runs/x", "old/notes", "old/gpt-1/config.yaml", "old/gpt-1/overrides.txt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    ignored = ["__pycache__/", ".venv/", "mine/", "conda/", "*.egg-info/", "runs/", "old/gpt-1/"]
    (project / ".gitignore").write_text("\n".join(ignored))
    take(project, tmp_path / "code", exclude=[project / "runs"])
    assert links(tmp_path / "code") == {}


def test_a_folder_that_ignores_itself_is_linked_as_a_whole(project: Path, tmp_path: Path) -> None:
    (project / "cache").mkdir()
    (project / "cache/.gitignore").write_text("*\n")
    (project / "cache/a").touch()
    take(project, tmp_path / "code")
    assert links(tmp_path / "code") == {"cache": project / "cache"}


def test_of_very_many_ignored_entries_only_folders_are_linked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmddp.runs.folder.code_snapshot._MOST_LINKS", 2)
    for name in ("a.pt", "b.pt", "data/x"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).touch()
    note = take(project, tmp_path / "code")
    assert links(tmp_path / "code") == {"data": project / "data"}
    assert note.endswith("not copied: data. Neither copied nor linked: 2 ignored files.")


@pytest.mark.parametrize("name", [".env", ".env.local", "pkg/server.pem", "id_ed25519", "tls.key", ".netrc"])
def test_an_untracked_secret_is_linked_and_a_tracked_one_is_code(
    project: Path, tmp_path: Path, name: str
) -> None:
    (project / name).write_text("secret")
    assert f"not copied: {name}." in take(project, tmp_path / "code")
    assert links(tmp_path / "code") == {name: project / name}
    git(project, "add", name)
    take(project, tmp_path / "again")
    assert links(tmp_path / "again") == {}
    assert (tmp_path / "again" / name).read_text() == "secret"


def test_relative_links_lead_where_they_led(project: Path, tmp_path: Path) -> None:
    common = tmp_path / "common"
    common.mkdir()
    (common / "shared.py").write_text("shared\n")
    (project / "common").symlink_to("../common")
    (project / "pkg/common.py").symlink_to("../../common/shared.py")
    (project / "pkg/train.py").symlink_to("../train.py")
    (project / "weights.pt").write_text("w")
    (project / "best").symlink_to("weights.pt")
    (project / "runs/x").mkdir(parents=True)
    (project / "last").symlink_to("runs/x")
    git(project, "add", ".")
    target = tmp_path / "deep/er/code"
    take(project, target, exclude=[project / "runs"])
    paths = {name: path for name, path in links(target).items() if name != "weights.pt"}
    assert paths == {
        "common": common,
        "pkg/common.py": common / "shared.py",
        "pkg/train.py": Path("../train.py"),
        "best": Path("weights.pt"),
        "last": project / "runs/x",
    }
    assert (target / "pkg/common.py").read_text() == "shared\n"


def test_a_snapshot_that_is_too_large_names_what_is_large(project: Path, tmp_path: Path) -> None:
    (project / "weights.bin").touch()
    os.truncate(project / "weights.bin", 300_000_000)
    with pytest.raises(ConfigError, match=r"weights\.bin \(300 MB\)") as caught:
        take(project, tmp_path / "code")
    assert "snapshot=false" in caught.value.hint
    assert not (tmp_path / "code").exists()


@pytest.mark.parametrize("in_git", [True, False])
def test_the_code_of_a_project_has_no_secrets_caches_and_run_folders(project: Path, in_git: bool):
    for name in (
        ".env",
        "__pycache__/a.pyc",
        ".venv/pyvenv.cfg",
        "runs/a/overrides.txt",
        "runs/a/config.yaml",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / "link").symlink_to("pkg")
    (project / ".gitignore").write_text("__pycache__\n.venv\n")
    if not in_git:
        shutil.rmtree(project / ".git")
    names = {str(path.relative_to(project)) for path in files_to_send(project).code}
    assert names == {".gitignore", "link", "pkg/model.py", "train.py"}


@pytest.mark.parametrize("damage", ["index", "config"])
def test_a_repository_that_git_cannot_read_is_refused_before_a_file_is_left_out(
    project: Path, tmp_path: Path, damage: str
):
    (project / ".git" / damage).write_text("[damaged")
    (project / "data").mkdir()
    (project / "data" / "private.txt").write_text("ignored, so it is not sent")
    with pytest.raises(ConfigError, match="can't be listed: git reports") as caught:
        files_to_send(project)
    assert f"git -C {project} status" in caught.value.hint
    if damage == "index":
        with pytest.raises(ConfigError, match="can't be listed: git reports"):
            take(project, tmp_path / "code")
        assert not (tmp_path / "code").exists()


def test_a_difference_that_git_cannot_compute_is_unknown_and_not_empty(project: Path, tmp_path: Path):
    commit = git(project, "rev-parse", "HEAD")
    (project / "train.py").write_text("print(2)\n")
    shutil.rmtree(project / ".git" / "objects")
    (project / ".git" / "objects").mkdir()
    assert f"commit {commit}, and git can't list later changes" in take(project, tmp_path / "code")
    assert taken(tmp_path / "code") >= {"train.py", ".slurmddp/commit.txt"}
    assert ".slurmddp/diff.patch" not in taken(tmp_path / "code")


def test_the_difference_is_a_patch_whatever_git_is_set_to(project: Path, tmp_path: Path):
    (project / ".gitattributes").write_text("*.py diff=loud\n")
    for setting in ("diff.loud.textconv=tr a-z A-Z <", "diff.noprefix=true", "color.ui=always"):
        git(project, "config", *setting.split("=", 1))
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "attributes")
    git(project, "clone", "-q", ".", str(tmp_path / "clone"))
    (project / "train.py").write_text("print(1)\nprint(2)\n")
    take(project, tmp_path / "code")
    git(tmp_path / "clone", "apply", str(tmp_path / "code/.slurmddp/diff.patch"))
    assert (tmp_path / "clone" / "train.py").read_text() == "print(1)\nprint(2)\n"


def test_the_variables_of_a_git_hook_name_no_other_repository(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit = git(project, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert f"commit {commit}." in take(project, tmp_path / "code")
    assert "pkg/model.py" in taken(tmp_path / "code")
    monkeypatch.setenv("LANGUAGE", "de")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.py").touch()
    assert [path.name for path in files_to_send(tmp_path / "plain").code] == ["a.py"]


def test_a_name_that_is_no_text_is_linked_and_described(project: Path, tmp_path: Path):
    name = os.fsdecode(b"\xff.key")
    (project / name).write_text("secret")
    note = take(project, tmp_path / "code")
    assert "Linked to the project, not copied: \\udcff.key." in note and note.encode()
    assert (tmp_path / "code" / name).readlink() == project / name


def test_editable_installs_outside_the_project_are_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    for name, place, editable in (
        ("other", tmp_path / "a b", True), ("own", project, True), ("built", tmp_path / "c", False)
    ):  # fmt: skip
        info = site / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "direct_url.json").write_text(
            json.dumps({"url": place.as_uri(), "dir_info": {"editable": editable} if editable else {}})
        )
    distributions = list(metadata.Distribution.discover(path=[str(site)]))
    monkeypatch.setattr(metadata, "distributions", lambda: distributions)
    note = take(project, tmp_path / "code")
    assert note.endswith(f" Editable installs, imported from where they are: other ({tmp_path}/a b).")


def test_the_python_files_of_a_folder_without_git_are_its_code(tmp_path, monkeypatch):
    names = ["train.py", "src/pkg/model.py", "readme.md", ".venv/lib/x.py", "env/lib/y.py", "out/z.py"]
    for name in [
        *names,
        "env/pyvenv.cfg",
        "runs/a/overrides.txt",
        "runs/a/config.yaml",
        "runs/a/code/train.py",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in sources(tmp_path, [tmp_path / "out"])]
    assert names == ["src/pkg/model.py", "train.py"]
    monkeypatch.setattr(project_files, "_MOST_ENTRIES", 5)
    assert sources(tmp_path) == [], "a home directory is not searched"
