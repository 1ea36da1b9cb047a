"""A lost node, the first one with the batch script among them, and a batch script that is killed alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.runs.failures.read import read_failure
from support.slurm.batch_run import ENDING, RUNNING, SAVE, Run, Step, do, leave, node, records

PUT_BACK = ["requeue 41", "update JobId=41 ExcNodeList=n1"]
"""Requests to SLURM for a job that has lost its first node."""
CONTINUED = do(lambda run: run.folder.add_event("continued", attempt=run.attempt, without=[1]))
"""Node 2 took the place of node 1."""
KILLED = ENDING.replace("Reason=None", "Reason=JobLaunchFailure")


@pytest.fixture(
    params=[{"spare_nodes": 1, "nodes": 2}, {"elastic": True, "nodes": 3}], ids=["spares", "elastic"]
)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return of_three(Run(tmp_path, **request.param))


def of_three(run: Run, *states: str) -> Run:
    run.environ["SLURM_JOB_NODELIST"] = "n[1-3]"
    pairs = zip(("n1", "n2", "n3"), states or ["ALLOCATED"] * 3, strict=True)
    run.slurm.nodes = "".join(node(name, state) for name, state in pairs)
    return run


@pytest.fixture
def slurmd() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        yield listening


@pytest.fixture
def refusing(slurmd: socket.socket) -> int:
    """A port where nobody listens."""
    return int(slurmd.getsockname()[1])


def noted(run: Run) -> list[tuple[str, str]]:
    return [(entry["node"], entry["reason"]) for entry in run.excluded()]


# --- An attempt that went on ---


@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_an_attempt_that_continued_without_a_node_has_finished(run: Run, code: int) -> None:
    """The code is 0 where SLURM gave the node up, else that of an agent that was killed."""
    assert run.start(CONTINUED + leave({0: 0, 2: 0}, code)) == 0
    assert run.end == ("finished", "none")
    assert noted(run) == [("n2", "the ranks continued without it")]


def test_such_a_stop_is_a_stop(run: Run) -> None:
    assert run.start(SAVE + CONTINUED + leave({0: 75, 2: 75}, 137)) == 75
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]


def test_a_spare_that_was_lost_while_it_waited_was_not_needed(run: Run) -> None:
    of_three(run, "ALLOCATED", "ALLOCATED", "DOWN*")
    assert run.start(leave({0: 0, 1: 0}, 137)) == 0
    assert run.end == ("finished", "none")
    assert noted(run) == [("n3", "SLURM shows its state as DOWN*")]


def test_a_node_that_was_left_idle_has_not_failed(run: Run) -> None:
    """Fewer nodes may share a step evenly than are left."""
    assert run.start(CONTINUED + leave({0: 0, 1: 0, 2: 0}, 0)) == 0
    assert noted(run) == []


def test_without_the_code_of_the_first_agent_nobody_knows_of_an_end(run: Run) -> None:
    run.start(CONTINUED + leave({1: 0, 2: 0}, 0))
    assert run.end == ("failed", "none")


def test_a_failure_after_a_node_was_replaced_is_a_failure(run: Run) -> None:
    run.start(SAVE + CONTINUED + records({"exit_code": 1}) + leave({0: 0, 2: 0}, 1))
    assert run.end == ("failed", "requeue")


# --- An attempt that could not go on ---


@pytest.fixture(params=[{}, {"exclude_failed_h": 0}, {"spare_nodes": 1}, {"elastic": True}], ids=str)
def ended(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """A run whose second agent is gone, which SLURM does not know yet."""
    run = Run(tmp_path, **request.param)
    run.environ["SLURM_JOB_NODELIST"] = "n[1-2]" if "spare_nodes" not in request.param else "n[1-3]"
    return run


LOST: Step = records({"exit_code": None}) + leave({0: 1, 2: 1}, 1)


def test_a_node_that_does_not_answer_is_lost_and_no_failure_of_the_run(ended: Run, refusing: int) -> None:
    """Though the attempt left no checkpoint: SLURM would have put the job back, only later."""
    ended.slurm.nodes = node("n1") + node("n2", address="127.0.0.1", port=refusing)
    ended.start(LOST)
    assert ended.end == ("stopped", "requeue")
    kept_out = '"exclude_failed_h": 0' not in ended.folder.job_file.read_text()
    assert noted(ended) == [("n2", "its slurmd does not answer")] * kept_out
    assert ended.asked() == ["requeue 41"] + ["update JobId=41 ExcNodeList=n2"] * kept_out


def test_an_agent_that_was_killed_on_a_node_that_answers_is_a_failure(
    ended: Run, slurmd: socket.socket
) -> None:
    slurmd.listen()
    ended.slurm.nodes = node("n1") + node("n2", address="127.0.0.1")
    ended.slurm.config = f"SlurmdPort              = {slurmd.getsockname()[1]}\n"
    ended.start(LOST)
    assert (ended.end, noted(ended)) == (("failed", "none"), [])


def test_a_person_who_cancels_a_job_that_lost_a_node_is_heard(ended: Run, refusing: int) -> None:
    ended.slurm.nodes = node("n1") + node("n2", address="127.0.0.1", port=refusing)
    ended.slurm.job = RUNNING.replace("RUNNING", "CANCELLED")
    ended.start(LOST)
    assert ended.end == ("cancelled", "none")


# --- When the first node is lost, and the batch script with it ---


def first_is_lost(run: Run, state: str = "DOWN*", port: int = 0) -> Run:
    """Let the first node have no slurmd, as an agent on the second would find it."""
    run.slurm.nodes = node("n1", state, address="127.0.0.1", port=port) + node("n2") + node("n3")
    run.folder.log_dir(0).mkdir(parents=True, exist_ok=True)
    return run


def test_a_job_that_lost_its_first_node_is_requeued_by_another_agent(run: Run, refusing: int) -> None:
    """SLURM leaves such a job alone, and its script is gone: it would stay until its time limit."""
    first_is_lost(run, port=refusing)
    assert run.lose_first_node() == PUT_BACK
    assert run.lose_first_node() == PUT_BACK, "each agent asks, one is enough"
    assert run.folder.attempts() == [0]
    found = read_failure(run.folder, 0)
    assert found is not None
    assert found.sentence == "the agent on n1 recorded no exit code: it was killed, or its host failed"


def test_where_the_site_refuses_that_another_agent_resubmits_the_job(run: Run, refusing: int) -> None:
    run.slurm.job = RUNNING.replace("Requeue=1", "Requeue=0")
    assert first_is_lost(run, port=refusing).lose_first_node() == ["sbatch", "scancel"]
    assert "--dependency=afterany:41" in run.submissions()[0]
    assert run.events("submitted")[0]["resubmitted"] is True


@pytest.mark.parametrize(("requeue", "asked"), [(1, []), (0, ["sbatch"])])
def test_a_job_that_needs_all_nodes_is_ended_by_slurm(
    tmp_path: Path, refusing: int, requeue: int, asked: list[str]
) -> None:
    """And requeued, if the site allows it; else only another agent could submit a job again."""
    run = first_is_lost(Run(tmp_path), "ALLOCATED*", refusing)
    run.slurm.job = RUNNING.replace("Requeue=1", f"Requeue={requeue}")
    assert run.lose_first_node() == asked


def test_an_agent_that_was_cut_off_itself_leaves_it_to_others_to_ask_again(
    run: Run, slurmd: socket.socket
) -> None:
    slurmd.listen()
    first_is_lost(run, port=slurmd.getsockname()[1])
    assert run.lose_first_node() == []
    slurmd.close()
    assert run.lose_first_node() == PUT_BACK


@pytest.mark.parametrize("port", [0, 1], ids=["script", "node"])
def test_an_end_that_another_agent_records_holds_the_progress(run: Run, refusing: int, port: int) -> None:
    run.begin()
    first_is_lost(run, port=port * refusing)
    run.slurm.job = RUNNING if port else KILLED
    if not port:
        (run.folder.log_dir(0) / "exit-node-0").write_text("1\n")
    for action in SAVE.actions:
        action(run)
    run.lose_first_node(SLURM_NODEID=str(port))
    (end,) = run.events("ended")
    assert (end["outcome"], end["next"], end.get("progressed")) == (
        "stopped" if port else "failed",
        "requeue",
        True,
    )


def test_an_end_that_the_script_recorded_is_not_recorded_again(run: Run, refusing: int) -> None:
    """The node was lost before the script had asked SLURM."""
    first_is_lost(run, port=refusing)
    run.folder.add_event("ended", attempt=0, job_id="41", exit_code=75, outcome="stopped", next="requeue")
    assert run.lose_first_node() == PUT_BACK
    assert len(run.ends) == 1


def test_an_agent_of_an_older_attempt_leaves_the_run_alone(run: Run, refusing: int) -> None:
    run.folder.log_dir(1).mkdir(parents=True)
    assert first_is_lost(run, port=refusing).lose_first_node() == []
    assert run.ends == []


@pytest.mark.parametrize("file", ["stop", "cancelled"])
def test_a_run_that_a_person_ended_is_only_taken_out_of_slurm(run: Run, refusing: int, file: str) -> None:
    (run.folder.path / file).touch()
    assert first_is_lost(run, port=refusing).lose_first_node() == ["scancel"]


def test_a_node_that_slurm_does_not_give_up_is_not_waited_for_for_ever(tmp_path: Path, refusing: int) -> None:
    run = Run(tmp_path, elastic=True)
    assert first_is_lost(run, "ALLOCATED", refusing).lose_first_node() == []
    assert len(run.slept) == 90


# --- A batch script that is gone while agents live ---


def alive(run: Run, slurmd: socket.socket, job: str) -> Run:
    """Let the first node's slurmd answer, and SLURM say `job`."""
    slurmd.listen()
    run.slurm.job = job
    return first_is_lost(run, "ALLOCATED", port=slurmd.getsockname()[1])


