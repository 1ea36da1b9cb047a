"""The code that is sent: what travels, how it arrives, and what the folder on the host keeps."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from slurmddp.control.events import Note, Waiting, ignore
from slurmddp.control.ssh import receive_code, send_code
from slurmddp.errors import ConfigError, LoginNodeError
from slurmddp.runs.folder import code_snapshot, sent_code
from support.runs.agent_runs import wait_until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    return home


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "train.py").write_text("LR = 0.1\n")
    (project / "pkg" / "model.py").write_text("x = 1\n")
    return project


def deliver(
    project: Path,
    folder: Path,
    lost: int = 0,
    events: list[object] | None = None,
) -> list[object]:
    """Send the code of `project` to `folder`, and return the events; the last `lost` bytes do not arrive."""
    events = [] if events is None else events
    delivery = send_code.collect(project)
    receive_code.open_folder(folder)
    with receive_code.locked(folder, events.append):
        wanted = receive_code.missing(folder, delivery.files)
        content = b"".join(delivery.content(file) for file in wanted)
        stream = io.BytesIO(content[: len(content) - lost])
        receive_code.Receiver(folder, delivery.files, events.append).receive(stream, wanted)
    return events


def tree(folder: Path) -> dict[str, str]:
    """Return the files of a folder with their contents, links with their targets."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and sent_code.FOLDER not in path.parts
    }


def writable(folder: Path) -> list[Path]:
    """Return what the group or others may write to."""
    paths = [folder, *folder.rglob("*")]
    return [path for path in paths if not path.is_symlink() and path.stat().st_mode & 0o022]


def test_no_other_account_can_write_to_what_arrives_or_has_arrived_before(home: Path, project: Path):
    before = os.umask(0)
    try:
        (project / "pkg").chmod(0o2775)
        (project / "train.py").chmod(0o664)
        (project / "pkg" / "model.py").chmod(0o600)
        folder = home / "slurmddp" / "project"
        deliver(project, folder)
        for name in ("", "..", "pkg"):
            (folder / name).chmod(0o2775)
        for name in ("train.py", "pkg/model.py"):
            (folder / name).chmod(0o666)
        deliver(project, folder)
    finally:
        os.umask(before)
    assert writable(folder.parent) == []
    assert stat.S_IMODE((folder / "pkg" / "model.py").stat().st_mode) == 0o600, "private files stay private"


def test_the_folder_holds_exactly_the_code_and_keeps_what_slurmddp_did_not_send(home: Path, project: Path):
    folder = home / "slurmddp" / "project"
    (project / "old").mkdir()
    (project / "old" / "a.py").write_text("a")
    (project / "link.py").symlink_to("train.py")
    deliver(project, folder)
    (folder / "result.csv").write_text("of a job")
    (folder / "train.py").write_text("edited on the host")
    # A file of the same size and second is another file.
    times = (folder / "pkg" / "model.py").stat().st_mtime_ns
    (project / "pkg" / "model.py").write_text("x = 2\n")
    os.utime(project / "pkg" / "model.py", ns=(times, times))
    (folder / "pkg" / "__pycache__").mkdir()
    (folder / "pkg" / "__pycache__" / "model.cpython-311.pyc").write_text("of x = 1")
    # A folder becomes a link, and a link becomes a folder.
    (project / "old" / "a.py").unlink()
    (project / "old").rmdir()
    (project / "old").symlink_to("pkg")
    (project / "link.py").unlink()
    (project / "link.py").mkdir()
    (project / "link.py" / "b.py").write_text("b")
    assert deliver(project, folder) == [
        Note(
            f"{folder / 'train.py'} was changed on this host; the changed version is kept as train.py.old-1."
        )
    ]
    assert tree(folder) == {
        "train.py": "LR = 0.1\n",
        "train.py.old-1": "edited on the host",
        "pkg/model.py": "x = 2\n",
        "old": "-> pkg",
        "link.py/b.py": "b",
        "result.csv": "of a job",
    }


