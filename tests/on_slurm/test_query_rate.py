"""The number of requests that the commands send to slurmctld, by the counts of sdiag."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmddp.cli.commands import list as command
from slurmddp.cli.list_watch import REFRESH_S, ListView
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.text_format import rich_table
from slurmddp.sandbox import Sandbox
from slurmddp.slurm.client import SlurmClient
from slurmddp.slurm.paced_client import PacedClient
from support.slurm.train_project import SMALL, Command, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def requests(command: Command) -> dict[str, int]:
    """Return how often each request of a client has reached slurmctld; sdiag's own are left out."""
    counts = re.findall(r"^\s+(REQUEST_\w+)\s.*count:(\d+)", command.slurm("sdiag"), re.MULTILINE)
    return {name: int(count) for name, count in counts if name != "REQUEST_STATS_INFO"}


def since(command: Command, before: dict[str, int]) -> dict[str, int]:
    return {name: more for name, count in requests(command).items() if (more := count - before.get(name, 0))}


def test_a_watched_list_of_a_sweep_asks_once_in_30_seconds(sandbox: Sandbox, tmp_path: Path) -> None:
    shell = Command(make_project(tmp_path / "project"), sandbox.environment())
    settings = ["name=watched", "nodes=1", "ranks_per_node=1", "+cluster.sbatch.hold=true"]
    shown = shell("train", "-m", "+cluster=sandbox", *SMALL, *settings, "seed=range(0,12)")
    sweep = shown.rpartition("slurmddp list ")[2].split()[0]
    folders = [folder for folder in (shell.project / "runs").glob("watched-*") if folder.is_dir()]
    clock = [0.0]
    view = ListView(
        lambda: [*map(str, folders)],
        None,
        lambda found: rich_table(command.HEADERS, command._rows(found, 0.0)[0]),
        PacedClient(now=lambda: clock[0]),
    )
    before = requests(shell)
    shell.slurm("squeue", "--noheader", "--jobs=1,2")
    one_squeue = since(shell, before)
    assert one_squeue["REQUEST_JOB_INFO"] == 1
    before, queries = requests(shell), 4
    while clock[0] < queries * 30:
        view.render(rows=50)
        clock[0] += REFRESH_S
    assert since(shell, before) == {name: queries * count for name, count in one_squeue.items()}
    found = view.read([*map(RunFolder, folders)])
    assert [one.state for one in found] == ["queued"] * 12 and "it is held by you" in found[0].detail
    before = requests(shell)
    listed = shell("list", sweep)
    assert listed.count(" queued ") == 12 and since(shell, before) == one_squeue
    before = requests(shell)
    assert len(SlurmClient().jobs([one.job_id for one in found if one.job_id])) == 12
    assert since(shell, before) == one_squeue
