"""What the batch script does about nodes that failed: which it notes, and what it asks of SLURM then."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from script_run import ENDING, GIVEN_UP, RUNNING, SAVE, STOP, TERM_THE_SCRIPT, Run

from slurmddp.runs.folder.excluded import exclude

DAY_S = 24 * 3600
REFUSE_ALL = 'echo "allocation failure: Requested node configuration is not available" >&2; exit 1'
LONG_AGO = "2020-01-01T00:00:00"
LOST = SAVE + 'echo 75 >"$logs/exit-node-0"; exit 75'
"""A step in which node 1 leaves no word."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return failing(Run(tmp_path))


def node(name: str, state: str = "ALLOCATED", began: str = LONG_AGO) -> str:
    return (
        f"NodeName={name} Arch=x86_64 State={state} Partitions=low SlurmdStartTime={began} LastBusyTime=None"
    )


def failing(run: Run, *nodes: str) -> Run:
    """Let n2 be down, or the nodes be as they are named."""
    run.programs.write("nodes", "\n".join(nodes or (node("n1"), node("n2", "DOWN+NOT_RESPONDING"))) + "\n")
    return run


def noted(run: Run) -> list[dict[str, Any]]:
    path = run.folder.path / "excluded.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(run: Run, name: str, *, age_s: int, lasts_s: int = DAY_S) -> None:
    """Let a node have failed under the run some time ago."""
    at = int(time.time()) - age_s
    with (run.folder.path / "excluded.jsonl").open("a") as stream:
        line = {"time": at, "node": name, "reason": "SLURM calls it DOWN", "expires": at + lasts_s}
        stream.write(json.dumps(line) + "\n")


def log(run: Run, attempt: int = 0) -> str:
    return (run.folder.log_dir(attempt) / "batch.log").read_text()


def asked_to_spare(run: Run) -> list[str]:
    """Return the node lists that SLURM was asked whether it would do without."""
    calls = run.programs.read("test-only.calls").splitlines()
    return [call.partition("--exclude=")[2].split()[0] for call in calls]


# --- Which nodes ---


def test_a_node_that_is_down_is_noted_and_kept_out_of_the_next_attempt(run: Run) -> None:
    before = int(time.time())
    run.start(STOP)
    (entry,) = noted(run)
    assert list(entry) == ["time", "node", "reason", "expires"]
    assert (entry["node"], entry["reason"]) == ("n2", "SLURM calls it DOWN+NOT_RESPONDING")
    assert entry["time"] >= before
    assert entry["expires"] == entry["time"] + DAY_S
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]
    assert "Node n2 has failed: SLURM calls it DOWN+NOT_RESPONDING." in log(run)
    assert "The next attempt runs on other nodes than n2." in log(run)


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
    assert [entry["node"] for entry in noted(run)] == ["n2"] * failed
    assert len(run.asked()) == 1 + failed


def test_a_node_that_srun_lost_is_noted_though_it_is_back(run: Run) -> None:
    failing(run, node("n1"), node("n2", "IDLE"))
    run.start("echo 'srun: error: Node failure on n[2-3]'\n" + LOST)
    assert [(entry["node"], entry["reason"]) for entry in noted(run)] == [("n2", "SLURM gave it up")]


@pytest.mark.parametrize(
    ("step", "began", "failed"),
    [(LOST, "2099-01-01T00:00:00", True), (LOST, LONG_AGO, False), (STOP, "2099-01-01T00:00:00", False)],
    ids=["rebooted", "killed agent", "slurmd restarted under it"],
)
def test_a_node_whose_agent_is_gone_has_failed_if_it_was_started_anew(
    run: Run, step: str, began: str, failed: bool
) -> None:
    failing(run, node("n1"), node("n2", began=began))
    run.start(step)
    assert [entry["reason"] for entry in noted(run)] == ["it was started again"] * failed


def test_a_node_that_the_preflight_found_unfit_is_kept_out_of_the_next_attempt(run: Run) -> None:
    """The ranks note it, before any step, and no other is known to have failed."""
    failing(run, node("n1"), node("n2"))
    exclude(run.folder, "n2", 'preflight: cuda:0 multiplies "wrongly" in torch.float32.', hours=24)
    line = (run.folder.path / "excluded.jsonl").read_text()
    (run.folder.path / "excluded.jsonl").unlink()
    run.programs.write("noted", line)
    noting = f'cat {run.programs.folder}/noted >>"$SLURMDDP_RUN_DIR/excluded.jsonl"\n'
    failed = 'printf \'{"rank": 1,\n "exit_code": 76,\n "signal": null}\n\' >"$logs/failure.json"\n'
    assert run.start(noting + failed + "exit 137") == 76
    assert run.end == ("failed", "requeue")
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]