def test_a_folder_with_outputs_or_a_link_of_the_host_gives_way_without_a_loss(home: Path, project: Path):
    folder, scratch = home / "project", home / "scratch"
    scratch.mkdir()
    deliver(project, folder)
    (folder / "pkg" / "out.txt").write_text("of a job")
    (folder / "data").symlink_to(scratch)
    (project / "pkg" / "model.py").unlink()
    (project / "pkg").rmdir()
    (project / "pkg").symlink_to("..")
    (project / "data").mkdir()
    (project / "data" / "README").write_text("r")
    deliver(project, folder)
    assert tree(folder)["pkg.old-1/out.txt"] == "of a job" and tree(folder)["pkg"] == "-> .."
    assert tree(folder)["data/README"] == "r" and list(scratch.iterdir()) == []


@pytest.mark.parametrize("link", ["of the laptop", "of the host"])
def test_a_file_behind_a_link_arrives_once_the_link_is_a_folder(home: Path, project: Path, link: str):
    folder = home / "project"
    if link == "of the laptop":
        (project / "data").symlink_to("pkg")
        deliver(project, folder)
        (project / "data").unlink()
    else:
        deliver(project, folder)
        (folder / "data").symlink_to(folder / "pkg")
    (project / "data").mkdir()
    (project / "data" / "model.py").write_text("x = 1\n")
    (project / "pkg" / "model.py").unlink()
    (project / "pkg" / "other.py").write_text("")
    deliver(project, folder)
    assert tree(folder)["data/model.py"] == "x = 1\n"
    code_snapshot.take(folder, home / "snapshot")


def test_a_folder_that_is_reached_by_a_link_holds_exactly_the_code_too(home: Path, project: Path):
    (home / "scratch").mkdir()
    folder = home / "project"
    folder.symlink_to("scratch")
    deliver(project, folder)
    (project / "pkg" / "model.py").rename(project / "pkg" / "renamed.py")
    deliver(project, folder)
    assert tree(home / "scratch") == tree(project)


def test_a_connection_that_breaks_changes_nothing(home: Path, project: Path):
    folder = home / "project"
    deliver(project, folder)
    before = tree(folder)
    (project / "train.py").write_text("LR = 0.2\n")
    (project / "new.py").write_text("new\n")
    with pytest.raises(LoginNodeError, match="did not arrive completely"):
        deliver(project, folder, lost=3)
    assert tree(folder) == before
    deliver(project, folder)
    assert tree(folder) == tree(project)


def test_the_code_stays_until_the_submission_that_sent_it_has_ended(home: Path, project: Path):
    folder = home / "project"
    deliver(project, folder)
    (project / "train.py").write_text("LR = 0.2\n")
    events: list[object] = []
    other = threading.Thread(target=deliver, args=(project, folder), kwargs={"events": events})
    with receive_code.locked(folder, ignore):
        other.start()
        wait_until(lambda: events, "the second submission to wait")
        assert isinstance(events[0], Waiting) and events[0].name == str(folder)
        assert (folder / "train.py").read_text() == "LR = 0.1\n"
    other.join()
    assert (folder / "train.py").read_text() == "LR = 0.2\n"


def test_a_full_disk_is_an_error_of_the_login_node(home: Path, project: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "train.py")

    monkeypatch.setattr(sent_code, "begin", full)
    with pytest.raises(LoginNodeError, match=r"No space left on device \(train\.py\)"):
        deliver(project, home / "project")


def test_files_of_a_delivery_that_was_killed_are_known_to_the_next_one(
    home: Path, project: Path, monkeypatch
):
    folder = home / "project"
    (project / "zoo.py").write_text("z")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sent_code, "complete", killed)
        deliver(project, folder)
    assert (folder / "zoo.py").exists()
    (project / "zoo.py").unlink()
    deliver(project, folder)
    assert tree(folder) == tree(project), "it is removed, though no complete delivery has named it"


@pytest.mark.parametrize("place", ["clone", ".", "/"])
def test_a_folder_that_slurmddp_did_not_fill_is_refused(home: Path, project: Path, place: str):
    (home / "clone").mkdir()
    (home / "clone" / "thesis.py").write_text("mine")
    before = sorted(home.rglob("*"))
    with pytest.raises(ConfigError, match="ssh_folder"):
        deliver(project, home / place)
    assert sorted(home.rglob("*")) == before


