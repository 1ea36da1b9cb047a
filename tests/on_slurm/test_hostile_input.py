"""Words, values and folders that a shell, sbatch or srun could read as their own, on a real SLURM."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from slurmddp.errors import EXIT_CONFIG
from slurmddp.sandbox import Sandbox
from slurmddp.settings.arguments import quoted
from support.slurm.train_project import Command, Run, make_project

pytestmark = pytest.mark.slurm

SHOW = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
shown = dict(arguments=sys.argv[1:], folder=os.getcwd(), typed=os.environ["TYPED"], note=os.environ["NOTE"])
Path(os.environ["SLURMDDP_RUN_DIR"], "shown.json").write_text(json.dumps(shown))
"""
FOLDER = 'pro\'j "x" $(touch ran) `touch ran` ; & # %j %% {run_dir} ünï漢😀 ' + "l" * 120
VALUE = "two\nlines 'q' \"d\" $(touch ran) `touch ran` $HOME \\ %j !! ; #SBATCH --nodes=9 ünï " + "l" * 300
PIECES = [
    "'", '"', "\\", "\n", "\r", "\t", " ", "$", "$(touch ran)", "`touch ran`", "${HOME}", "-", "--", "=",
    "%j", "!", "ü", "漢", "😀", "\x85", "\x1b", ";", "#", "*", "~", ",", "[", "}", "a",
]  # fmt: skip


def hostile_words() -> list[str]:
    """Return 150 words of pieces that some program on the way could read as its own; always the same."""
    chosen = random.Random(7)
    mixed = ["".join(chosen.choices(PIECES, k=chosen.randint(1, 8))) for _ in range(120)]
    return [*PIECES, "", "x" * 300, *mixed]


def test_what_a_person_types_reaches_the_rank_as_typed(sandbox: Sandbox, tmp_path: Path) -> None:
    project = make_project(tmp_path / FOLDER)
    (project / "-show").write_text(SHOW)
    (project / "-show").chmod(0o755)
    command, words = Command(project, {**sandbox.environment(), "TYPED": VALUE}), hostile_words()
    own = ["+cluster=sandbox", "nodes=1", "-n", "1", f"cluster.env.NOTE={quoted(VALUE)}"]
    for name in ("$(touch ran)", "-x", "l" * 300):
        assert "`name` is " in command("run", *own, f"name={quoted(name)}", "--", "./-show", code=EXIT_CONFIG)
    assert not (project / "runs").exists() and not command.slurm("squeue", "-h")
    command("run", *own, "name=shown", "--", "./-show", *words)
    run = Run(next((project / "runs").iterdir()), command)
    run.wait_finished()
    shown = json.loads((run.folder / "shown.json").read_text())
    assert shown == {"arguments": words, "folder": str(project), "typed": VALUE, "note": VALUE}
    assert (run.folder / "logs" / f"slurm-{run.job_id}.out").exists()
    assert not [*tmp_path.rglob("ran")]
