"""A run on this machine: its nodes, failures, restarts and records; ranks here need no torch."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slurmddp.control.hold import keep
from slurmddp.errors import ConfigError, NoProgressError, RankFailure
from slurmddp.launchers.local.run import check_size
from slurmddp.runs.failures import capture
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.lock import RunLock
from slurmddp.settings.schema import PolicySettings
from slurmddp.settings.spec import Program
from support.runs.agent_runs import (
    SAVING,
    all_gone,
    children_of,
    events,
    wait_for_lines,
    wait_until,
)
from support.runs.local_runs import local_run, terminal

CHECKPOINT = """
import os, pathlib, sys
attempt = int(os.environ["SLURMDDP_ATTEMPT"])
def save(run_dir, step):
    root = pathlib.Path(run_dir, "checkpoints")
    root.mkdir(exist_ok=True)
    (root / "latest").write_text(f"step-{step:010d}\\n")
"""


def test_pretended_nodes_train_as_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "17")
    monkeypatch.setenv("RANK", "17")
    program = (
        "import json, os\ndef main(run_dir):\n"
        "    names = ['RANK', 'NODE_RANK', 'WORLD_SIZE', 'SLURM_PROCID', "
        "'SLURM_JOB_ID', 'FROM_CLUSTER', 'SLURMDDP_EMULATED', 'SLURMDDP_SECRET']\n"
        "    print(json.dumps({name: os.environ.get(name) for name in names}))\n    return 0\n"
    )
    run = local_run(tmp_path, program, nodes=2)
    run.start()
    ticks: list[int] = []
    assert run.wait(lambda: ticks.append(1)) == 0
    assert ticks
    (started,) = events(run.folder, "started")
    found = [json.loads(run.folder.rank_log(0, rank).read_text()) for rank in range(4)]
    assert [place["RANK"] for place in found] == [place["SLURM_PROCID"] for place in found] == list("0123")
    assert [place["NODE_RANK"] for place in found] == list("0011")
    (number,) = {place["SLURM_JOB_ID"] for place in found}
    assert 1 << 26 < int(number) < 1 << 32, "SLURM would take it for an id, but has no such job"
    assert started["job_id"] == f"local-{number}"
    assert {(place["WORLD_SIZE"], place["FROM_CLUSTER"], place["SLURMDDP_EMULATED"]) for place in found} == {
        ("4", "a b", "1")
    }
    (secret,) = {place["SLURMDDP_SECRET"] for place in found}
    assert len(bytes.fromhex(secret)) == 16
    (ended,) = events(run.folder, "ended")
    assert (ended["exit_code"], ended["outcome"], ended["next"]) == (0, "finished", "none")
    assert (started["pid"], started["launcher"]) == (os.getpid(), "local")


OWN_FILES = Program(target="rank_program.main", config={"program": {"checkpoints": "out"}})
TO_ANOTHER_MACHINE = "pathlib.Path(run_dir, 'logs', f'attempt-{attempt + 1}').mkdir()"


@pytest.mark.parametrize(
    ("ranks", "changes", "following"),
    [
        ("save(run_dir, attempt + 1); return 3 * (attempt < 2)", {}, ["requeue", "requeue", "none"]),
        (
            "save(run_dir, attempt + 1); return 3",
            {"policy": PolicySettings(max_restarts=1)},
            ["requeue", "none"],
        ),
        (
            "save(run_dir, 7); return 3",
            {"policy": PolicySettings(max_restarts=9)},
            ["requeue", "requeue", "none"],
        ),
        ("return 3", {}, ["none"]),
        (
            "pathlib.Path('out').write_text('x' * min(attempt, 1)); return 3",
            {"program": OWN_FILES},
            ["requeue", "requeue", "requeue", "none"],
        ),
        ("save(run_dir, attempt + 1); open(run_dir + '/stop', 'w').close(); return 3", {}, ["none"]),
        (f"save(run_dir, attempt + 1); {TO_ANOTHER_MACHINE}; return 3", {}, []),
    ],
    ids=["got further", "restarts", "progress once", "no progress", "own files", "stopped", "superseded"],
)
def test_what_follows_a_failure(
    tmp_path: Path, ranks: str, changes: dict[str, Any], following: list[str]
) -> None:
    program = f"{CHECKPOINT}def main(run_dir):\n    {ranks}\n"
    told: list[str] = []
    run = local_run(tmp_path, program, ranks_per_node=1, say=told.append, **changes)
    run.start()

    def show_ends() -> None:
        told.extend(["end"] * (len(events(run.folder, "ended")) - told.count("end")))

    if "attempt < 2" in ranks:
        assert run.wait(show_ends) == 0
        shown = [text if text == "end" else text.partition(". ")[2] for text in told]
        again = "Starting again ({} of 3 restarts)."
        assert shown[:4] == ["end", again.format(1), "end", again.format(2)]
    else:
        with pytest.raises(RankFailure, match="ended with exit code 3"):
            run.wait()
    ended, started = events(run.folder, "ended"), events(run.folder, "started")
    assert [event["next"] for event in ended] == following
    attempts = list(range(len(following) or 1))
    assert [(event["attempt"], event["restart_count"]) for event in started] == [
        (attempt, attempt) for attempt in attempts
    ]


def test_a_failure_is_told_at_once(tmp_path: Path) -> None:
    run = local_run(tmp_path, "def main(run_dir): raise ValueError('always')")
    run.start()
    with pytest.raises(RankFailure, match="ValueError: always") as raised:
        run.wait()
    assert str(run.folder.log_dir(0) / "rank-") in raised.value.hint
    assert [event["outcome"] for event in events(run.folder, "ended")] == ["failed"]


@pytest.mark.parametrize(
    ("code", "kind", "outcome"), [(78, ConfigError, "config"), (79, NoProgressError, "no_progress")]
)
def test_a_refusal_keeps_its_code(tmp_path: Path, code: int, kind: type[Exception], outcome: str) -> None:
    run = local_run(
        tmp_path, f"def main(run_dir): print('because'); return {code}", nodes=2, ranks_per_node=1
    )
    run.start()
    with pytest.raises(kind, match="because"):
        run.wait()
    assert [event["outcome"] for event in events(run.folder, "ended")] == [outcome]


def test_an_error_while_watching_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("the display broke")

    run = local_run(tmp_path, SAVING)
    others = children_of(os.getpid())
    run.start()
    wait_for_lines(run.folder, "ready", 2)
    left = [process for process in children_of(os.getpid()) if process not in others]
    with pytest.raises(RuntimeError, match="the display broke"):
        run.wait(broken)
    wait_until(lambda: all_gone(left), "agents and ranks end")


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    with terminal(tmp_path) as (person, folder):
        with pytest.raises(ConfigError, match="is being trained by another process"):
            keep(RunLock(folder), folder.name)
        assert folder.attempts() == [0]
        person.send_signal(signal.SIGINT)
        assert person.wait(timeout=120) == 75
    with RunLock(folder) as lock:
        assert lock.acquire()


@pytest.mark.parametrize(
    ("ranks", "cpus", "warns"), [(2, 2, False), (8, 2, False), (9, 2, True), (64, 2, True)]
)
def test_a_crowded_machine_is_pointed_out(ranks: int, cpus: int, warns: bool) -> None:
    assert bool(check_size(ranks, cpus)) is warns


def test_a_hopeless_size_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = local_run(tmp_path, "", nodes=1000, ranks_per_node=8)
    with pytest.raises(ConfigError, match="8000 ranks are too many for this machine"):
        run.start()
    assert run.folder.attempts() == []


def full(*words: Any, **facts: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail every event after the first one; return the lines shown to the person."""
    told: list[str] = []
    add = RunFolder.add_event

    def add_event(self: RunFolder, event: str, **facts: Any) -> None:
        full() if event == "ended" else add(self, event, **facts)

    monkeypatch.setattr(RunFolder, "add_event", add_event)
    return told


