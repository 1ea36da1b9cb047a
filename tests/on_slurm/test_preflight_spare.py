"""A node that the preflight finds unfit has a spare take its place in the same job, on a real SLURM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.sandbox import Sandbox
from support.slurm.sandboxes import nodes_of, own_sandbox
from support.slurm.train_project import Command, make_project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

OWN_PYTHON = """#!/bin/sh
# The interpreter of the agents: on one node of the step no temporary file can be written.
[ "$SLURM_NODEID" = 1 ] && export TMPDIR=/proc
exec "{python}" "$@"
"""


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with own_sandbox("u", nodes=3) as made:
        yield made


def test_a_spare_takes_the_place_of_a_node_that_is_not_fit(sandbox: Sandbox, tmp_path: Path) -> None:
    command = Command(make_project(tmp_path / "project"), sandbox.environment())
    script = command.project / "own-python"
    script.write_text(OWN_PYTHON.format(python=sys.executable))
    script.chmod(0o755)
    sizes = ["nodes=2", "spare_nodes=1", "ranks_per_node=2", "train.steps=3", "train.workers=0"]
    run = command.submit("unfit", *sizes, "preflight=on", f"cluster.python={script}")
    run.wait_finished()

    (end,) = run.events("ended")
    assert (end["attempt"], end["exit_code"], end["next"]) == (0, 0, "none")
    assert len(nodes_of(run, 0)) == 3
    unfit = nodes_of(run, 0)[1]
    first, second = run.events("preflight")
    assert first["failed"][0].startswith(f"{unfit}: /proc (TMPDIR) can't be written to")
    assert (second["generation"], second["failed"]) == (1, [])
    (restarted,) = run.events("restarted")
    assert (restarted["node"], restarted["spare"], restarted["step"]) == (1, [2], -1)
    (entry,) = run.records("excluded.jsonl")
    assert (entry["node"], entry["expires"] - entry["time"]) == (unfit, 24 * 3600)
    assert entry["reason"].startswith("preflight: /proc (TMPDIR)")
    told = command("status", "-v", run.folder.name)
    assert f"node 1 ({unfit}) was lost to the preflight: /proc (TMPDIR)" in told
    assert "generation 1 of ranks runs with spare node 2" in told
    assert f"{unfit}: failed under it" in told
    assert not (run.folder / "logs/attempt-0/failure.json").exists()
    assert command.slurm("squeue", "--noheader", "--states=running,pending") == ""
