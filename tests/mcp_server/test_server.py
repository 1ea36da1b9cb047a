"""An agent plans, starts, watches and stops runs by the tools of `slurmddp mcp`, over stdio."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from slurmddp.cli.main import COMMANDS, main
from slurmddp.control.cancel import cancel
from slurmddp.control.diff import diff
from slurmddp.control.explain import explain
from slurmddp.control.json_encoding import to_json
from slurmddp.control.listing import list_runs
from slurmddp.control.logs import logs
from slurmddp.control.report import report
from slurmddp.control.status import status
from slurmddp.control.stop import stop
from slurmddp.errors import EXIT_CONFIG, EXIT_NO_RUN, EXIT_RUN_STATE, EXIT_USAGE
from slurmddp.mcp_server import calls
from slurmddp.mcp_server.shortening import MAX_BYTES
from slurmddp.mcp_server.tools import TOOLS, Tools
from slurmddp.runs.folder.jsonl import append_line
from slurmddp.runs.folder.layout import RunFolder
from support.mcp_client import Agent, with_server
from support.runs.cli_runs import end, start, submit
from support.runs.projects import make_project

READING = {"plan", "check", "list", "status", "explain", "logs", "diff"}
WRITING = {"submit", "resume", "stop", "cancel", "report"}
PROGRAM = ["sh", "-c", "echo begun; echo done"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(("flags", "names"), [([], READING), (["--write"], READING | WRITING)])
def test_a_server_has_writing_tools_only_with_write(
    project: Path, mode: str, flags: list[str], names
) -> None:
    async def use(agent: Agent) -> None:
        tools = {tool.name: tool for tool in (await agent.client.list_tools()).tools}
        assert set(tools) == names
        hints = {name: tool.annotations for name, tool in tools.items()}
        changing = {name for name, hint in hints.items() if not hint.read_only_hint}
        assert changing == (WRITING | {"plan", "check"} if flags else set())
        assert {name for name, hint in hints.items() if hint.destructive_hint} <= {"cancel"}
        for name, tool in tools.items():
            assert tool.description and not tool.description.startswith(" "), name
            properties = tool.input_schema["properties"].values()
            assert all("description" in part for part in properties), name
            assert tool.input_schema["additionalProperties"] is False
        if not flags:
            assert "read-only" in (await agent.refusal("cancel", run="x"))["hint"]

    with_server(use, project, *flags, mode=mode)


def test_a_plan_is_the_document_of_a_dry_run(project: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(project)
    settings = ["+cluster=small", "nodes=2"]

    async def use(agent: Agent) -> dict[str, object]:
        return await agent.call("plan", settings=settings)

    document = with_server(use, project.parent, str(project))
    assert document.pop("messages") == []
    assert main(["train", "--dry-run", "--json", *settings]) == 0
    assert document == json.loads(capsys.readouterr().out)
    assert subprocess.run(["bash", "-n"], input=document["script"], text=True).returncode == 0
    assert not (project / "runs").exists()


def test_errors_say_what_to_do_and_have_the_exit_code_with_its_meaning(project: Path) -> None:
    async def use(agent: Agent) -> None:
        error = await agent.refusal("plan", settings=["train.steps=0"])
        assert error["exit_code"] == EXIT_CONFIG and error["meaning"].startswith("a wrong value of a setting")
        assert "`train.steps` is 0, but must be at least 1" in error["message"] and error["hint"]
        error = await agent.refusal("status", run="nobody")
        assert (error["exit_code"], error["kind"]) == (EXIT_NO_RUN, "RunNotFoundError")
        error = await agent.refusal("list", states=["runing"])
        assert error["exit_code"] == EXIT_USAGE and "running" in error["hint"]
        error = await agent.refusal("check", settings=[])
        assert error["exit_code"] == EXIT_CONFIG and "runs on this machine" in error["message"]
        error = await agent.refusal("plan", setting=["nodes=2"], sweep="maybe")
        assert error["exit_code"] == EXIT_USAGE and "It takes settings, program, sweep." in error["hint"]
        assert "`sweep`: " in error["message"] and "`setting`: " in error["message"]
        for arguments in ({"settings": "nodes=2"}, {"settings": [2]}):
            assert "`settings" in (await agent.refusal("plan", **arguments))["message"]
        assert "Did you mean status" in (await agent.refusal("state"))["hint"]

    with_server(use, project)


def test_a_changed_plan_starts_nothing(project: Path) -> None:
    (project / "my_code.py").write_text("a = 1\n")

    async def use(agent: Agent) -> None:
        planned = (await agent.call("plan", program=PROGRAM))["id"]
        error = await agent.refusal("submit", plan=planned, program=[*PROGRAM, "x"])
        assert "the settings or configuration files differ from the plan" in error["message"]
        (project / "my_code.py").write_text("a = 2\n")
        error = await agent.refusal("submit", plan=planned, program=PROGRAM)
        assert error["exit_code"] == EXIT_RUN_STATE and "the code differ" in error["message"]
        assert "Nothing was started" in error["message"] and "Plan again" in error["hint"]

    with_server(use, project, "--write")
    assert not (project / "runs").exists()


def test_a_program_trains_here_in_the_background(project: Path) -> None:
    """The server that started it ends first."""

    async def begin(agent: Agent) -> str:
        settings = ["name=first", "ranks_per_node=1"]
        planned = await agent.call("plan", settings=settings, program=PROGRAM)
        assert planned["launcher"] == "local" and planned["runs"][0]["exists"] is False
        started = await agent.call("submit", plan=planned["id"], settings=settings, program=PROGRAM)
        (run,) = started["runs"]
        assert run["outcome"] in ("training", "finished") and run["name"] == planned["runs"][0]["name"]
        return run["name"]

    async def follow(agent: Agent) -> None:
        while (status := await agent.call("status", run=name))["state"] != "finished":
            assert status["state"] in ("preparing", "starting", "running"), status
            await anyio.sleep(0.1)
        assert any(line.endswith("done") for line in (await agent.call("logs"))["lines"])
        assert [run["name"] for run in (await agent.call("list"))["runs"]] == [name]
        error = await agent.refusal("resume", run="first")
        assert error["exit_code"] == EXIT_RUN_STATE and "finished" in error["message"]
        assert (await agent.call("stop", run="first"))["runs"][0]["outcome"] == "inactive"

    name = with_server(begin, project, "--write")
    with_server(follow, project, "--write")


@pytest.fixture
def finished(make_run) -> RunFolder:
    folder: RunFolder = make_run("first-0a1b2c3d")
    submit(folder)
    start(folder)
    append_line(folder.metrics_file, {"step": 9, "attempt": 0, "time": 1.0, "loss": 2.5})
    end(folder, "finished")
    return folder


def test_reading_tools_write_nothing(project: Path, finished: RunFolder, make_run) -> None:
    """Not even the report, which the command `status` writes."""
    make_run("second-0a1b2c3d")
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")}

    async def use(agent: Agent) -> None:
        for tool in ("status", "explain", "logs"):
            assert (await agent.call(tool, run="first"))["name"] == finished.name
        assert (await agent.call("status", run="first"))["report"] is None
        await agent.call("diff", first="first", second="second")

    with_server(use, project)
    assert {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")} == before
    assert main(["status", "first"]) == 0
    assert finished.report_file.exists()


def test_results_are_those_of_python(project: Path, finished: RunFolder, make_run) -> None:
    make_run("second-0a1b2c3d")
    report("first")
    actions: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
        "status": ({"run": "first"}, lambda: status("first", write_report=False)),
        "list": ({"name": "f"}, lambda: list_runs(name="f", limit=20)),
        "explain": ({"run": "first"}, lambda: explain("first")),
        "logs": ({"run": "first", "everything": True}, lambda: logs("first", everything=True)),
        "diff": ({"first": "first", "second": "second"}, lambda: diff("first", "second")),
        "stop": ({"run": "first"}, lambda: stop("first")),
        "cancel": ({"run": "first"}, lambda: cancel("first")),
        "report": ({"run": "first"}, lambda: report("first")),
    }

    async def use(agent: Agent) -> dict[str, dict[str, Any]]:
        return {tool: await agent.call(tool, **arguments) for tool, (arguments, _) in actions.items()}

    for tool, document in with_server(use, project, "--write").items():
        assert document.pop("messages") == []
        result = to_json(actions[tool][1]())
        assert document == result | {key: document[key] for key in ("time",) if key in document}, tool


def test_a_bug_is_an_error_without_a_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Tools, "explain", lambda self: {}["no such key"])
    document = calls._document("explain", {}, writes=False)
    assert document["error"]["message"] == "KeyError: 'no such key'."
    assert "bug in slurmddp" in document["error"]["hint"] and "Traceback" in capsys.readouterr().err


def test_output_has_limits(project: Path, make_run) -> None:
    folders = [make_run(f"run{number}-0a1b2c3d") for number in range(5)]
    noisy: RunFolder = folders[0]
    submit(noisy)
    start(noisy)
    noisy.rank_log(0, 0).parent.mkdir(parents=True, exist_ok=True)
    noisy.rank_log(0, 0).write_text("".join(f"{number:05} {'x' * 400}\n" for number in range(5_000)))

    async def use(agent: Agent) -> None:
        logs = await agent.call("logs", run=noisy.name, lines=400)
        assert logs["lines"][-1].startswith("[rank 0] 04999 ") and len(logs["lines"]) < 400
        assert len(json.dumps(logs)) <= MAX_BYTES + 500
        assert "`lines` has the last" in logs["messages"][0] and "slurmddp logs --json" in logs["messages"][1]
        assert len((await agent.call("logs", run=noisy.name, lines=3))["lines"]) == 3
        listing = await agent.call("list", limit=2)
        assert (len(listing["runs"]), listing["more"]) == (2, 3)
        for tool, arguments in (("logs", {"lines": 401}), ("list", {"limit": 101}), ("list", {"limit": 0})):
            assert (await agent.refusal(tool, **arguments))["exit_code"] == EXIT_USAGE

    with_server(use, project)


def test_code_of_the_configuration_neither_writes_into_the_protocol_nor_delays_other_calls(
    project: Path,
) -> None:
    """Each call reads the code again, and a call whose process dies fails without effect on other calls."""
    code = project / "conf/slurmddp.py"
    gate = project / "gate"
    code.write_text(
        "import os, pathlib, subprocess, sys, time\nprint('{\"jsonrpc\": 1}', flush=True)\n"
        "subprocess.run(['echo', 'noise'])\nassert sys.stdin.read() == ''\n"
        f"while not pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.05)\n"
    )

    async def use(agent: Agent) -> None:
        planned: dict[str, object] = {}

        async def plan() -> None:
            planned.update(await agent.call("plan"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plan)
            assert (await agent.call("list"))["runs"] == []
            assert not planned
            gate.touch()

        assert planned["launcher"] == "local"
        code.write_text("import os\nos._exit(3)\n")
        error = await agent.refusal("plan")
        assert "ended with exit code 3, without a result" in error["message"]
        code.write_text("1 / 0\n")
        assert "division by zero" in (await agent.refusal("plan"))["message"]

    with_server(use, project)


def test_runs_and_plans_of_a_login_node(node, tmp_path: Path, capfd) -> None:
    """Its tools copy code only with --write, and never ask for a password."""
    settings = ["+cluster=far", "name=exp"]

    async def read(agent: Agent) -> None:
        error = await agent.refusal("plan", settings=settings, program=["train.py"])
        assert "started without --write" in error["message"] and "Nothing was copied" in error["message"]

    async def write(agent: Agent) -> None:
        planned = await agent.call("plan", settings=settings, program=["train.py"])
        assert planned["runs"][0]["path"].startswith("login1:")
        assert any(".env" in message for message in planned["messages"])
        started = await agent.call("submit", plan=planned["id"], settings=settings, program=["train.py"])
        assert [run["outcome"] for run in started["runs"]] == ["submitted"]
        status = await agent.call("status", run="exp")
        assert status["state"] == "queued" and status["path"].startswith("login1:")
        assert (await agent.call("explain", run="exp"))["job_id"] == "1"
        assert [run["name"] for run in (await agent.call("list"))["runs"]] == [status["name"]]
        assert (await agent.call("diff", first="exp", second="exp"))["settings"] == {}
        assert (await agent.call("stop", run="exp"))["runs"][0]["outcome"] == "dequeued"
        Path("train.py").write_text("print('second')\n")
        error = await agent.refusal("submit", plan=planned["id"], settings=settings, program=["train.py"])
        assert "the code differ" in error["message"]

    with_server(read, Path.cwd())
    assert not (node.home / "slurmddp").exists()
    with_server(write, Path.cwd(), "--write")


def test_each_tool_is_a_command() -> None:
    assert set(TOOLS) == READING | WRITING
    assert set(TOOLS) - set(COMMANDS) == {"plan", "check", "submit"}


def test_a_missing_package_or_folder_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mcp", "nowhere"]) == EXIT_CONFIG
    assert "There is no folder nowhere" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["mcp"]) == EXIT_CONFIG
    assert "needs the package mcp" in (error := capsys.readouterr().err)
    assert "pip install 'slurmddp[mcp]'" in error