def test_on_a_full_disk_a_training_that_finished_has_finished(tmp_path: Path, said: list[str]) -> None:
    run = local_run(tmp_path, "def main(run_dir): return 0", ranks_per_node=1, say=said.append)
    run.start()
    assert run.wait() == 0
    assert said == ["The event `ended` was not recorded: [Errno 28] No space left on device"]


def test_on_a_full_disk_a_failure_is_told(tmp_path: Path, said: list[str]) -> None:
    run = local_run(tmp_path, "def main(run_dir): return 3", ranks_per_node=1, say=said.append)
    run.start()
    with pytest.raises(RankFailure, match="exit code 3"):
        run.wait()
    assert len(said) == 1


def test_on_a_full_disk_an_agent_that_is_gone_ends_the_run(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = local_run(tmp_path, agent="raise SystemExit(1)", say=said.append)
    monkeypatch.setattr(capture, "record", full)
    run.start()
    with pytest.raises(RankFailure, match=r"A rank failed\."):
        run.wait()
    assert [line.split(" was not ")[0] for line in said] == ["The failure", "The event `ended`"]


def test_the_command_of_the_events_gets_start_and_end_of_a_run_here(tmp_path: Path) -> None:
    policy = PolicySettings(on_event=("sh", "-c", f"cat >>{tmp_path}/told-$SLURMDDP_EVENT; exit 1"))
    run = local_run(tmp_path, agent="raise SystemExit(1)", policy=policy)
    run.start()
    with pytest.raises(RankFailure):
        run.wait()
    told = {file.name: file.read_text().splitlines() for file in tmp_path.glob("told-*")}
    assert {name: len(lines) for name, lines in told.items()} == {"told-started": 1, "told-failed": 1}
    (failed,) = map(json.loads, told["told-failed"])
    assert (failed["attempt"], failed["exit_code"], failed["run"]) == (0, 1, run.folder.name)
    assert len(events(run.folder, "warned")) == 2
