"""An srun that waits for agents which have left: the batch script ends srun after a bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from script_run import SAVE, Run

LEFT = 'echo {} >"$logs/exit-node-0"\necho {} >"$logs/exit-node-1"\n'
HEARS_NOTHING = "exec tail -f /dev/null"
WORKS_FOR = "read -rt {} <> <(:)\n"
"""A wait in bash itself: the `sleep` of these tests takes no time."""


def impatient(tmp_path: Path, **changes: object) -> Run:
    """A run whose script waits two seconds for srun."""
    run = Run(tmp_path, **changes)
    script = run.folder.script_file.read_text()
    assert "\nsrun_wait_s=60 #" in script
    run.folder.script_file.write_text(script.replace("\nsrun_wait_s=60 #", "\nsrun_wait_s=2 #"))
    return run


@pytest.mark.parametrize(
    ("code", "end"), [(0, ("finished", "none")), (75, ("stopped", "requeue")), (1, ("failed", "none"))]
)
def test_srun_is_ended_and_the_word_of_the_agents_counts(
    tmp_path: Path, code: int, end: tuple[str, str]
) -> None:
    run = impatient(tmp_path)
    run.start((SAVE if code == 75 else "") + LEFT.format(code, code) + HEARS_NOTHING)
    assert run.end == end
    assert "this script ends srun" in (run.folder.log_dir(0) / "batch.log").read_text()


def test_a_node_without_which_the_others_went_on_is_not_waited_for(tmp_path: Path) -> None:
    run = impatient(tmp_path, elastic=True)
    run.start('echo 0 >"$logs/exit-node-0"\ntouch "$logs/replaced-node-1"\n' + HEARS_NOTHING)
    assert run.end == ("finished", "none")


def test_an_agent_that_has_not_left_is_waited_for(tmp_path: Path) -> None:
    run = impatient(tmp_path)
    run.start('echo 0 >"$logs/exit-node-0"\n' + WORKS_FOR.format(7) + 'echo 0 >"$logs/exit-node-1"\nexit 0')
    assert run.end == ("finished", "none")
    assert "this script ends srun" not in (run.folder.log_dir(0) / "batch.log").read_text()


def test_an_agent_that_never_says_so_is_not_waited_for_without_a_bound(tmp_path: Path) -> None:
    run = impatient(tmp_path)
    script = run.folder.script_file
    script.write_text(script.read_text().replace("srun_wait_s * 20", "srun_wait_s * 2"))
    run.start('echo 1 >"$logs/exit-node-0"\n' + HEARS_NOTHING)
    assert run.end == ("failed", "none")


def test_srun_is_ended_soon_when_slurm_ends_the_job(tmp_path: Path) -> None:
    """SLURM starts the job again a second after the kill wait, when this script must be gone."""
    run = Run(tmp_path)
    run.programs.write("config", "KillWait                = 3 sec\n")
    run.start('echo 1 >"$logs/exit-node-0"\npkill -TERM -f "$SLURMDDP_RUN_DIR/job.sbatch"\n' + HEARS_NOTHING)
    assert run.end == ("failed", "none")


def test_the_script_does_not_wait_for_the_watch(tmp_path: Path) -> None:
    began = time.monotonic()
    run = Run(tmp_path)
    run.start()
    assert run.end == ("finished", "none")
    assert time.monotonic() - began < 30
