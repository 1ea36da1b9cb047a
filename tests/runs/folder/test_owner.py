"""Nothing is written into folders of other accounts, and none of their content runs."""

from __future__ import annotations

import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmddp.cli.main import main
from slurmddp.config.composition import sources
from slurmddp.errors import EXIT_CONFIG, ConfigError, SlurmddpError
from slurmddp.runs.folder import create, owner
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.settings.spec import Job
from support.runs.cli_runs import start, submit
from support.runs.projects import make_project
from support.slurm.slurm_jobs import make_job

SCRIPT = "#!/bin/bash\n"
VICTIM, ATTACKER = 54321, 54322


@pytest.fixture
def as_root() -> None:
    """Fail without root: a skipped test would leave the protection between accounts untested."""
    if os.geteuid() != 0:
        pytest.fail(
            "Only root can give files to other accounts: run this test as root, or deselect it with -k."
        )


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every account can write to, as /scratch often is."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def job_in(runs: Path) -> Job:
    return make_job(project_dir=runs, run_dir=runs / "gpt-0123abcd", snapshot=False)


def made_meanwhile(monkeypatch: pytest.MonkeyPatch, make: object) -> None:
    """Let `make` act between the check of the owner and the rename, where another account would."""
    write = create.write_code

    def write_slowly(*arguments: object, **options: object) -> None:
        write(*arguments, **options)  # type: ignore[arg-type]
        make()  # type: ignore[operator]

    monkeypatch.setattr(create, "write_code", write_slowly)


