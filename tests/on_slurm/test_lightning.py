"""Lightning on a real SLURM of two nodes with two ranks each; a stopped Trainer resumes."""

from __future__ import annotations

import pytest

from support.distributed.lightning_programs import FOUR, places, settings, write_programs
from support.slurm.train_project import Command, Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def command(sandbox, tmp_path) -> Command:
    write_programs(tmp_path)
    return Command(tmp_path, sandbox.environment())


def submit(command: Command, program: str, *more: str) -> Run:
    command("train", "+cluster=sandbox", f"name={program}", *more)
    (folder,) = (command.project / "runs").glob(f"{program}-*")
    return Run(folder, command)


def test_fabric_finds_its_ranks(command: Command) -> None:
    run = submit(command, "fabric", *settings("fabric", 2))
    run.wait_finished()
    assert places(run.folder) == FOUR


def test_a_trainer_goes_on_from_its_own_checkpoint_at_the_time_limit(
    command: Command,
) -> None:
    run = submit(command, "trainer", *settings("trainer", 2, epochs=100_000))
    run.wait("epoch", (run.folder / "lightning" / "last.ckpt").exists)
    command.slurm("scancel", "--signal=USR2", run.job_id)  # SLURM sends it to the steps before the limit.
    run.wait_finished()
    ends = [(event["outcome"], event["next"]) for event in run.events("ended")]
    assert ends == [("stopped", "requeue"), ("finished", "none")]
    assert places(run.folder) == FOUR
    epochs = {path.read_text() for path in run.folder.glob("epochs-1-*")}
    (first, last) = map(int, epochs.pop().split())
    assert not epochs, "all ranks took the same epochs"
    assert first > 0
    assert last == first + 3