@pytest.mark.parametrize(
    ("job", "asked"),
    [
        (f"{RUNNING} NodeList=n[2-3] ", PUT_BACK),
        (f"{KILLED} NodeList=n2 ", ["sbatch"]),
        (KILLED.replace("JobLaunchFailure", "NonZeroExitCode") + " NodeList=n2 ", ["sbatch"]),
        (KILLED.replace("JobLaunchFailure", "RaisedSignal:9(Killed)") + " NodeList=n2 ", ["sbatch"]),
    ],
)
@pytest.mark.parametrize(
    "words", ["srun: error: Node failure on n1\n", ""], ids=["srun has reported it", "not yet"]
)
def test_a_run_whose_live_first_node_was_set_down_avoids_that_node(
    run: Run, slurmd: socket.socket, job: str, asked: list[str], words: str
) -> None:
    alive(run, slurmd, job)
    (run.folder.log_dir(0) / "batch.log").write_text(words)
    assert [one for one in run.lose_first_node() if one != "scancel"] == asked
    assert [name for name, _ in noted(run)] == ["n1"]
    (end,) = run.events("ended")
    assert (end["outcome"], end["next"], end["lost"]) == (
        "stopped",
        asked[0].split()[0].replace("sbatch", "resubmit"),
        {"0": "n1"},
    )


