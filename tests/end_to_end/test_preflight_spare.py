"""The ranks of pretended nodes start without a node that the preflight finds unhealthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmddp.runs.folder.jsonl import read_lines
from support.runs.agent_runs import events
from support.runs.train_runs import only_run, slurmddp

pytestmark = [pytest.mark.distributed]

PROGRAM = '''
"""A training whose ranks find on node 1 that their folder for temporary files can't be written to."""

import os
from pathlib import Path

from slurmddp.training.trainer.loop import train

started = Path(f"/proc/{os.getppid()}/environ").read_text().split("\\0")
(agent,) = (line.partition("=")[2] for line in started if line.startswith("SLURM_NODEID="))
if agent == "1":
    os.environ["TMPDIR"] = "/proc"
'''
SMALL = [
    "model=gpt_tiny",
    "train.steps=4",
    "train.eval_batches=1",
    "train.sample_chars=5",
    "ranks_per_node=1",
]


@pytest.mark.parametrize(("rest", "spare"), [("spare_nodes=1", [2]), ("elastic=true", None)])
def test_a_node_that_is_not_fit_is_replaced_or_left_out(
    tmp_path: Path, rest: str, spare: list[int] | None
) -> None:
    (tmp_path / "unfit_program.py").write_text(PROGRAM)
    own = ["program._target_=unfit_program.train", "preflight=on", "name=tried", "nodes=2", rest]
    said = slurmddp(tmp_path, "train", *SMALL, *own)
    run = only_run(tmp_path)
    first, second = events(run, "preflight")
    assert (first["restart_count"], first["nodes"], list(first["unfit"])) == (0, 2, ["1"])
    assert (second["restart_count"], second["nodes"], second["failed"]) == (1, 2 if spare else 1, [])
    (restarted,) = events(run, "restarted")
    assert (restarted["node"], restarted["rank"], restarted.get("spare")) == (1, None, spare)
    assert [(end["attempt"], end["outcome"]) for end in events(run, "ended")] == [(0, "finished")]
    assert "node 1 (localhost) failed the preflight: /proc (TMPDIR) can't be written to" in said
    assert [line["step"] for line in read_lines(run.metrics_file)][-1] == 4
