"""Python, `--json` and ssh give the same result of an action; a connection that breaks leaves no doubt."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import slurmddp
from slurmddp.cli.main import main
from slurmddp.control.cancel import cancel
from slurmddp.control.explain import explain
from slurmddp.control.json_encoding import from_json, to_json
from slurmddp.control.listing import list_runs
from slurmddp.control.logs import logs
from slurmddp.control.remove import remove
from slurmddp.control.ssh.runs import call
from slurmddp.control.status import status
from slurmddp.control.stop import stop
from slurmddp.errors import EXIT_LOGIN_NODE, LoginNodeError, RunNotFoundError, RunStateError
from slurmddp.runs import ssh_runs
from support.runs.agent_runs import wait_until
from support.slurm.login_node import LoginNode, login_node

READING: Mapping[str, Callable[..., Any]] = {
    "status RUN": status,
    "list SWEEP": list_runs,
    "explain RUN": explain,
    "logs RUN": logs,
}
CHANGING: Mapping[str, Callable[..., Any]] = {"stop RUN": stop, "cancel RUN": cancel, "rm RUN --yes": remove}
GREETING = "echo this shell greets as well\n"


def on_the_host(node: LoginNode, action: Callable[..., Any], name: str) -> Any:
    """Call an action where the run folders lie."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in node.slurm.environ.items():
            patch.setenv(variable, value)
        patch.chdir(node.home / "slurmddp" / "project")
        return action(name)


def plain(result: Any, run: ssh_runs.SshRun) -> list[str]:
    """Return a result as lines, without what differs between runs: names, jobs, times and sizes."""
    text = json.dumps(to_json(result), indent=1).replace(run.name, "RUN").replace("login1:/", "/")
    return re.sub(r'"[123]"|\bjob [123]\b|(?<=: )\d+\.\d+|(?<="size_bytes": )\d+', "-", text).splitlines()


@pytest.mark.parametrize("shell", ["bash", "fish", "tcsh"])
def test_each_door_gives_the_same_result_whatever_shell_the_account_has(
    shell: str, laptop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: str, capfd
):
    with login_node(tmp_path / "cluster", python=forked_python, shell=shutil.which(shell)) as node:
        monkeypatch.setenv("PATH", f"{node.programs}:{os.environ['PATH']}")
        for name in (".config/fish/config.fish", ".tcshrc", ".bashrc"):
            (node.home / name).parent.mkdir(parents=True, exist_ok=True)
            (node.home / name).write_text(GREETING)
        assert main(["run", "+cluster=far", "--multirun", "seed=1,2,3", "train.py"]) == 0
        *runs, sweep = ssh_runs.ssh_runs()
        assert sweep.is_sweep

        for command, action in {**READING, **CHANGING}.items():
            here, printed, there = runs
            if command in READING:
                here = printed = there = sweep if "SWEEP" in command else runs[0]
            capfd.readouterr()
            words = command.replace("RUN", printed.name).replace("SWEEP", printed.name).split()
            assert main([*words, "--json"]) == 0
            document = json.loads(capfd.readouterr().out)
            expected = plain(on_the_host(node, action, here.name), here)
            assert plain(call(there, action, there.name), there) == expected, command
            assert plain(from_json(get_type_hints(action)["return"], document), printed) == expected, command

        for action in (stop, cancel, remove, explain):
            with pytest.raises(RunNotFoundError, match=f"There is no run named '{runs[2].name}'"):
                call(runs[2], action, runs[2].name)


def test_an_error_of_the_host_is_raised_here_and_an_action_that_it_lacks_is_named(node: LoginNode):
    run = slurmddp.train("program.script=train.py", cluster="far")
    (recorded,) = ssh_runs.ssh_runs()
    with pytest.raises(RunStateError, match="An active run can't be removed") as error:
        call(recorded, remove, run.name)
    assert error.value.hint == f"Run `slurmddp cancel {run.name}` first."

    other = "import slurmddp, slurmddp.control.stop as module; slurmddp.__version__ = '0.0.1'; {}\n"
    other += "from slurmddp.cli.main import main; raise SystemExit(main())\n"
    node.slurmddp(node.working.replace("-m slurmddp", f"{node.home}/other.py"))
    for change, message in (
        ("del module.stop", "slurmddp 0.0.1 on .* has no action slurmddp.control.stop.stop"),
        (
            "module.stop = lambda name: module.Stopped(name, None, ())",
            "The result of stop on login1 can't be read",
        ),
        ("module.stop = None", "slurmddp on login1 ended without an answer .exit code 1"),
    ):
        (node.home / "other.py").write_text(other.format(change))
        with pytest.raises(LoginNodeError, match=message) as error:
            run.stop()
        assert "nstall" in error.value.hint
    assert node.slurm.calls("scancel") == 0


BEGUN = "If the command had begun on the host, it continues"


@pytest.mark.parametrize(
    ("line", "consequence", "jobs"),
    [
        ("version", "Nothing was started", 0),
        ("wanted", BEGUN, 0),
        ("received", BEGUN, 2),
        ("started", BEGUN, 2),
    ],
)
def test_a_submission_whose_connection_breaks_has_started_nothing_or_all(
    line: str, consequence: str, jobs: int, node: LoginNode, capfd
):
    with node.connection_that_breaks(line):
        assert main(["run", "+cluster=far", "--multirun", "nodes=1,2", "train.py"]) == EXIT_LOGIN_NODE
    assert consequence in capfd.readouterr().err
    wait_until(lambda: node.slurm.calls("sbatch") == jobs, f"{jobs} jobs to be queued")
    assert (node.home / "slurmddp" / "project" / "train.py").exists() == bool(jobs)
    assert main(["run", "+cluster=far", "--multirun", "nodes=1,2", "train.py"]) == 0
    assert node.slurm.calls("sbatch") == 2, "no point is queued twice"
    assert len(ssh_runs.ssh_runs()) == 3


def test_a_command_whose_connection_breaks_goes_on_if_it_changes_a_run(node: LoginNode, capfd):
    run = slurmddp.train("program.script=train.py", cluster="far")
    with node.connection_that_breaks("version"):
        with pytest.raises(LoginNodeError, match=BEGUN):
            run.cancel()
        wait_until(lambda: node.slurm.calls("scancel") == 1, "the job to be cancelled")
        assert main(["status", run.name]) == EXIT_LOGIN_NODE
    assert "The connection to login1 broke" in capfd.readouterr().err
    assert run.status().state == "cancelled"
