"""Nodes that failed: which the batch step notes, and what it asks of SLURM for the next attempt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.batch import slurm_job
from slurmddp.runs.folder.excluded_nodes import FoundBy, adopt, exclude, share, shared_nodes
from slurmddp.slurm.command import CommandResult
from support.slurm.batch_run import (
    ENDING,
    FINISH,
    GIVEN_UP,
    LONG_AGO,
    RUNNING,
    SAVE,
    STOP,
    Run,
    Step,
    do,
    exits,
    leave,
    node,
    records,
    refused,
)

DAY_S = 24 * 3600
NEVER = "2099-01-01T00:00:00"
LOST = SAVE + leave({0: 75}, 75)
"""A step in which node 1 leaves no exit code."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return failing(Run(tmp_path))


def failing(run: Run, *nodes: str) -> Run:
    """Let n2 be down, or the nodes be as they are named."""
    run.slurm.nodes = "".join(nodes or (node("n1"), node("n2", "DOWN+NOT_RESPONDING")))
    return run


def refuse_all() -> CommandResult:
    return refused("allocation failure: Requested node configuration is not available\n")


def note(run: Run, name: str, *, age_s: int, lasts_s: int = DAY_S) -> None:
    """Let a node have failed under the run some time ago."""
    at = time.time() - age_s
    exclude(run.folder, name, "SLURM shows its state as DOWN", hours=lasts_s // 3600, now=at)


def asked_to_spare(run: Run) -> list[str]:
    """Return the node lists that SLURM was asked whether it would do without."""
    return [
        word.partition("=")[2]
        for call in run.questions_to_sbatch()
        for word in call
        if word.startswith("--exclude=")
    ]


# --- Which nodes ---


def test_a_node_that_is_down_is_noted_and_kept_out_of_the_next_attempt(tmp_path: Path) -> None:
    run, before = failing(Run(tmp_path, exclude_failed_h=2)), int(time.time())
    run.start(STOP)
    (entry,) = run.excluded()
    assert list(entry) == ["time", "node", "reason", "found_by", "expires"]
    assert (entry["node"], entry["reason"]) == ("n2", "SLURM shows its state as DOWN+NOT_RESPONDING")
    assert entry["time"] >= before
    assert entry["expires"] == entry["time"] + 7200
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]
    assert "Node n2 has failed: SLURM shows its state as DOWN+NOT_RESPONDING." in run.log()
    assert "The next attempt runs on other nodes than n2." in run.log()


@pytest.mark.parametrize(
    ("state", "failed"),
    [
        ("DOWN", True),
        ("DOWN*+CLOUD", True),
        ("MIXED*", True),
        ("FAIL+DRAIN", True),
        ("ALLOCATED+NOT_RESPONDING", True),
        ("IDLE+DRAIN", False),
        ("IDLE+POWERED_DOWN", False),
        ("MIXED+COMPLETING", False),
    ],
)
def test_states_that_say_that_a_node_failed(run: Run, state: str, failed: bool) -> None:
    failing(run, node("n1"), node("n2", state))
    run.start(STOP)
    assert [entry["node"] for entry in run.excluded()] == ["n2"] * failed
    assert len(run.asked()) == 1 + failed


def test_a_node_that_srun_lost_is_noted_though_it_is_back(run: Run) -> None:
    failing(run, node("n1"), node("n2", "IDLE"))
    srun = do(lambda run: (run.log_dir / "batch.log").write_text("srun: error: Node failure on n[2-3]\n"))
    run.start(srun + LOST)
    assert [(entry["node"], entry["reason"]) for entry in run.excluded()] == [
        ("n2", "srun reported its failure")
    ]


@pytest.mark.parametrize(
    ("step", "began", "failed"),
    [(LOST, NEVER, True), (LOST, LONG_AGO, False), (STOP, NEVER, False)],
    ids=["rebooted", "killed agent", "slurmd restarted under it"],
)
def test_a_node_whose_agent_is_gone_has_failed_if_it_was_started_again(
    run: Run, step: Step, began: str, failed: bool
) -> None:
    failing(run, node("n1"), node("n2", began=began))
    run.start(step)
    assert [entry["reason"] for entry in run.excluded()] == [
        "its slurmd has restarted since the attempt started"
    ] * failed


