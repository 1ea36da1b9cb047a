"""The record of runs over ssh: a name means one run, on this machine or on one host."""

from __future__ import annotations

import os
import stat

import pytest

from slurmddp.cli import completion
from slurmddp.cli.main import main
from slurmddp.control.ssh import runs
from slurmddp.errors import LoginNodeError, RunNotFoundError
from slurmddp.runs import ssh_runs


def test_a_run_of_this_machine_and_a_run_over_ssh_are_told_apart(make_run, elsewhere, capsys):
    folder = make_run("gpt-0a1b2c3d")
    for name, host in (("gpt-0a1b2c3d", "a"), ("mlp-0a1b2c3d", "a"), ("mlp-0a1b2c3d", "b"), ("gpt2-x", "b")):
        ssh_runs.remember(ssh_runs.SshRun(name=name, host=host, folder="/project"))

    def host(name: str | None) -> str | None:
        run = ssh_runs.find(name)
        return run and run.host

    assert host("a:gpt-0a1b2c3d") == host("a:gp") == "a"
    assert host("b:mlp-0a1b2c3d") == host("gpt2") == host(None) == "b"
    assert host(str(folder.path)) is host("nothing") is None
    for name in ("gpt-0a1b2c3d", "gpt", "mlp", "mlp-0a1b2c3d"):
        with pytest.raises(RunNotFoundError, match="HOST:NAME"):
            ssh_runs.find(name)
    assert main(["diff", "gpt2-x", str(folder.path)]) == 2
    assert "different machines" in capsys.readouterr().err


def test_a_damaged_record_costs_no_other_run(caplog):
    ssh_runs.remember(ssh_runs.SshRun(name="a", host="one", folder="/project"))
    with ssh_runs.records_file().open("a") as stream:
        stream.write("{no record\n")
    ssh_runs.remember(ssh_runs.SshRun(name="b", host="one", folder="/project"))
    assert [run.name for run in ssh_runs.ssh_runs()] == ["a", "b"]
    assert completion.runs("b") == ["b"]


def test_of_equal_words_the_one_that_names_the_run_gets_the_whole_name(monkeypatch):
    requests = []

    def exchange(node, request, **_):
        requests.append(request)
        raise LoginNodeError("not reached")

    monkeypatch.setattr(runs, "exchange", exchange)
    ssh_runs.remember(ssh_runs.SshRun(name="exp-0a1b2c3d", host="a", folder="/project"))
    for command, place in (
        (["export", "--output", "exp", "exp"], 3),
        (["export", "exp", "--output", "exp"], 1),
        (["--debug", "logs", "--rank", "0", "exp"], 4),
        (["status"], 1),
    ):
        assert main(command) == 68
        sent = requests.pop()["words"]
        assert [at for at, word in enumerate(sent) if word == "exp-0a1b2c3d"] == [place]
        assert sent[:place] == command[:place]


def test_records_that_another_account_may_have_written_name_no_host_and_no_program(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = os.umask(0o002)
    try:
        ssh_runs.remember(ssh_runs.SshRun(name="a", host="one", folder="/project", python="/tmp/theirs"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(ssh_runs.records_file().parent.stat().st_mode) == 0o700
    assert ssh_runs.find("a") is not None
    os.chown(ssh_runs.records_file(), 54322, 54322)  # Only root can give a file away.
    assert ssh_runs.find("a") is None and "belongs to account 54322" in caplog.text
