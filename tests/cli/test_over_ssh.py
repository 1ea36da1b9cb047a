"""Submission over ssh to a real sshd: code, arguments and exit codes arrive; commands find the run's host."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

import slurmddp
from slurmddp.cli.main import main
from slurmddp.control.json_encoding import from_json
from slurmddp.control.report import Reported
from slurmddp.control.ssh import connection
from slurmddp.control.ssh.runs import runs_of_sweep
from slurmddp.control.start import Started
from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_LOGIN_NODE,
    EXIT_NO_RUN,
    EXIT_SLURM,
    ConfigError,
    LoginNodeError,
    SlurmddpError,
)
from slurmddp.runs import ssh_runs
from support.slurm.login_node import LoginNode, login_node
from support.slurm.slurm_jobs import PROGRAMS

ARGUMENTS = ["--text", 'it\'s "so"  $HOME `x` \\n', "", "--name", "\u00fcber\u6f22", "a\tb", "*", "wow!!"]
ARGUMENTS += ["a\\\\b", "C:\\", "two\nlines", "=ls", "^a^b", "{a,b}", "~", "(x)", "a;b|c&d", "#e", "%self"]


def submit(*words: str) -> str:
    """Submit a run over ssh and return its name."""
    assert main(["run", "+cluster=far", *words, "train.py", *ARGUMENTS]) == 0
    return ssh_runs.ssh_runs()[-1].name


def test_a_run_is_submitted_and_handled_by_its_name_from_the_laptop(node: LoginNode, capfd, monkeypatch):
    name = submit("name=exp")
    printed = capfd.readouterr()
    there = node.home / "slurmddp" / "project"
    assert f"code    login1:{there}" in printed.err
    assert f"run     {name}" in printed.out and "job     1\n" in printed.out
    folder = there / "runs" / name
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["program"]["args"] == ARGUMENTS
    assert (folder / "code" / "train.py").read_text() == "print('first')\n"
    assert not Path("runs").exists()
    sent = {str(path.relative_to(there)) for path in there.rglob("*.*") if "runs" not in path.parts}
    assert {"train.py", "old.py", "conf/cluster/far.yaml"} <= sent
    assert not sent & {".env", "data/large.bin"}
    assert "note    not sent, because they may hold passwords or keys: .env" in printed.err
    writable = {
        path for path in there.parent.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022
    }
    assert not writable

    monkeypatch.chdir("/")
    assert main(["status", "exp"]) == 0
    assert f"{name}\n" in (said := capfd.readouterr().out) and "queued" in said
    assert main(["explain", "--json", name]) == 0
    assert json.loads(capfd.readouterr().out)["job_id"] == "1"
    assert main(["logs", "login1:exp"]) == 0
    capfd.readouterr()
    assert main(["cancel", "exp"]) == 0
    assert "is cancelled (job 1)" in capfd.readouterr().out
    assert main(["status"]) == 0  # the newest run
    assert "cancelled" in capfd.readouterr().out
    assert main(["resume", "exp"]) == 0
    assert "job     2\n" in capfd.readouterr().out
    assert main(["stop", "--debug", "exp"]) == 0
    assert main(["rm", "exp"]) == 2
    assert main(["rm", "exp", "--yes"]) == 0
    assert not folder.exists()
    assert main(["status", "exp"]) == EXIT_NO_RUN
    assert "There is no run" in capfd.readouterr().err


def test_a_second_submission_brings_the_code_up_to_date_and_submits_no_second_job(node: LoginNode, capfd):
    name = submit()
    there = node.home / "slurmddp" / "project"
    (there / "result.txt").write_text("made by a job")
    Path("train.py").write_text("print('second')\n")
    Path("old.py").unlink()
    assert submit() == name
    assert "Nothing was started" in capfd.readouterr().out
    assert [run.name for run in ssh_runs.ssh_runs()] == [name]
    assert (there / "train.py").read_text() == "print('second')\n"
    assert not (there / "old.py").exists()
    assert (there / "result.txt").exists() and (there / "runs" / name).is_dir()
    assert (there / "runs" / name / "code" / "train.py").read_text() == "print('first')\n"


def test_a_sweep_is_submitted_and_cancelled_by_its_name(node: LoginNode, capfd):
    assert main(["run", "--json", "+cluster=far", "--multirun", "seed=1,2", "train.py"]) == 0
    started = from_json(Started, json.loads(capfd.readouterr().out))
    *recorded, sweep_over_ssh = ssh_runs.ssh_runs()
    sweep = sweep_over_ssh.name
    assert started.sweep == sweep and {run.name for run in started.runs} == {run.name for run in recorded}
    assert main(["list", sweep, "--json"]) == 0
    names = {one["name"] for one in json.loads(capfd.readouterr().out)["runs"]}
    runs = runs_of_sweep(ssh_runs.ssh_runs()[-1])
    assert len(names) == 2 and {run.name for run in runs} == names
    assert main(["report", sweep]) == 0
    page = Path(capfd.readouterr().out.strip())
    assert page.name == f"{sweep}.html" and sweep in page.read_text()
    assert main(["report", sweep, "--json"]) == 0
    result = from_json(Reported, json.loads(capfd.readouterr().out))
    links = re.findall(r'href="([^"]+)"', page.read_text())
    pages = tuple(page.parent / run.name / "report.html" for run in runs)
    assert result == Reported(name=sweep, is_sweep=True, path=page, runs=pages)
    assert len(links) == 2 and all(
        Path(link).parent.name in (page.parent / link).read_text() for link in links
    )
    assert not page.is_relative_to(node.home)
    assert main(["cancel", sweep]) == 0


def test_of_a_sweep_that_ends_halfway_the_laptop_knows_what_is_queued(node: LoginNode, capfd):
    sbatch = node.home / "bin" / "sbatch"
    refuse_second = '[ ! -e "$FAKE_SLURM/jobs/1" ] || echo "no more" > "$FAKE_SLURM/refusal"'
    sbatch.write_text(f'#!/bin/sh\n{refuse_second}\nexec {PROGRAMS}/sbatch "$@"\n')
    sbatch.chmod(0o755)
    assert main(["run", "+cluster=far", "--multirun", "nodes=1,2", "train.py"]) == EXIT_SLURM
    run, sweep = ssh_runs.ssh_runs()
    assert sweep.is_sweep and not run.is_sweep
    assert main(["cancel", run.name]) == 0


def test_list_shows_runs_of_hosts_beside_own_runs_and_unknown_ones_of_a_host_that_is_down(
    node: LoginNode, make_run, capfd
):
    name = submit()
    local = make_run("mlp-0a1b2c3d")
    capfd.readouterr()
    assert main(["list", "--json"]) == 0
    assert {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)["runs"]} == {
        name: "queued",
        local.name: "preparing",
    }
    ssh_runs.remember(ssh_runs.SshRun(name="far-0a1b2c3d", host="down", folder="/project"))
    assert main(["list"]) == 0
    printed = capfd.readouterr()
    rows = {line.split()[0]: line for line in printed.out.splitlines()}
    assert "queued" in rows[name] and f"login1:{node.home}/slurmddp/project/runs" in rows[name]
    assert "unknown" in rows["far-0a1b2c3d"]
    assert main(["status", "far"]) == EXIT_LOGIN_NODE
    assert "slurmddp: down does not answer: " in printed.err and "refused" in printed.err
    node.slurmddp("echo no JSON")
    assert main(["list", "--json"]) == 0
    assert {one["state"] for one in json.loads(capfd.readouterr().out)["runs"]} == {"unknown", "preparing"}


def test_settings_choose_the_host_and_the_folder_and_what_starts_nothing(node: LoginNode, capfd):
    words = ["+cluster=cpu", "ssh=login1", 'cluster.ssh_folder="~/other place"']
    assert main(["run", *words, "--dry-run", "train.py"]) == 0
    assert "#SBATCH" in capfd.readouterr().out
    assert (node.home / "other place" / "train.py").exists()
    assert ssh_runs.ssh_runs() == []
    assert main(["run", "+cluster=far", "--cfg", "train.py"]) == 0
    assert "ssh: login1" in capfd.readouterr().out
    assert not (node.home / "slurmddp").exists()
    assert main(["run", "ssh=login1", "train.py"]) == EXIT_CONFIG
    assert "Use +cluster=NAME" in capfd.readouterr().err
    for host in ("-oProxyCommand=x", "a:b", "../x", "a;b", "a b"):
        assert main(["run", "+cluster=far", f'ssh="{host}"', "train.py"]) == EXIT_CONFIG
        assert "is not the name of a host" in capfd.readouterr().err


def test_trouble_on_the_way_has_an_exit_code_of_its_own_and_starts_nothing(node: LoginNode, capfd):
    def trouble(*words: str) -> str:
        assert main(["run", "+cluster=far", *words, "train.py"]) == EXIT_LOGIN_NODE
        assert node.slurm.calls("sbatch") == 0 and ssh_runs.ssh_runs() == []
        return capfd.readouterr().err

    assert "`ssh -o BatchMode=yes down true` must work" in trouble("ssh=down")
    there = node.home / "slurmddp" / "project"
    node.slurmddp("echo slurmddp 0.0.1")
    assert "login1 did not run `slurmddp`, though its shell reports success" in trouble()
    other_version = (
        "import slurmddp; slurmddp.__version__ = '0.0.1'\nfrom slurmddp.cli.main import main; main()"
    )
    (node.home / "other.py").write_text(other_version)
    node.slurmddp(node.working.replace("-m slurmddp", f"{node.home}/other.py"))
    assert "login1 has slurmddp 0.0.1, but this machine has slurmddp" in trouble()
    assert not there.exists()
    (node.home / "bin" / "slurmddp").unlink()
    assert "can't run `slurmddp` (exit code 127" in trouble()
    assert "can't run `/no/python -m slurmddp`" in trouble("cluster.python=/no/python")
    node.slurmddp(node.working)
    assert "can't be created" in trouble("cluster.ssh_folder=/dev/null/x")
    there.mkdir(parents=True)
    (there / "thesis.py").write_text("mine")
    assert main(["run", "+cluster=far", "train.py"]) == EXIT_CONFIG
    assert "holds files that slurmddp did not send, such as thesis.py" in capfd.readouterr().err
    assert [path.name for path in there.iterdir()] == ["thesis.py"]
    (there / "thesis.py").unlink()
    # The connection breaks while the code travels: the host has asked for it, and half of it has come.
    ssh = node.programs / "ssh"
    reached = ssh.read_text().replace("exec ", "")
    cut = "dd bs=1 count=20000 2>/dev/null"
    ssh.write_text(reached.replace("#!/bin/sh\n", f"#!/bin/sh\n{cut} | ") + "\nexit 255\n")
    (Path("train.py")).write_text("#" * 100_000)
    assert "train.py did not arrive completely. Nothing was changed or started" in trouble()
    assert not (there / "train.py").exists()


def test_the_report_of_a_run_over_ssh_is_copied_here(node: LoginNode, capfd, monkeypatch):
    name, shown = submit(), []
    monkeypatch.setattr("webbrowser.open", shown.append)
    monkeypatch.setenv("DISPLAY", ":9")
    capfd.readouterr()
    assert main(["report"]) == 0
    report = Path(capfd.readouterr().out.strip())
    assert name in report.read_text() and not report.is_relative_to(node.home)
    assert main(["open", name]) == 0
    assert shown == [report.as_uri()]
    capfd.readouterr()
    assert main(["open", name, "--folder"]) == 0
    assert capfd.readouterr().out == f"{node.home}/slurmddp/project/runs/{name}\n"


def test_a_run_over_ssh_has_a_handle_in_python(node: LoginNode):
    run = slurmddp.train("program.script=train.py", cluster="far", name="exp")
    assert run.path == Path(f"login1:{node.home}/slurmddp/project/runs/{run.name}")
    assert run.status().state == "queued" and run.logs() == ""
    with pytest.raises(TimeoutError, match="it continues"):
        run.wait(0)
    assert slurmddp.train("program.script=train.py", cluster="far", name="exp").name == run.name
    assert node.slurm.calls("sbatch") == 1
    cancelled = slurmddp.Run("login1:exp").cancel()
    assert cancelled.cancelled and cancelled.path == run.path and len(cancelled.jobs) == 1
    assert slurmddp.Run("login1:exp").stop().outcome == "inactive"
    assert run.wait(240).state == "cancelled"
    with pytest.raises(SlurmddpError, match=r"did not finish \(cancelled\)"):
        run.result()
    with pytest.raises(LoginNodeError):
        slurmddp.train("program.script=train.py", cluster="far", ssh="down")
    with pytest.raises(ConfigError, match="no_such_key"):
        slurmddp.train("no_such_key=1", cluster="far")


def test_map_array_over_ssh_is_one_sweep_with_a_handle_for_each_call(node: LoginNode, capfd):
    texts = ["b", 'it\'s "so", \\ ${x}', "b", ")],"]
    runs = slurmddp.map_array("math.isclose", texts, [1, 2, 1, 3], cluster="far", name="each")
    assert [run.name for run in runs] == [runs[0].name, runs[1].name, runs[0].name, runs[3].name]
    *recorded, sweep = ssh_runs.ssh_runs()
    assert sweep.is_sweep and [run.name for run in recorded] == [runs[at].name for at in (0, 1, 3)]
    given = [json.loads(yaml.safe_load(_config(run).read_text())["program"]["args"][-1]) for run in runs]
    assert given == [[texts[0], 1], [texts[1], 2], [texts[2], 1], [texts[3], 3]]
    again = slurmddp.submit("math.isclose", texts[1], 2, cluster="far", name="each")
    assert again.name == runs[1].name, "a call of map_array is the run of the same submit"
    runs[1].cancel()
    assert [run.status().state for run in runs] == ["queued", "cancelled", "queued", "queued"]
    capfd.readouterr()
    assert main(["list", "--json"]) == 0
    assert {one["name"] for one in json.loads(capfd.readouterr().out)["runs"]} == {run.name for run in runs}
    before = node.slurm.calls("sbatch")
    assert slurmddp.map_array("math.isclose", [], cluster="far") == []
    assert node.slurm.calls("sbatch") == before
    large = slurmddp.submit("builtins.len", "x" * 200_000, cluster="far")
    assert len(yaml.safe_load(_config(large).read_text())["program"]["args"][-1]) > 200_000


@pytest.mark.parametrize("shell", ["dash", "fish", "tcsh", "zsh"])
def test_the_words_arrive_whatever_shell_the_account_has(
    shell: str, laptop: Path, tmp_path, monkeypatch, forked_python
):
    with login_node(tmp_path / "cluster", python=forked_python, shell=shell) as node:
        monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
        for name in (".config/fish/config.fish", ".tcshrc", ".zshenv"):
            (node.home / name).parent.mkdir(parents=True, exist_ok=True)
            (node.home / name).write_text("echo 'this shell greets as well'\n")
        seen = node.home / "seen"
        node.slurmddp(f"cat /proc/[0-9]*/cmdline > {seen}\n{node.working}")
        name = submit("cluster.env.TOKEN=hush-hush")
        config = yaml.safe_load((node.home / "slurmddp/project/runs" / name / "config.yaml").read_text())
        assert config["program"]["args"] == ARGUMENTS
        assert config["cluster"]["env"] == {"TOKEN": "hush-hush"}
        assert b"hush-hush" not in seen.read_bytes() and b"two\nlines" not in seen.read_bytes()


def test_a_profile_that_replaces_the_shell_is_no_success(node: LoginNode, capfd):
    name = submit()
    profile = node.home / ".bash_profile"
    works = profile.read_text()
    calls = {program: node.slurm.calls(program) for program in ("sbatch", "scancel")}
    for line in ("exec fish -l", "exec zsh -l", "exec tcsh", "exit 0"):
        profile.write_text(f"{works}{line}\n")
        for words in (
            ["cancel", name],
            ["status", name],
            ["resume", name],
            ["run", "+cluster=far", "train.py"],
        ):
            capfd.readouterr()
            assert main(words) == EXIT_LOGIN_NODE
            assert "a profile of the shell replaces or ends it" in capfd.readouterr().err
    assert {program: node.slurm.calls(program) for program in calls} == calls


def test_a_shell_that_reads_all_input_is_named_and_not_waited_for(laptop: Path, tmp_path, monkeypatch, capfd):
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\ncat >/dev/null\n")
    shell.chmod(0o755)
    monkeypatch.setattr(connection, "_NOTE_S", 0.1)
    monkeypatch.setattr(connection, "_ANSWER_S", 2)
    with login_node(tmp_path / "cluster", shell=str(shell)) as node:
        monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
        assert main(["run", "+cluster=far", "train.py"]) == EXIT_LOGIN_NODE
        assert "such as ~/.bashrc, may wait or read the standard input" in capfd.readouterr().err
        assert node.slurm.calls("sbatch") == 0 and ssh_runs.ssh_runs() == []


def test_a_profile_may_use_descriptors_of_its_own(node: LoginNode):
    profile = node.home / ".bash_profile"
    used = " ".join(f"{number}>/dev/null" for number in (3, 4, 5, 6, 7, 8, 9, 63))
    closed = " ".join(f"{number}>&-" for number in (3, 4, 5, 8))
    profile.write_text(f"exec {used}\nexec {{own}}>/dev/null\n{profile.read_text()}exec {closed}\n")
    assert main(["status", submit()]) == 0


def test_a_program_that_a_profile_leaves_in_the_background_is_not_waited_for(node: LoginNode):
    profile = node.home / ".bash_profile"
    number = node.home / "number"
    profile.write_text(f"{profile.read_text()}sleep 500 </dev/null >/dev/null 2>&1 &\necho $! >{number}\n")
    try:
        assert main(["status", submit()]) == 0
        assert Path(f"/proc/{number.read_text().strip()}").exists()
    finally:
        os.kill(int(number.read_text()), signal.SIGKILL)


def _config(run: slurmddp.Run) -> Path:
    return Path(str(run.path).removeprefix("login1:")) / "config.yaml"