def test_a_node_that_the_preflight_found_unhealthy_is_kept_out_of_the_next_attempt(run: Run) -> None:
    """The ranks note it, before any step, and no other is known to have failed."""
    failing(run, node("n1"), node("n2"))
    noting = do(lambda run: exclude(run.folder, "n2", 'preflight: cuda:0 multiplies "wrongly".', hours=24))
    assert run.start(noting + records({"rank": 1, "exit_code": 76, "signal": None}) + exits(137)) == 76
    assert run.end == ("failed", "requeue")
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]


def test_nothing_is_noted_where_the_policy_says_so(tmp_path: Path) -> None:
    run = failing(Run(tmp_path, exclude_failed_h=0))
    note(run, "n1", age_s=10)
    run.start(STOP)
    assert len(run.excluded()) == 1
    assert run.asked() == ["requeue 41"]
    run.slurm.job = RUNNING.replace("Requeue=1", "Requeue=0")
    run.start(SAVE + STOP)
    assert not [word for word in run.submissions()[0] if word.startswith("--exclude")]


def test_nodes_that_left_no_exit_code_are_probed_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM may kill the batch step within seconds, and a node that is gone takes seconds to not answer."""
    names = [f"n{number}" for number in range(1, 6)]
    run = failing(Run(tmp_path, nodes=5), *(node(name, address=name, port=1) for name in names))
    all_asked = threading.Barrier(4)

    def is_reachable(address: str, port: str) -> bool:
        all_asked.wait(timeout=120)
        return True

    monkeypatch.setattr(slurm_job, "is_reachable", is_reachable)
    monkeypatch.setattr(slurm_job, "_CONNECT_S", 120.0)
    run.start(LOST, SLURM_JOB_NODELIST="n[1-5]")
    assert not all_asked.broken


def test_a_probe_that_hangs_is_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_CONNECT_S", -0.9)
    end, ended = threading.Event(), list[bool]()
    monkeypatch.setattr(slurm_job, "is_reachable", lambda *_: ended.append(end.wait(120)))
    failing(run, node("n1"), node("n2", address="n2", port=1))
    run.start(LOST)
    assert not ended
    end.set()
    assert [entry["reason"] for entry in run.excluded()] == ["its slurmd does not answer"]


# --- What is asked of SLURM ---


def test_a_job_that_slurm_requeued_gets_its_exclusions_at_once(run: Run) -> None:
    run.slurm.job = ENDING.replace("Restarts=0", "Restarts=1")
    ended: list[int] = []
    run.slurm.on["update"] = lambda: ended.append(len(run.events("ended")))
    run.start(exits(143))
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["update JobId=41 ExcNodeList=n2"]
    assert ended == [0]


def test_nodes_that_a_person_excludes_stay_excluded(run: Run) -> None:
    run.slurm.job = RUNNING + " ExcNodeList=n[6-7]"
    run.start(STOP)
    assert run.asked()[-1] == "update JobId=41 ExcNodeList=n2,n6,n7"


def test_a_person_may_exclude_a_node_that_the_run_has_noted(tmp_path: Path) -> None:
    run = failing(Run(tmp_path, sbatch={"exclude": "n[4-5]"}))
    note(run, "n4", age_s=2 * DAY_S)
    run.slurm.job = RUNNING + " ExcNodeList=n[4-5]"
    run.start(STOP)
    assert run.asked()[-1] == "update JobId=41 ExcNodeList=n2,n4,n5"


def test_an_entry_that_has_expired_is_taken_back(run: Run) -> None:
    failing(run, node("n1"), node("n2"))
    note(run, "n3", age_s=DAY_S + 10)
    run.slurm.job = RUNNING + " ExcNodeList=n3"
    run.slurm.on["test-only"] = refuse_all
    run.start(STOP)
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList="]
    assert "again:" not in run.log()


def test_entries_that_have_not_expired_stay_though_nothing_failed_this_time(run: Run) -> None:
    failing(run, node("n1"), node("n2"))
    note(run, "n3", age_s=DAY_S - 600)
    run.start(STOP)
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n3"]


def test_a_cluster_that_has_too_few_others_gives_the_node_again(run: Run) -> None:
    run.slurm.on["test-only"] = refuse_all
    run.start(STOP)
    assert run.asked() == ["requeue 41"]
    assert [entry["node"] for entry in run.excluded()] == ["n2"]
    refusal = "SLURM would refuse a job that excludes these failed nodes (allocation failure: "
    assert f"may run on n2 again: {refusal}" in run.log()


def test_where_not_all_can_be_spared_it_is_the_newest(run: Run) -> None:
    note(run, "n3", age_s=600)
    run.slurm.job = RUNNING + " ExcNodeList=n3"
    run.slurm.on["test-only"] = lambda: refuse_all() if len(run.questions_to_sbatch()) == 1 else None
    run.start(STOP)
    assert asked_to_spare(run) == ["n2,n3", "n2"]
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]


def test_a_slurm_that_refuses_the_exclusion_changes_nothing_else(run: Run) -> None:
    run.slurm.on["update"] = lambda: refused("Access/permission denied for job 41")
    assert run.start(STOP) == 75
    assert run.end == ("stopped", "requeue")
    assert len(run.asked()) == 2
    assert "SLURM refused to set the excluded nodes of this job to n2." in run.log()


def test_an_exclusion_that_slurm_can_not_take_yet_is_sent_again(run: Run) -> None:
    words = "Job update not available right now, the DB index is being set, try again in a bit for job 41"
    answers = iter([refused(words), refused(words)])
    run.slurm.on["update"] = lambda: next(answers, None)
    assert run.start(STOP) == 75
    assert run.asked() == ["requeue 41", *["update JobId=41 ExcNodeList=n2"] * 3]
    assert "The next attempt runs on other nodes than n2." in run.log()


def test_a_new_job_in_its_place_gets_other_nodes_too(run: Run) -> None:
    run.slurm.job = RUNNING.replace("Requeue=1", "Requeue=0") + " ExcNodeList=n7"
    run.start(STOP)
    assert run.end == ("stopped", "resubmit")
    assert run.asked() == ["sbatch"]
    assert "--exclude=n2,n7" in run.submissions()[0]


# --- What runs share ---


def test_other_runs_on_the_same_cluster_avoid_a_node_that_failed(tmp_path: Path) -> None:
    names = ("first", "second", "elsewhere")
    first, second, elsewhere = (Run(tmp_path / name) for name in names)
    note(first, "n9", age_s=600)
    failing(first).start(STOP, SLURM_CLUSTER_NAME="alpha")
    (shared,) = shared_nodes()
    assert (shared["cluster"], shared["node"], shared["run"]) == ("alpha", "n2", first.folder.name)
    second.slurm.config = "ClusterName = alpha\n"
    for _ in range(2):
        failing(second, node("n1")).start(STOP)
    failing(elsewhere, node("n1")).start(STOP, SLURM_CLUSTER_NAME="beta")
    assert second.asked()[:2] == ["requeue 41", "update JobId=41 ExcNodeList=n2"]
    assert second.excluded() == [shared]
    assert elsewhere.excluded() == []
    assert shared_nodes() == [shared]


@pytest.mark.parametrize(("found_by", "hours"), [("loss", 1), ("preflight", 24)])
def test_other_runs_avoid_a_node_that_was_only_lost_for_an_hour(
    run: Run, found_by: FoundBy, hours: int
) -> None:
    """Its link may have been cut for a minute, and SLURM calls it idle again."""
    now = time.time()
    exclude(run.folder, "n2", "preflight: srun reported its failure", hours=24, found_by=found_by)
    share(run.folder, "alpha", since=now - 1)
    (note,) = shared_nodes()
    assert note["expires"] - now == pytest.approx(hours * 3600, abs=60)
    adopt(run.folder, "alpha")
    assert len(run.excluded()) == 1, "the run's own note stands"


def test_a_run_that_avoids_no_nodes_neither_shares_nor_adopts_them(tmp_path: Path, run: Run) -> None:
    careless = failing(Run(tmp_path / "careless", exclude_failed_h=0))
    careless.start(STOP, SLURM_CLUSTER_NAME="alpha")
    assert shared_nodes() == []
    run.start(STOP, SLURM_CLUSTER_NAME="alpha")
    careless.start(STOP, SLURM_CLUSTER_NAME="alpha")
    assert careless.excluded() == [] and len(shared_nodes()) == 1


# --- When nobody was left to note it ---


def starts_at(when: Callable[[], str]) -> Callable[[], CommandResult]:
    return lambda: CommandResult(
        0, err=f"sbatch: Job 7 to start at {when()} using 1 processors on nodes n5\n"
    )


SOON = starts_at(lambda: time.strftime("%Y-%m-%dT%H:%M:%S"))
LATER = starts_at(lambda: NEVER)


def vanished(run: Run, **facts: Any) -> Run:
    """Let an attempt on n[1-2] have left no end, and its batch host be started again since."""
    run.folder.log_dir(0).mkdir(parents=True)
    facts = {"job_id": "41", "nodes": "n[1-2]", **facts}
    run.folder.add_event("started", attempt=0, restart_count=0, launcher="slurm", **facts)
    run.slurm.on["test-only"] = SOON
    return failing(run, node("n1", began=NEVER), node("n2", began=NEVER))


def again(run: Run, **environ: str) -> int:
    return run.start(FINISH, **{"SLURM_RESTART_COUNT": "1", **environ})


def test_an_attempt_that_is_given_its_failed_node_again_leaves_it_to_others(run: Run) -> None:
    assert again(vanished(run)) == 0
    assert [(entry["node"], entry["reason"]) for entry in run.excluded()] == [
        ("n1", "its slurmd has restarted since the attempt started")
    ]
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n1"]
    assert run.folder.attempts() == [0]
    assert {"--nodes=1", "--exclude=n1,n2"} <= set(run.questions_to_sbatch()[0])


def test_it_asks_for_as_many_others_as_it_was_given_failed_nodes(run: Run) -> None:
    note(run, "n2", age_s=600)
    again(vanished(run))
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n1,n2"]
    assert {"--nodes=2", "--exclude=n1,n2"} <= set(run.questions_to_sbatch()[0])


@pytest.mark.parametrize(
    "answer", [LATER, refuse_all, lambda: CommandResult(0)], ids=["later", "never", "silent"]
)
def test_it_stays_where_no_others_are_free_now(run: Run, answer: Callable[[], CommandResult]) -> None:
    vanished(run).slurm.on["test-only"] = answer
    assert again(run) == 0
    assert run.end == ("finished", "none")
    assert run.asked() == []
    assert [entry["node"] for entry in run.excluded()] == ["n1"]


def test_it_leaves_only_once(run: Run) -> None:
    again(vanished(run))
    again(run, SLURM_RESTART_COUNT="2")
    assert run.end == ("finished", "none")
    assert len(run.excluded()) == 1
    assert len(run.asked()) == 2


def test_it_stays_where_it_could_not_note_that_it_leaves(run: Run) -> None:
    """It would leave again at each start."""
    vanished(run).folder.excluded_file.mkdir()
    assert again(run) == 0
    assert run.asked() == [] and run.end == ("finished", "none")


def test_it_continues_when_slurm_does_not_requeue_it(run: Run) -> None:
    vanished(run).slurm.on["requeue"] = refused
    run.slurm.job = f"Requeue=1 {GIVEN_UP}"
    assert run.start(exits(137), terminated=True, SLURM_RESTART_COUNT="1", SLURMD_NODENAME="n1") == 137
    assert run.folder.attempts() == [0, 1]


def test_it_stays_on_nodes_that_did_not_fail(run: Run) -> None:
    again(vanished(run), SLURM_JOB_NODELIST="n[2-3]")
    assert run.end == ("finished", "none")
    assert run.asked() == []
    assert [entry["node"] for entry in run.excluded()] == ["n1"]


@pytest.mark.parametrize("changes", [{"requeue": False}, {}], ids=["policy", "job"])
def test_it_stays_where_nothing_may_be_requeued(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = vanished(Run(tmp_path, **changes))
    if not changes:
        run.slurm.job = RUNNING.replace("Requeue=1", "Requeue=0")
    again(run)
    assert run.end == ("finished", "none")
    assert run.asked() == []


def test_an_attempt_that_recorded_its_end_is_not_suspected(run: Run) -> None:
    vanished(run).folder.add_event("ended", attempt=0, job_id="41", outcome="stopped", next="requeue")
    again(run)
    assert run.excluded() == []
