"""Submission over ssh to a real sshd: code, arguments and exit codes arrive; commands find the run's host."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import slurmddp
from slurmddp.cli.main import main
from slurmddp.errors import (
    EXIT_CONFIG,
    EXIT_LOGIN_NODE,
    EXIT_NO_RUN,
    ConfigError,
    LoginNodeError,
    SlurmddpError,
)
from slurmddp.runs import ssh_runs
from support.slurm.login_node import LoginNode, login_node

ARGUMENTS = ["--text", 'it\'s "so"  $HOME `x` \\n', "", "--name", "\u00fcber\u6f22", "a\tb", "*", "!x"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: str) -> Iterator[LoginNode]:
    """Start a login node, and go to a project of the laptop that names it."""
    project = tmp_path / "laptop" / "project"
    (project / "conf" / "cluster").mkdir(parents=True)
    (project / "conf" / "cluster" / "far.yaml").write_text("ssh: login1\nranks_per_node: 2\n")
    (project / "train.py").write_text("print('first')\n")
    (project / "old.py").write_text("")
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data" / "large.bin").write_text("ignored")
    (project / ".env").write_text("TOKEN=secret")
    subprocess.run(["git", "init", "--quiet", "."], cwd=project, check=True)
    monkeypatch.chdir(project)
    with login_node(tmp_path / "cluster", python=forked_python) as node:
        monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
        yield node


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

    monkeypatch.chdir("/")
    assert main(["status", "exp"]) == 0
    assert f"{name}\n" in (said := capfd.readouterr().out) and "queued" in said
    assert main(["explain", "--json", name]) == 0
    assert json.loads(capfd.readouterr().out)["job_id"] == "1"
    assert main(["logs", "login1:exp"]) == 0
    capfd.readouterr()
    assert main(["cancel", "exp"]) == 0
    assert "job 1 was told to end" in capfd.readouterr().out
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
    assert main(["run", "+cluster=far", "--multirun", "seed=1,2", "train.py"]) == 0
    sweep = ssh_runs.ssh_runs()[-1].name
    assert "sweep" in sweep and len(ssh_runs.ssh_runs()) == 3
    capfd.readouterr()
    assert main(["list", sweep, "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)) == 2
    assert main(["report", sweep]) == 0
    page = Path(capfd.readouterr().out.strip())
    assert page.name == f"{sweep}.html" and sweep in page.read_text()
    links = re.findall(r'href="([^"]+)"', page.read_text())
    assert len(links) == 2 and all(
        Path(link).parent.name in (page.parent / link).read_text() for link in links
    )
    assert not page.is_relative_to(node.home)
    assert main(["cancel", sweep]) == 0


def test_list_shows_runs_of_hosts_beside_own_runs_and_unknown_ones_of_a_host_that_is_down(
    node: LoginNode, make_run, capfd
):
    name = submit()
    local = make_run("mlp-0a1b2c3d")
    capfd.readouterr()
    assert main(["list", "--json"]) == 0
    assert {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)} == {
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
    assert {one["state"] for one in json.loads(capfd.readouterr().out)} == {"unknown", "preparing"}


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
    assert "Say +cluster=NAME" in capfd.readouterr().err
    for host in ("-oProxyCommand=x", "a:b", "../x", "a;b", "a b"):
        assert main(["run", "+cluster=far", f'ssh="{host}"', "train.py"]) == EXIT_CONFIG
        assert "is not a host" in capfd.readouterr().err


def test_trouble_on_the_way_has_an_exit_code_of_its_own_and_starts_nothing(node: LoginNode, capfd):
    def trouble(*words: str) -> str:
        assert main(["run", "+cluster=far", *words, "train.py"]) == EXIT_LOGIN_NODE
        assert node.slurm.calls("sbatch") == 0 and ssh_runs.ssh_runs() == []
        return capfd.readouterr().err

    assert "`ssh -o BatchMode=yes down true` must work" in trouble("ssh=down")
    there = node.home / "slurmddp" / "project"
    node.slurmddp("echo slurmddp 0.0.1")
    assert "login1 has slurmddp 0.0.1, this machine slurmddp" in trouble()
    assert not (there / "train.py").exists()
    (node.home / "bin" / "slurmddp").unlink()
    assert "can't run `slurmddp`" in trouble()
    assert "can't run `/no/python -m slurmddp`" in trouble("cluster.python=/no/python")
    node.slurmddp(node.working)
    (there / "train.py").mkdir()
    (there / "train.py" / "in the way").write_text("")
    assert "rsync says why above" in trouble()
    assert "can't be created" in trouble("cluster.ssh_folder=/dev/null/x")
    ssh = node.programs / "ssh"
    # rsync says 12 if it notices the end of the connection before the end of ssh.
    for code, words in (
        (127, "exit code is (127|12); rsync says why"),
        (255, "connection broke|code is 12;"),
    ):
        reached = ssh.read_text()
        lost = f'case "$*" in *"rsync --server"*) head -c 60 >/dev/null; exit {code};; esac'
        ssh.write_text(reached.replace("\n", f"\n{lost}\n", 1))
        assert re.search(words, trouble())
        ssh.write_text(reached)


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
    slurmddp.Run("login1:exp").cancel()
    assert run.wait(30).state == "cancelled"
    with pytest.raises(SlurmddpError, match=r"did not finish \(cancelled\)"):
        run.result()
    with pytest.raises(LoginNodeError):
        slurmddp.train("program.script=train.py", cluster="far", ssh="down")
    with pytest.raises(SlurmddpError, match="login1 did not start all runs"):
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
    assert {one["name"] for one in json.loads(capfd.readouterr().out)} == {run.name for run in runs}
    before = node.slurm.calls("sbatch")
    with pytest.raises(ConfigError, match="hands at most 131072 to ssh"):
        slurmddp.map_array("math.isclose", [f"{one:0120}" for one in range(1000)], range(1000), cluster="far")
    assert slurmddp.map_array("math.isclose", [], cluster="far") == []
    assert node.slurm.calls("sbatch") == before


def _config(run: slurmddp.Run) -> Path:
    return Path(str(run.path).removeprefix("login1:")) / "config.yaml"