def test_nothing_is_noted_where_the_policy_says_so(tmp_path: Path) -> None:
    run = failing(Run(tmp_path, exclude_failed_h=0))
    note(run, "n1", age_s=10)
    run.start(STOP)
    assert len(noted(run)) == 1
    assert run.asked() == ["requeue 41"]
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.start(SAVE + STOP)
    assert "--exclude" not in run.programs.read("sbatch.argv")


def test_the_policy_says_for_how_long(tmp_path: Path) -> None:
    run = failing(Run(tmp_path, exclude_failed_h=2))
    run.start(STOP)
    assert noted(run)[0]["expires"] - noted(run)[0]["time"] == 7200


def test_nodes_that_left_no_word_are_probed_side_by_side(tmp_path: Path) -> None:
    """SLURM may kill the script within seconds, and a node that is gone takes seconds to give no answer."""
    run = failing(Run(tmp_path, nodes=5), *(node(f"n{number}") for number in range(1, 6)))
    wait = "for _ in $(seq 200); do set -- asked-*; [ $# -lt 4 ] || break; /bin/sleep 0.1; done"
    run.programs.write("on-node", f'touch "asked-$4"; {wait}; [ $# -ge 4 ] || touch one-by-one')
    run.start(LOST, SLURM_JOB_NODELIST="n[1-5]")
    assert len(list(run.programs.folder.glob("asked-*"))) == 4
    assert not (run.programs.folder / "one-by-one").exists()


# --- What is asked of SLURM ---


def test_a_job_that_slurm_itself_put_back_is_told_at_once(run: Run) -> None:
    run.programs.write("job", ENDING.replace("Restarts=0", "Restarts=1"))
    run.programs.write("update", f'cp "{run.folder.attempts_file}" before')
    run.start("exit 143")
    assert run.end == ("stopped", "requeue")
    assert run.asked() == ["update JobId=41 ExcNodeList=n2"]
    assert '"ended"' not in run.programs.read("before")


def test_what_a_person_excludes_stays_excluded(run: Run) -> None:
    run.programs.write("job", RUNNING + " ExcNodeList=n[6-7]")
    run.start(STOP)
    assert run.asked()[-1] == "update JobId=41 ExcNodeList=n2,n6,n7"


def test_a_person_may_exclude_what_the_run_has_noted(tmp_path: Path) -> None:
    run = failing(Run(tmp_path, sbatch={"exclude": "n[4-5]"}))
    note(run, "n4", age_s=2 * DAY_S)
    run.programs.write("job", RUNNING + " ExcNodeList=n[4-5]")
    run.start(STOP)
    assert run.asked()[-1] == "update JobId=41 ExcNodeList=n2,n4,n5"


def test_an_entry_that_has_expired_is_taken_back(run: Run) -> None:
    failing(run, node("n1"), node("n2"))
    note(run, "n3", age_s=DAY_S + 10)
    run.programs.write("job", RUNNING + " ExcNodeList=n3")
    run.programs.write("test-only", REFUSE_ALL)
    run.start(STOP)
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList="]
    assert "again:" not in log(run)


def test_entries_that_have_not_expired_stay_though_nothing_failed_this_time(run: Run) -> None:
    failing(run, node("n1"), node("n2"))
    note(run, "n3", age_s=DAY_S - 600)
    run.start(STOP)
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n3"]


def test_a_cluster_that_has_too_few_others_gives_the_node_again(run: Run) -> None:
    run.programs.write("test-only", REFUSE_ALL)
    run.start(STOP)
    assert run.asked() == ["requeue 41"]
    assert [entry["node"] for entry in noted(run)] == ["n2"]
    assert "may run on n2 again: SLURM would not take the job without (allocation failure: " in log(run)


def test_where_not_all_can_be_spared_it_is_the_newest(run: Run) -> None:
    note(run, "n3", age_s=600)
    run.programs.write("job", RUNNING + " ExcNodeList=n3")
    run.programs.write("test-only", f'[[ "$*" == *=n2,n3* ]] || exit 0; {REFUSE_ALL}')
    run.start(STOP)
    assert asked_to_spare(run) == ["n2,n3", "n2"]
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n2"]


def test_a_slurm_that_refuses_the_exclusion_changes_nothing_else(run: Run) -> None:
    run.programs.write("update", 'echo "Access/permission denied for job 41" >&2; exit 1')
    assert run.start(STOP) == 75
    assert run.end == ("stopped", "requeue")
    assert len(run.asked()) == 2
    assert "SLURM does not let this job exclude n2." in log(run)


