"""What a run warns of is told by `status`, also after it has ended."""

from __future__ import annotations

import pytest

from slurmddp.cli.main import main
from support.runs.cli_runs import start, submit

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_warnings_of_the_newest_attempt_are_told_once_each(make_run, slurm, capsys):
    run = make_run()
    submit(run)
    start(run)
    run.add_event("warned", attempt=0, about="preflight", text="n1: of an earlier attempt.")
    start(run, attempt=1)
    for _ in range(2):
        run.add_event("warned", attempt=1, about="device", text="torch sees none.")
    for number in range(4):
        run.add_event("warned", attempt=1, about="grace_s", text=f"too short by {number} s.")
    slurm.set_state("7", "RUNNING")
    assert main(["status", run.name]) == 0
    out = capsys.readouterr().out
    assert out.count("  warned     torch sees none.\n") == 1
    assert [line.split()[-2] for line in out.splitlines() if "too short by" in line] == ["0", "1", "2", "3"]
    assert "earlier attempt" not in out
