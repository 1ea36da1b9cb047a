"""A node that is lost: what the batch script makes of an attempt that went on without it, or could not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from script_nodes import NODE, PUT_BACK, ask_hostless, first_is_lost, of_three, refusing, run, slurmd
from script_run import RUNNING, SAVE, Run
from slurm_jobs import make_job

from slurmddp.errors import ConfigError
from slurmddp.slurm.options import sbatch_options
from slurmddp.slurm.script import render

__all__ = ["refusing", "run", "slurmd"]

WENT_ON = 'echo 0 >"$logs/exit-node-0"; echo 0 >"$logs/exit-node-2"; touch "$logs/replaced-node-1"; '
"""What the agents leave when node 2 took the place of node 1."""


def noted(run: Run) -> list[tuple[str, str]]:
    path = run.folder.path / "excluded.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(entry["node"], entry["reason"]) for entry in map(json.loads, lines)]


# --- What is asked for ---


@pytest.mark.parametrize("changes", [{"spare_nodes": 2}, {"elastic": True}], ids=["spares", "elastic"])
def test_the_job_and_its_step_outlive_a_node(changes: dict[str, int]) -> None:
    job = make_job(nodes=4, srun={"no-kill": True}, **changes)
    asked = 4 + job.resources.spare_nodes
    text = render(job)
    assert sbatch_options(job)["no-kill"] is True
    assert f"#SBATCH --nodes={asked}\n" in text and "#SBATCH --no-kill\n" in text
    assert (
        f"srun --nodes={asked} --ntasks={asked} --ntasks-per-node=1 \\\n                --no-kill \\\n"
        in text
    )
    assert "--kill-on-bad-exit=0 " in text
    assert job.resources.world_size == 8


def test_a_job_that_has_neither_ends_with_its_node() -> None:
    text = render(make_job())
    assert "no-kill" not in text and "--kill-on-bad-exit=1 " in text
    with pytest.raises(ConfigError, match="no-kill") as caught:
        render(make_job(sbatch={"no-kill": True}))
    assert "spare_nodes= or elastic=" in caught.value.hint


# --- An attempt that went on ---


@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_an_attempt_that_went_on_without_a_node_has_finished(run: Run, code: int) -> None:
    """The code is 0 where SLURM gave the node up, else that of an agent that was killed."""
    assert run.start(f"{WENT_ON} exit {code}") == 0
    assert run.end == ("finished", "none")
    assert noted(run) == [("n2", "the run lost it")]


def test_such_a_stop_is_a_stop(run: Run) -> None:
    assert run.start(SAVE + WENT_ON.replace("echo 0", "echo 75") + "exit 137") == 75
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]


def test_a_spare_that_was_lost_while_it_waited_was_not_needed(run: Run) -> None:
    of_three(run, "ALLOCATED", "ALLOCATED", "DOWN*")
    assert run.start('echo 0 >"$logs/exit-node-0"; echo 0 >"$logs/exit-node-1"; exit 137') == 0
    assert run.end == ("finished", "none")
    assert noted(run) == [("n3", "SLURM calls it DOWN*")]


def test_a_node_that_was_left_idle_has_not_failed(run: Run) -> None:
    """Fewer nodes may share a step evenly than are left."""
    assert run.start(WENT_ON + 'echo 0 >"$logs/exit-node-1"; exit 0') == 0
    assert noted(run) == []


def test_without_the_word_of_the_first_agent_nobody_knows_of_an_end(run: Run) -> None:
    run.start(WENT_ON.replace("exit-node-0", "exit-node-1") + "exit 0")
    assert run.end == ("failed", "none")


def test_a_failure_after_a_node_was_replaced_is_a_failure(run: Run) -> None:
    run.start(SAVE + WENT_ON + 'echo \'{"exit_code": 1}\' >"$logs/failure.json"; exit 1')
    assert run.end == ("failed", "requeue")


# --- One that could not ---


@pytest.fixture(params=[{}, {"exclude_failed_h": 0}, {"spare_nodes": 1}, {"elastic": True}], ids=str)
def ended(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """A run whose second agent is gone, which SLURM does not know yet."""
    run = Run(tmp_path, **request.param)
    run.environ["SLURM_JOB_NODELIST"] = "n[1-2]" if "spare_nodes" not in request.param else "n[1-3]"
    run.programs.write("nodes", NODE.format("n1", "ALLOCATED") + NODE.format("n2", "ALLOCATED"))
    return run


LOST = (
    'for node in 0 2; do echo 1 >"$logs/exit-node-$node"; done\n'
    'echo \'{"exit_code": null}\' >"$logs/failure.json"; exit 1'
)


def at(address: str, port: int) -> str:
    return (
        f"NodeName=n2 Arch=x86_64 NodeAddr={address} NodeHostName=n2 Port={port} State=ALLOCATED Owner=N/A\n"
    )


def test_a_node_that_does_not_answer_is_lost_and_no_failure_of_the_run(
    ended: Run, slurmd: socket.socket
) -> None:
    """Though the attempt left no checkpoint: SLURM would have put the job back, only later."""
    ended.programs.write("node-n2", at(*slurmd.getsockname()))  # where nobody listens
    ended.start(LOST)
    assert ended.end == ("stopped", "requeue")
    kept_out = "exclude_failed_h=0" not in ended.script
    assert noted(ended) == [("n2", "it does not answer")] * kept_out
    assert ended.asked() == ["requeue 41"] + ["update JobId=41 ExcNodeList=n2"] * kept_out


def test_an_agent_that_was_killed_on_a_node_that_answers_is_a_failure(
    ended: Run, slurmd: socket.socket
) -> None:
    slurmd.listen()
    ended.programs.write("node-n2", at("127.0.0.1", 0).replace(" Port=0", ""))
    ended.programs.write("config", f"SlurmdPort              = {slurmd.getsockname()[1]}\n")
    ended.start(LOST)
    assert (ended.end, noted(ended)) == (("failed", "none"), [])


def test_a_person_who_cancels_a_job_that_lost_a_node_is_heard(ended: Run, slurmd: socket.socket) -> None:
    ended.programs.write("node-n2", at(*slurmd.getsockname()))
    ended.programs.write("job", RUNNING.replace("RUNNING", "CANCELLED"))
    ended.start(LOST)
    assert ended.end == ("cancelled", "none")


# --- When the first node is lost, and the script with it ---


def test_a_job_that_outlived_its_first_node_is_put_back_by_another(run: Run, refusing: int) -> None:
    """SLURM leaves such a job alone, and its script is gone: it would stay until its time limit."""
    first_is_lost(run, port=refusing)
    assert ask_hostless(run) == PUT_BACK
    assert ask_hostless(run) == PUT_BACK, "each agent asks, one is enough"
    assert run.folder.attempts() == [0]


def test_where_the_site_refuses_that_another_submits_a_successor(run: Run, refusing: int) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    assert ask_hostless(first_is_lost(run, port=refusing)) == ["sbatch", "scancel"]
    assert "--dependency=afterany:41" in run.programs.read("sbatch.argv")
    assert run.events("submitted")[0]["resubmitted"] is True


@pytest.mark.parametrize(("requeue", "asked"), [(1, []), (0, ["sbatch"])])
def test_any_other_job_is_ended_by_slurm(
    tmp_path: Path, refusing: int, requeue: int, asked: list[str]
) -> None:
    """And put back, if the site allows it; else nobody but another agent could submit a successor."""
    run = first_is_lost(Run(tmp_path), "ALLOCATED*", refusing)
    run.programs.write("job", RUNNING.replace("Requeue=1", f"Requeue={requeue}"))
    assert ask_hostless(run) == asked


def test_a_first_node_that_answers_has_its_script(run: Run, slurmd: socket.socket) -> None:
    slurmd.listen()
    assert ask_hostless(first_is_lost(run, port=slurmd.getsockname()[1])) == []


def test_an_agent_that_was_cut_off_itself_leaves_it_to_others_to_ask_again(
    run: Run, slurmd: socket.socket
) -> None:
    slurmd.listen()
    first_is_lost(run, port=slurmd.getsockname()[1])
    assert ask_hostless(run) == []
    slurmd.close()
    assert ask_hostless(run) == PUT_BACK


@pytest.mark.parametrize("file", ["stop", "cancelled"])
def test_a_run_that_a_person_ended_is_only_taken_out_of_slurm(run: Run, refusing: int, file: str) -> None:
    (run.folder.path / file).touch()
    assert ask_hostless(first_is_lost(run, port=refusing)) == ["scancel"]


@pytest.mark.parametrize(
    "job",
    [RUNNING.replace("Restarts=0", "Restarts=1"), RUNNING.replace("RUNNING", "COMPLETING")],
    ids=["put back", "ending"],
)
def test_a_job_that_slurm_has_dealt_with_is_left_alone(run: Run, refusing: int, job: str) -> None:
    run.programs.write("job", job)
    assert ask_hostless(first_is_lost(run, port=refusing)) == []


def test_a_node_that_slurm_does_not_give_up_is_not_waited_for_for_ever(tmp_path: Path, refusing: int) -> None:
    run = Run(tmp_path, elastic=True)
    assert ask_hostless(first_is_lost(run, "ALLOCATED", refusing)) == []
    assert len(run.programs.read("sleeps").split()) == 90
