"""The README's program on a real SLURM: a preempted job ends with the weights of the undisturbed one."""

from __future__ import annotations

import pytest

from support.distributed.doc_programs import newest_weights, readme_program
from support.slurm.train_project import Command, Run, occupy

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_the_readme_program_survives_a_preemption(sandbox, tmp_path) -> None:
    readme_program(tmp_path)
    command = Command(tmp_path, sandbox.environment())
    runs = []
    for name in ("whole", "preempted"):
        command("train", "+cluster=sandbox", f"name={name}", "program.script=readme.py", "nodes=2")
        (folder,) = (tmp_path / "runs").glob(f"{name}-*")
        run = Run(folder, command)
        run.wait("begin", (tmp_path / "begun").exists)
        if name == "preempted":
            occupy(command)
        run.wait_finished()
        (tmp_path / "begun").unlink()
        runs.append(run)
    ends = [[(event["outcome"], event["next"]) for event in run.events("ended")] for run in runs]
    assert ends == [[("finished", "none")], [("stopped", "requeue"), ("finished", "none")]]
    assert newest_weights(runs[0].folder) == newest_weights(runs[1].folder)
