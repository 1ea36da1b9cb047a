"""Other frameworks on a real SLURM of two nodes: preempted, requeued, resumed from their own files.

All jobs are submitted at once and preempted together, so that their waits overlap.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.frameworks import FRAMEWORKS, places, write_scripts
from support.slurm.sandboxes import own_sandbox
from support.slurm.train_project import Command, Run, occupy

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

MEET = f"""exec {Path(sys.executable).with_name("torchrun")} --nnodes=$WORLD_SIZE --nproc-per-node=1 \\
--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT --local-addr=$SLURMD_NODENAME "$@"
"""
"""The start of a torchrun on each node of a job."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Run]]:
    """One run of each framework, and one under torchrun; all have been preempted once and have finished."""
    project = tmp_path_factory.mktemp("frameworks")
    write_scripts(project)
    with own_sandbox("f", nodes=2, cpus=len(FRAMEWORKS) + 1) as sandbox:
        command = Command(project, sandbox.environment())
        found = {name: submit(command, name, framework.words) for name, framework in FRAMEWORKS.items()}
        settings, *program = FRAMEWORKS["torch"].words
        found["torchrun"] = submit(
            command, "torchrun", [settings, "--", "sh", "-c", MEET, "torchrun", *program]
        )
        for name, run in found.items():
            pattern = FRAMEWORKS.get(name, FRAMEWORKS["torch"]).checkpoints
            run.wait("checkpoint", lambda run=run, pattern=pattern: [*run.folder.glob(f"own/{pattern}")])
        occupy(command)
        for run in found.values():
            run.wait_finished()
        yield found


def submit(command: Command, name: str, words: list[str]) -> Run:
    own = ["+cluster=sandbox", f"name={name}", "nodes=2", "cpus_per_node=1", "policy.grace_s=20"]
    command("run", *own, "-n", "1", *words)
    (folder,) = (command.project / "runs").glob(f"{name}-*")
    return Run(folder, command)


@pytest.mark.parametrize("name", [*FRAMEWORKS, "torchrun"])
def test_a_preempted_framework_is_requeued_and_resumes_from_its_own_checkpoint(
    runs: Mapping[str, Run], name: str
) -> None:
    run = runs[name]
    ends = [(event["outcome"], event["next"], event.get("progressed")) for event in run.events("ended")]
    assert ends == [("stopped", "requeue", True), ("finished", "none", True)], run.story()
    each = FRAMEWORKS[name].starts_own_ranks if name in FRAMEWORKS else 1
    found = places(Path(run.folder))
    assert [place[:3] for place in found] == [[rank, rank % each, 2 * each] for rank in range(2 * each)]
    assert len({(first, last) for *_, first, last in found}) == 1, "all ranks took the same steps"
    *_, first, last = found[0]
    assert first > 0
    assert last == first + 4