def test_a_new_job_in_its_place_gets_other_nodes_too(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0") + " ExcNodeList=n7")
    run.start(STOP)
    assert run.end == ("stopped", "resubmit")
    assert run.asked() == ["sbatch"]
    assert "--exclude=n2,n7" in run.programs.read("sbatch.argv").splitlines()


def test_a_new_job_gets_the_same_nodes_where_there_are_no_others(run: Run) -> None:
    run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.programs.write("test-only", REFUSE_ALL)
    run.start(STOP)
    assert run.asked() == ["sbatch"]
    assert "--exclude" not in run.programs.read("sbatch.argv")


# --- When nobody was left to note it ---

SOON = 'echo "sbatch: Job 7 to start at $(date +%Y-%m-%dT%H:%M:%S) using 1 processors on nodes n5" >&2'
LATER = 'echo "sbatch: Job 7 to start at 2099-01-01T00:00:00 using 1 processors on nodes n5" >&2'


def vanished(run: Run, **facts: Any) -> Run:
    """Let an attempt on n[1-2] have left no word of its end, and its batch host be started again since."""
    run.folder.log_dir(0).mkdir(parents=True)
    facts = {"job_id": "41", "nodes": "n[1-2]", **facts}
    run.folder.add_event("started", attempt=0, restart_count=0, launcher="slurm", **facts)
    return failing(run, node("n1", began="2099-01-01T00:00:00"), node("n2", began="2099-01-01T00:00:00"))


def test_an_attempt_that_is_given_its_failed_node_again_leaves_it_to_others(run: Run) -> None:
    vanished(run).programs.write("test-only", SOON)
    assert run.start(SLURM_RESTART_COUNT="1") == 0
    assert [(entry["node"], entry["reason"]) for entry in noted(run)] == [("n1", "it was started again")]
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n1"]
    assert run.folder.attempts() == [0]
    asked = run.programs.read("test-only.calls").splitlines()[0]
    assert "--nodes=1 --exclude=n1,n2 " in asked


def test_it_asks_for_as_many_others_as_it_was_given_failed_nodes(run: Run) -> None:
    note(run, "n2", age_s=600)
    vanished(run).programs.write("test-only", SOON)
    run.start(SLURM_RESTART_COUNT="1")
    assert run.asked() == ["requeue 41", "update JobId=41 ExcNodeList=n1,n2"]
    assert "--nodes=2 --exclude=n1,n2 " in run.programs.read("test-only.calls").splitlines()[0]


@pytest.mark.parametrize("answer", [LATER, REFUSE_ALL, "exit 0"], ids=["later", "never", "no word"])
def test_it_stays_where_no_others_are_free_now(run: Run, answer: str) -> None:
    vanished(run).programs.write("test-only", answer)
    assert run.start(SLURM_RESTART_COUNT="1") == 0
    assert run.end == ("finished", "none")
    assert run.asked() == []
    assert [entry["node"] for entry in noted(run)] == ["n1"]


def test_it_leaves_only_once(run: Run) -> None:
    vanished(run).programs.write("test-only", SOON)
    run.start(SLURM_RESTART_COUNT="1")
    run.start(SLURM_RESTART_COUNT="2")
    assert run.end == ("finished", "none")
    assert len(noted(run)) == 1
    assert len(run.asked()) == 2


def test_it_still_hears_that_slurm_ends_it_when_slurm_does_not_put_it_back(run: Run) -> None:
    vanished(run).programs.write("test-only", SOON)
    run.programs.write("job", f"Requeue=1 {GIVEN_UP}")
    run.programs.write("requeue", "exit 1")
    step = f"{TERM_THE_SCRIPT}; /bin/sleep 0.3; exit 137"
    assert run.start(step, SLURM_RESTART_COUNT="1", SLURMD_NODENAME="n1") == 137
    assert "waiting to be ended" not in log(run, 1)


def test_it_stays_on_nodes_that_did_not_fail(run: Run) -> None:
    vanished(run).programs.write("test-only", SOON)
    run.start(SLURM_RESTART_COUNT="1", SLURM_JOB_NODELIST="n[2-3]")
    assert run.end == ("finished", "none")
    assert run.asked() == []
    assert [entry["node"] for entry in noted(run)] == ["n1"]


@pytest.mark.parametrize("changes", [{"requeue": False}, {}], ids=["policy", "job"])
def test_it_stays_where_nothing_may_be_put_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = vanished(Run(tmp_path, **changes))
    run.programs.write("test-only", SOON)
    if not changes:
        run.programs.write("job", RUNNING.replace("Requeue=1", "Requeue=0"))
    run.start(SLURM_RESTART_COUNT="1")
    assert run.end == ("finished", "none")
    assert run.asked() == []


def test_an_attempt_that_told_its_end_is_not_suspected(run: Run) -> None:
    vanished(run).folder.add_event("ended", attempt=0, job_id="41", outcome="stopped", next="requeue")
    run.start(SLURM_RESTART_COUNT="1")
    assert noted(run) == []