@pytest.mark.parametrize(
    "job",
    [
        f"{RUNNING} NodeList=n[1-3] ",
        ENDING,
        KILLED.replace("JobLaunchFailure", "TimeLimit"),
        KILLED.replace("Restarts=0", "Restarts=1"),
        KILLED.replace("COMPLETING", "CANCELLED"),
    ],
    ids=["only the agent ended", "cancelled", "time limit", "requeued", "cancelled before"],
)
def test_a_job_that_has_its_script_is_left_alone(run: Run, slurmd: socket.socket, job: str) -> None:
    assert alive(run, slurmd, job).lose_first_node() == []


def test_a_script_that_has_recorded_its_end_is_not_gone(run: Run, slurmd: socket.socket) -> None:
    run.folder.add_event("ended", attempt=0, job_id="41", exit_code=75, outcome="failed", next="none")
    assert alive(run, slurmd, KILLED).lose_first_node() == []


@pytest.mark.parametrize(
    ("code", "end", "asked"),
    [
        (75, ("stopped", "requeue"), ["requeue 41"]),
        (0, ("finished", "none"), []),
        (1, ("failed", "none"), []),
    ],
)
@pytest.mark.parametrize("state", ["COMPLETING", "FAILED"])
def test_a_job_whose_script_was_killed_alone_is_requeued_and_no_host_is_blamed(
    run: Run, code: int, end: tuple[str, str], asked: list[str], state: str
) -> None:
    run.slurm.job = KILLED.replace("COMPLETING", state)
    log_dir = first_is_lost(run).folder.log_dir(0)
    (log_dir / "exit-node-0").write_text(f"{code}\n")
    assert [one for one in run.lose_first_node(SLURM_NODEID="0") if one != "scancel"] == asked
    assert run.end == end
    assert run.events("ended")[0]["exit_code"] == code
    assert "lost" not in run.events("ended")[0]


def test_a_state_that_slurm_has_not_seen_yet_is_waited_for(run: Run) -> None:
    def sees() -> None:
        run.slurm.job = KILLED

    run.on_sleep = sees
    (first_is_lost(run).folder.log_dir(0) / "exit-node-0").write_text("75\n")
    assert run.lose_first_node(SLURM_NODEID="0") == ["requeue 41"]