@pytest.mark.usefixtures("as_root")
def test_a_link_that_another_account_makes_meanwhile_is_not_followed(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, mine = job_in(shared), shared / "mine"
    (mine / "code").mkdir(parents=True)
    for path in (mine, mine / "code"):
        os.chown(path, VICTIM, VICTIM)

    def make() -> None:
        job.run_dir.symlink_to(mine)
        os.lchown(job.run_dir, ATTACKER, ATTACKER)
        monkeypatch.setattr(owner.os, "geteuid", lambda: VICTIM)

    made_meanwhile(monkeypatch, make)
    with pytest.raises(ConfigError, match=rf"belongs to account {ATTACKER}.*Nothing was written"):
        create.prepare(job, SCRIPT)
    assert [path.name for path in mine.iterdir()] == ["code"]


@pytest.mark.usefixtures("as_root")
def test_the_race_is_lost_without_harm_between_real_accounts(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(shared)

    def make() -> None:
        (job.run_dir / "theirs").mkdir(parents=True)
        for path in (job.run_dir, job.run_dir / "theirs"):
            os.chown(path, ATTACKER, ATTACKER)
            path.chmod(0o777)
        os.setresuid(VICTIM, VICTIM, 0)

    made_meanwhile(monkeypatch, make)
    child = os.fork()
    if child == 0:
        try:
            create.prepare(job, SCRIPT)
        except ConfigError:
            os._exit(EXIT_CONFIG)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_CONFIG
    assert [path.name for path in job.run_dir.iterdir()] == ["theirs"]


def test_an_own_link_to_a_run_that_was_moved_is_followed(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    create.prepare(job, SCRIPT).path.rename(tmp_path / "elsewhere")
    job.run_dir.symlink_to("elsewhere")
    create.prepare(job, "#!/bin/bash\n# new\n")
    assert (tmp_path / "elsewhere/job.sbatch").read_text() == "#!/bin/bash\n# new\n"


@pytest.mark.parametrize("command", ["report", "cancel", "stop", "resume"])
def test_commands_that_change_a_run_refuse_one_of_another_account(
    command: str, make_run, slurm, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder: RunFolder = make_run()
    submit(folder)
    start(folder)
    slurm.set_state("7", "RUNNING")
    before = sorted(folder.path.rglob("*"))
    monkeypatch.setattr(owner.os, "geteuid", lambda: VICTIM)
    assert main([command, folder.name]) == EXIT_CONFIG
    output = capsys.readouterr()
    assert "belongs to" in output.err and "slurmddp logs" in output.err
    assert sorted(folder.path.rglob("*")) == before
    assert (slurm.states["7"].state, slurm.submissions) == ("RUNNING", [])


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777
        for path in folder.rglob("*")
        if not path.is_symlink()
    }


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_a_run_folder_is_private_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    job = job_in(tmp_path / "runs")
    before = os.umask(umask)
    try:
        folder = create.prepare(job, SCRIPT)
        create.prepare(job, SCRIPT)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.parent.stat().st_mode & 0o022 == 0
    assert {name: mode for name, mode in modes(folder.path).items() if mode & 0o022} == {}


def test_what_a_command_starts_writes_nothing_that_everybody_may_write(make_run, slurm) -> None:
    before = os.umask(0)
    try:
        main(["list"])
        assert os.umask(before) == 0o002
    finally:
        os.umask(before)


def test_a_run_that_was_opened_to_others_stays_open(tmp_path: Path) -> None:
    folder = create.prepare(job_in(tmp_path), SCRIPT)
    folder.path.chmod(0o750)
    create.prepare(job_in(tmp_path), SCRIPT)
    assert folder.path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(("mode", "message"), [(0o777, "everybody"), (0o755, ""), (0o1777, "")])
def test_a_folder_in_which_others_can_replace_the_run_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, message: str
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(mode)
    with caplog.at_level(logging.WARNING):
        create.prepare(job_in(runs), SCRIPT)
    assert (f"{runs} is writable for {message}" in caplog.text) is bool(message)


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("reader", [0, VICTIM])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("conf/slurmddp.py", ["train", "--cfg"]),
        ("conf/slurmddp.yaml", ["train", "--dry-run"]),
        ("conf/cluster/big.yaml", ["train", "+cluster=big", "--cfg"]),
        ("conf", ["train", "--cfg"]),
        ("more/model/own.yaml", ["train", "--config-dir", "more", "--cfg"]),
        ("linked/high.yaml", ["train", "+cluster=more/high", "--cfg"]),
        ("conf/__pycache__/slurmddp.pyc", ["train", "--cfg"]),
    ],
)
@pytest.mark.parametrize("exposed", ["foreign", "writable", "writable in a private folder"])
def test_a_configuration_that_another_account_decides_is_refused(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    reader: int,
    name: str,
    command: list[str],
    exposed: str,
) -> None:
    """Such a file could be executed, or name commands that are executed."""
    project = make_project(shared / "project", slurmddp="seed: 3\n")
    ran = shared / "ran"
    (project / "conf/slurmddp.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    (project / "more/model").mkdir(parents=True)
    (project / "more/model/own.yaml").write_text("_target_: torch.nn.Identity\n")
    (project / "linked").mkdir()
    (project / "linked/high.yaml").write_text("name: high\n")
    (project / "conf/cluster").mkdir(exist_ok=True)
    (project / "conf/cluster/more").symlink_to("../../linked")
    (project / "conf/__pycache__").mkdir()
    (project / "conf/__pycache__/slurmddp.pyc").touch()
    project.chmod(0o755)
    for path in (project, *project.rglob("*")):
        os.chown(path, reader, reader)
    monkeypatch.chdir(project)
    monkeypatch.setattr(owner.os, "geteuid", lambda: reader)
    assert main(command) == 0 and ran.exists()
    ran.unlink()
    sources._run.cache_clear()

    place = project / name
    if exposed == "foreign":
        os.chown(place, ATTACKER, ATTACKER)
    else:
        os.chown(place, reader, ATTACKER)
        place.chmod(0o775 if place.is_dir() else 0o664)
    if "private" in exposed:
        project.chmod(0o700)
    is_harmless = "private" in exposed or (exposed == "writable" and place.is_dir())
    capsys.readouterr()
    assert main(command) == (0 if is_harmless else EXIT_CONFIG)
    if not is_harmless:
        message = f"belongs to account {ATTACKER}" if exposed == "foreign" else "is writable for its group"
        assert message in capsys.readouterr().err
        assert name.startswith("more") or not ran.exists()


@pytest.mark.usefixtures("as_root")
def test_a_run_of_another_account_is_not_started_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    job = job_in(shared)
    folder = create.prepare(job, SCRIPT)
    os.chown(folder.overrides_file, ATTACKER, ATTACKER)
    assert main(["rerun", str(folder.path)]) == EXIT_CONFIG
    assert f"belongs to account {ATTACKER}" in capsys.readouterr().err


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("mode", [0o644, 0o664])
def test_root_and_an_owner_obey_no_configuration_that_others_put_into_a_run(
    make_run, capsys, mode: int
) -> None:
    """A run folder that its owner has opened to a group; for root, any run of another account."""
    folder: RunFolder = make_run()
    os.chown(folder.config_file, ATTACKER if mode == 0o644 else os.geteuid(), ATTACKER)
    folder.config_file.chmod(mode)
    for parent in folder.config_file.parents:
        if parent != Path("/"):
            parent.chmod(0o755)
    assert main(["resume", folder.name]) == EXIT_CONFIG
    assert "its content would run as" in capsys.readouterr().err


@pytest.mark.usefixtures("as_root")
def test_a_group_is_private_only_if_it_has_the_name_of_the_account_and_no_other_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    os.chown(path, VICTIM, VICTIM)
    monkeypatch.setattr(owner.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="ada"))
    groups = {"ada": [], "users": [], "ada ": ["bob"]}
    for name, members in groups.items():
        group = SimpleNamespace(gr_name=name.strip(), gr_mem=members)
        monkeypatch.setattr(owner.grp, "getgrgid", lambda _, group=group: group)
        assert owner.other_writers(path) == ("" if name == "ada" else "its group")


def test_an_access_control_list_makes_the_bits_of_the_group_those_of_other_accounts(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("5")
    path.chmod(0o644)
    entries = [(1, 6, -1), (2, 6, ATTACKER), (4, 4, -1), (16, 6, -1), (32, 4, -1)]  # u::rw u:ATTACKER:rw g::r
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_access", acl)
    assert path.stat().st_mode & 0o777 == 0o664
    with pytest.raises(ConfigError, match="writable for accounts of its access control list"):
        owner.read_own(path)
    os.removexattr(path, "system.posix_acl_access")
    path.chmod(0o644)
    assert owner.read_own(path) == b"5"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_result_that_is_no_file_is_refused_without_a_wait(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "result.pkl"
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(SlurmddpError, match=r"can't be read: it is a (link to|FIFO|folder)"):
        owner.read_own(path)


def test_a_run_of_this_account_is_recognised_without_a_listing_of_all_runs(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "gpt-1"
    run.mkdir(parents=True)
    monkeypatch.setattr(owner, "is_there", lambda path: pytest.fail(f"{path.parent} was listed"))
    owner.refuse_foreign(run)
