"""`slurmddp bench` as a job of a real SLURM, whose nodes have links of a set bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.bench.results import read
from slurmddp.collectives.cost_model import WORK
from support.slurm.faulty_sandbox import FaultySandbox
from support.slurm.sandboxes import own_sandbox
from support.slurm.train_project import Command, Run

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

MBIT = 200
BYTES_PER_S = MBIT * 1e6 / 8
SHORT = ["--repetitions", "5", "--warmup", "1"]


@pytest.fixture(scope="module")
def limited() -> Iterator[FaultySandbox]:
    with own_sandbox("l", nodes=4, cpus=1, gpus=0, link_mbit=MBIT) as made:
        yield made


def bench(sandbox: FaultySandbox, folder: Path, action: str, *words: str) -> Run:
    command = Command(folder, sandbox.environment())
    said = command("bench", action, "+cluster=sandbox", "nodes=4", "-n", "1", *SHORT, *words)
    assert "result  slurmddp bench show bench-" in said
    run = Run(next((folder / "runs").glob(f"bench-{action}-*")), command)
    run.wait_finished()
    return run


def test_links_have_the_bandwidth_that_was_set(limited: FaultySandbox, tmp_path: Path) -> None:
    run = bench(limited, tmp_path, "cluster", "--sizes", "4kB,1MB")
    found = read(run.folder)
    assert len(found.tables["links"]) == 6 and len(found.tables["nodes"]) == 4
    # tbf lets a burst of 10 ms pass at any speed: 250 kB of the 4 MB of a message.
    assert all(row["bytes_per_s"] < 1.25 * BYTES_PER_S for row in found.tables["links"])
    assert "Links between nodes" in run.command("bench", "show", run.folder.name)


def test_no_rank_sends_faster_than_its_link(limited: FaultySandbox, tmp_path: Path) -> None:
    found = read(bench(limited, tmp_path, "collectives", "--sizes", "400kB,2MB,4MB").folder)
    rows = {row["algorithm"]: row for row in found.tables["all_reduce"] if row["bytes"] == 4_000_000}
    print({name: f"{row['median_s'] * 1e3:.0f} ms" for name, row in rows.items()})
    print(f"error on the held-out size: {found.model['median_error']:.0%}")
    for name in WORK:
        assert rows[name]["median_s"] > 0.6 * rows[name]["bytes_sent"] / BYTES_PER_S
    assert found.model["held_out"] == [2_000_000] and found.model["beta_s"] > 0
    assert rows["ring"]["bytes_sent"] < rows["central_server"]["bytes_sent"]
