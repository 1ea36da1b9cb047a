"""An agent runs a training on a real SLURM by the tools of `slurmddp mcp`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from slurmddp.sandbox import Sandbox
from support.mcp_client import Agent, with_server
from support.slurm.train_project import SMALL, UNHURRIED, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


async def until(
    ask: Callable[[], Awaitable[dict[str, Any]]], holds: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Ask again until the document of a tool has what is awaited, for at most five minutes."""
    document: dict[str, Any] = {}
    with anyio.move_on_after(300):
        while not holds(document := await ask()):
            await anyio.sleep(0.5)
        return document
    raise AssertionError(document)


def test_an_agent_plans_submits_follows_stops_and_resumes_a_training(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project")
    settings = ["+cluster=sandbox", "name=agent", *SMALL, "train.steps=12", UNHURRIED]

    async def use(agent: Agent) -> None:
        planned = await agent.call("plan", settings=settings)
        assert planned["script"].startswith("#!/bin/bash\n") and planned["cluster"] == "sandbox"
        (checked,) = (await agent.call("check", settings=settings))["jobs"]
        assert checked["reasons"] == []
        (run,) = (await agent.call("submit", plan=planned["id"], settings=settings))["runs"]
        assert run["outcome"] == "submitted"
        (again,) = (await agent.call("submit", plan=planned["id"], settings=settings))["runs"]
        assert (again["outcome"], again["job_id"]) == ("active", run["job_id"])

        async def status() -> dict[str, Any]:
            return await agent.call("status", run="agent")

        await until(status, lambda seen: seen["state"] == "running" and (seen["step"] or 0) >= 2)
        assert (await agent.call("explain", run="agent"))["wait"] is None
        logs = await agent.call("logs", run="agent", lines=5)
        assert logs["attempt"] == 0 and any("step" in line for line in logs["lines"])

        assert (await agent.call("stop", run="agent"))["runs"][0]["outcome"] == "asked"
        stopped = await until(status, lambda seen: seen["state"] == "stopped")
        assert stopped["saved_step"] >= 2 and stopped["report"] is None

        (resumed,) = (await agent.call("resume", run="agent", changes=["time_limit=5m"]))["runs"]
        assert resumed["outcome"] == "submitted" and resumed["job_id"] != run["job_id"]
        finished = await until(status, lambda seen: seen["state"] in ("finished", "failed"))
        assert (finished["state"], finished["step"]) == ("finished", 12), finished
        assert Path((await agent.call("report", run="agent"))["path"]).is_file()

    with_server(use, project, "--write", **sandbox.environment(), XDG_STATE_HOME=str(tmp_path / "state"))


def test_a_job_that_can_not_start_is_explained_and_cancelled(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    settings = ["+cluster=sandbox", "name=late", *SMALL, "+cluster.sbatch.begin=now+1hour"]

    async def use(agent: Agent) -> None:
        refused = await agent.call("check", settings=[*settings, "nodes=99"])
        assert refused["jobs"][0]["reasons"], refused
        planned = await agent.call("plan", settings=settings)
        await agent.call("submit", plan=planned["id"], settings=settings)
        wait = (await agent.call("explain", run="late"))["wait"]
        assert wait["reason"] == "BeginTime", wait
        cancelled = await agent.call("cancel", run="late")
        assert cancelled["runs"][0]["cancelled"] is True
        assert (await agent.call("status", run="late"))["state"] == "cancelled"

    with_server(use, project, "--write", **sandbox.environment(), XDG_STATE_HOME=str(tmp_path / "state"))


def test_a_sweep_is_planned_and_submitted_as_one_array(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    arguments = {"settings": ["+cluster=sandbox", "name=tune", *SMALL, "seed=1,2"], "sweep": True}

    async def use(agent: Agent) -> None:
        planned = await agent.call("plan", **arguments)
        assert len(planned["arrays"]) == 1 and [run["settings"] for run in planned["runs"]] == [
            "seed=1",
            "seed=2",
        ]
        started = await agent.call("submit", plan=planned["id"], **arguments)
        assert started["sweep"] == planned["sweep"]
        assert [run["outcome"] for run in started["runs"]] == ["submitted", "submitted"]
        assert (await agent.call("list", sweep="tune"))["points"] == 2
        await agent.call("cancel", run=started["sweep"])
        assert {run["state"] for run in (await agent.call("status", run="tune-sweep"))["runs"]} == {
            "cancelled"
        }

    with_server(use, project, "--write", **sandbox.environment(), XDG_STATE_HOME=str(tmp_path / "state"))