def test_a_home_is_no_project_and_a_name_does_not_leave_the_folder(home: Path):
    (home / "train.py").write_text("")
    for folder in (home, home.parent, Path("/")):
        with pytest.raises(ConfigError, match="contains your home directory"):
            send_code.collect(folder)
    for name in ("../x", "/etc/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="inside the project"):
            sent_code.from_json([{"name": name, "size": 0, "digest": ""}])


def test_a_snapshot_copies_exactly_what_was_sent_whatever_git_of_the_host_says(
    home: Path, project: Path, tmp_path: Path
):
    def git(*words: str) -> str:
        who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
        done = subprocess.run(
            ["git", "-C", project, *who, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    (project / ".gitignore").write_text("*.json\n")
    (project / "params.json").write_text("0.1")
    git("init", "-q")
    git("add", "-f", ".")
    git("commit", "-q", "-m", "first")
    (project / "train.py").write_text("LR = 0.7\n")
    folder = home / "project"
    deliver(project, folder)
    (folder / "model.pt").write_text("of a job")
    os.truncate(folder / "model.pt", 300_000_000)
    note = code_snapshot.take(folder, tmp_path / "code")
    assert (
        f"Snapshot of 4 files of {folder}: commit {git('rev-parse', 'HEAD')}, with uncommitted changes"
        in note
    )
    assert (tmp_path / "code/.slurmddp/commit.txt").read_text().strip() == git("rev-parse", "HEAD")
    assert "+LR = 0.7" in (tmp_path / "code/.slurmddp/diff.patch").read_text()
    assert tree(tmp_path / "code").keys() == tree(folder).keys()
    assert (tmp_path / "code" / "model.pt").readlink() == folder / "model.pt"
    assert not (tmp_path / "code" / "params.json").is_symlink()
    names = json.loads((tmp_path / "code/.slurmddp/files.json").read_text())
    assert set(names) == tree(folder).keys()

    # Another submission has replaced a file meanwhile.
    (folder / "params.json").write_text("0.7")
    with pytest.raises(ConfigError, match=r"params\.json is not the file that was sent"):
        code_snapshot.take(folder, tmp_path / "torn")
    (folder / "params.json").unlink()
    with pytest.raises(ConfigError, match=r"params\.json is not the file that was sent"):
        code_snapshot.take(folder, tmp_path / "gone")


SECRETS = [
    ".aws/credentials", ".git-credentials", ".kube/config", ".docker/config.json", ".ssh/config", ".pgpass",
    ".npmrc", ".config/gh/hosts.yml", "kaggle.json", "x.p12", "server.pem", "pkg/id_rsa", ".netrc",
    "secrets.yaml", ".s3cfg", "service_account-1.json", ".env.local", "pkg/hub_token",
    ".cache/huggingface/token", "deploy", "project-1234.json", "Secrets.yaml", ".ENV", "prod.env",
    "token.json", "wandb_api_key.txt", "passwords.txt", "old.pem.bak", ".vault_pass", ".oci/config",
    ".dockercfg", ".vault-token", "release.keystore", "terraform.tfstate", "prod.tfvars", "oauth2.json",
    "wandb_key.txt",
]  # fmt: skip


@pytest.mark.parametrize("in_git", [True, False])
def test_passwords_and_keys_stay_on_the_laptop(home: Path, project: Path, in_git: bool):
    for name in SECRETS:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("secret")
    (project / "deploy").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n")
    key = '{"type": "service_account",\n "private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}'
    (project / "project-1234.json").write_text(key)
    for name in ("tokenizer.py", "api_key.py", "tokenizer.json", "environment.yaml"):
        (project / name).write_text("")
    (project / "parser.py").write_text('MARK = "-----BEGIN PRIVATE KEY-----"\n')
    os.mkfifo(project / "pipe")
    if in_git:
        subprocess.run(["git", "init", "-q", project], check=True)
    delivery = send_code.collect(project)
    sent = {file.name for file in delivery.files}
    assert sent == {
        "train.py",
        "pkg/model.py",
        "tokenizer.py",
        "api_key.py",
        "tokenizer.json",
        "environment.yaml",
        "parser.py",
        ".slurmddp/commit.txt",
    }
    assert {".aws", ".ssh", "kaggle.json", "deploy", "pkg/id_rsa"} <= set(delivery.left_out)
